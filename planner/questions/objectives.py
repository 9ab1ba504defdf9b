"""What a sweep can pick."""

OBJECTIVES = ("step", "gpus", "cost")
"""The most tokens per second, the fewest devices, the least cost of a token."""
