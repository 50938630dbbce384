"""The pieces of ``hyper-cp doctor``: the machine, its kernels, every exchange, and the speed of links and devices."""
