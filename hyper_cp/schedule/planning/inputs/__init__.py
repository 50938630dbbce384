"""The inputs of a plan: sizes of a model, devices and links, and the checks of their numbers."""
