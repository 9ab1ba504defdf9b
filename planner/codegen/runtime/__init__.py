"""What is copied as it is beside an emitted script."""
