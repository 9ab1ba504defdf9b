"""Measured runs, priced: what the cost model says of layouts that people have timed."""
