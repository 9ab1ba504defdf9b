"""Traced models that the search tests share; this folder is on the import path of its tests."""

from searches import big_gpt, gpt, llama, mlp

__all__ = ["big_gpt", "gpt", "llama", "mlp"]
