"""Times and memory that are measured on this machine."""
