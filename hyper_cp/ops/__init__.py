"""The engine: context-parallel attention as a function, and the names of its ops."""

from .attention import SAVE_LIST, attention

__all__ = ["SAVE_LIST", "attention"]
