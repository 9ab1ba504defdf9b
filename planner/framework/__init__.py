"""The software that runs a step: what its kernels, its overlap and its state differ in."""
