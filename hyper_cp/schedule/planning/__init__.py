"""The cost of a training step in every strategy: work, bytes, time and memory, from schedules and formulas alone."""
