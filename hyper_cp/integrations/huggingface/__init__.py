"""The parts of :mod:`hyper_cp.integrations.transformers`: the state of a forward, masks, heads, rotary tables."""

from transformers import __version__

from ..._torch.version import warn_if_unsupported

warn_if_unsupported(__version__, "transformers")  # before imports that may fail in such a version
