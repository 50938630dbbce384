"""Detect sums over tensor-parallel ranks that were not made: both runs lack them, so that a comparison cannot."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...data.collectives import by_rank
from ...module.dtensor import CPDims

SUMMED_OVER = {nn.Linear: 1, nn.Embedding: 0}
"""The dimension of the weight over which a module sums: sharded there, every rank has a part of the sum."""
SAMPLE = 256
"""Values of an output that ranks compare."""


class Unreduced:
    """Finds modules with row-wise sharded weights whose outputs are still parts of a sum."""

    def __init__(self, cp_dims: CPDims) -> None:
        self.cp_dims = cp_dims

    def check(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> str | None:
        """A sentence about a module whose local output differs between the ranks that share its weight, else None.
        All those ranks make the call."""
        weight = getattr(module, "weight", None)
        dim = next((d for kind, d in SUMMED_OVER.items() if isinstance(module, kind)), None)
        if dim is None or not isinstance(weight, DTensor) or not isinstance(output, Tensor):
            return None
        mesh = self._mesh(weight, dim)
        if mesh is None or isinstance(output, DTensor):  # a DTensor knows that it is a sum
            return None
        given = args[0] if args and isinstance(args[0], Tensor) else None
        rows = output.shape[: output.ndim - 1]
        if given is None or rows != (given.shape[:-1] if isinstance(module, nn.Linear) else given.shape):
            return None  # the sum was scattered over the ranks
        sample = output.detach().flatten()[:SAMPLE].float()
        parts = by_rank(mesh, sample.contiguous())
        apart, scale = (parts - parts[0]).abs().max().item(), parts.abs().max().item()
        if apart <= 1e-3 * scale:
            return None
        return f"its output differs by {apart / scale:.1e} between the {mesh.size()} ranks that share its weight"

    def _mesh(self, weight: DTensor, dim: int) -> DeviceMesh | None:
        """The mesh dimension beside cp over which dimension ``dim`` of a weight is sharded."""
        mesh = weight.device_mesh
        cp = set(self.cp_dims.ranks)
        for i, placement in enumerate(weight.placements):
            if not isinstance(placement, Shard) or placement.dim != dim or mesh.size(i) == 1:
                continue
            found = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[i]] if mesh.mesh_dim_names else None
            if found is not None and len(cp & set(found.mesh.flatten().tolist())) < 2:
                return found
        return None
