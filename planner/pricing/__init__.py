"""The price of a model under layouts: the ILP that chooses them inside a block, and its answers."""
