"""hyper_cp: context parallelism for PyTorch models, as one ParallelStyle."""

from ._torch.version import warn_if_unsupported

warn_if_unsupported()  # before imports that may fail in such a version

# isort: split
from .context_manager import context_parallel
from .data.dynamic import CostModel, DynamicContextParallel
from .data.dynamic_batches import DynamicBatches
from .dynamic_steps import dynamic_steps
from .handler import ContextParallelHandler
from .integrations.megatron import get_cp_handler_cls
from .mesh.family import MeshFamily, split_cp_mesh
from .mesh_swap import context_parallel_mesh
from .module.latent_weight import latents_and_weight
from .parallelize import parallelize
from .planner import PlanReport, plan
from .planner.samples import cost_model
from .style import ContextParallel, RecurrentContextParallel, styled_modules
from .tiled import tiled
from .verify import verify

__version__ = "0.2.0"

__all__ = [
    "ContextParallel",
    "ContextParallelHandler",
    "CostModel",
    "DynamicBatches",
    "DynamicContextParallel",
    "MeshFamily",
    "PlanReport",
    "RecurrentContextParallel",
    "context_parallel",
    "context_parallel_mesh",
    "cost_model",
    "dynamic_steps",
    "get_cp_handler_cls",
    "latents_and_weight",
    "parallelize",
    "plan",
    "split_cp_mesh",
    "styled_modules",
    "tiled",
    "verify",
]
