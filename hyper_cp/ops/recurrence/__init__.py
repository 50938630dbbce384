"""Layers whose state runs along the sequence: linear recurrences and short convolutions over a split sequence."""
