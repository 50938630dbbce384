"""The comparison with plain SDPA and with other libraries, in turns in one process group."""
