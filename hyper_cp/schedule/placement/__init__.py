"""Layouts that depend on documents: the cost of a placement, the deal of ``"balanced"``, the choice of ``"auto"``."""
