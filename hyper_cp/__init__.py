"""hyper_cp: context parallelism for PyTorch models, as one ParallelStyle."""

from .buffers import context_parallel
from .factory import get_cp_handler_cls
from .handler import ContextParallelHandler
from .style import ContextParallel, styled_modules

__version__ = "0.1.0.dev0"

__all__ = ["ContextParallel", "ContextParallelHandler", "context_parallel", "get_cp_handler_cls", "styled_modules"]
