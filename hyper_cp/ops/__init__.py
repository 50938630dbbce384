"""The engine: context-parallel attention as a function, the names of its ops, the balance of layouts."""

from .attention import SAVE_LIST, attention
from .placement import Balance, balance

__all__ = ["SAVE_LIST", "Balance", "attention", "balance"]
