"""Imports that every rank starts with, made once, in the server that ranks are forked from."""

import gc
import importlib
from contextlib import suppress

import torch

from hyper_cp.module.mixers.calls import route_loaded

gc.disable()  # imports make millions of objects, which stay

for name in (
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "torch.utils.checkpoint",
    "hyper_cp",
    "accelerate",
    "transformers",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
):
    with suppress(ImportError):
        importlib.import_module(name)

# The first compilation imports more, and fills tables. (Without a backward: autograd does not survive a fork.)
with torch.no_grad():
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(2))
torch._dynamo.reset()

# The first forward of a styled model searches all loaded files. A rank would copy their pages, to count references.
route_loaded()

# These objects remain alive: the collector of a rank need not visit them, nor copy their pages.
gc.collect()
gc.freeze()
# What a job makes lives as long as the job. A compilation makes millions of objects, which the collector would visit
# again and again.
gc.set_threshold(200_000, 50, 50)
gc.enable()
