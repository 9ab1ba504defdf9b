"""Recording one training step on tensors without data."""
