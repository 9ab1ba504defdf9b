"""Predictions held to measurements: errors, regret, memory, verdicts."""
