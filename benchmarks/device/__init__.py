"""Checks and times on an accelerator: ``check`` on one device, ``overlap`` on all of a host."""
