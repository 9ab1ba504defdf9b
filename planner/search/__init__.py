"""The search: the ILP over degrees and stages, its bounds, and plans from its answers."""
