"""Tracing a PyTorch model into an operator graph."""
