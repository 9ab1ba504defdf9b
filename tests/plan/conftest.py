"""Finds the traced models and searches, which the search tests own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "search"))
