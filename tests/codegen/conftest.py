"""Finds the hand-made plans, which the run tests own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "run"))
