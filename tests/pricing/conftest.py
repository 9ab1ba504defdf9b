"""The traced models of the search tests serve these as well."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "search"))

from searches import big_gpt, gpt, llama

__all__ = ["big_gpt", "gpt", "llama"]
