"""The mesh that a slice was taken from.

Needs ``DeviceMesh._get_root_mesh``: torch has no public way from a slice back to the mesh it was sliced from. The
same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which ``mesh`` is a slice, or itself."""
    return mesh._get_root_mesh()
