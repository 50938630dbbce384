"""The engine: context-parallel attention as a function, the names of its ops, the balance of layouts."""

from ..schedule.placement.balance import Balance, balance
from .attention import SAVE_LIST, attention

__all__ = ["SAVE_LIST", "Balance", "attention", "balance"]
