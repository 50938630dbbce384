"""What is planned for: sizes of a model, devices and links, and the checks of their numbers."""
