"""Models of time: real schedules and messages, with simulated kernels and links."""
