"""Puts the scripts of ``tests/bench`` on the import path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
