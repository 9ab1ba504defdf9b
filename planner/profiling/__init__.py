"""Measuring the machine that it runs on, for profiles."""
