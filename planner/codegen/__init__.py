"""From a plan to a training script that stands on torch alone."""
