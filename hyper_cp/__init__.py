"""hyper_cp: context parallelism for PyTorch models, as one ParallelStyle."""

from .handler import ContextParallelHandler
from .style import ContextParallel, styled_modules

__version__ = "0.1.0.dev0"

__all__ = ["ContextParallel", "ContextParallelHandler", "styled_modules"]
