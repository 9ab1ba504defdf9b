"""Dividing a recorded step: blocks, units, cuts."""
