"""A long run of random steps, each compared with one device."""
