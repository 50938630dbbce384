"""The package as it is installed and laid out: light to import, typed, no private names of others."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

import pytest

import hyper_cp

PACKAGE = Path(str(resources.files("hyper_cp")))
HEAVY = ["torch_npu", "matplotlib", "transformers", "accelerate", "hyper_cp.cli"]


def modules() -> list[tuple[str, Path]]:
    """Every module's path within the package, and its file."""
    return [(path.relative_to(PACKAGE).as_posix(), path) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.slow
def test_import_is_light_and_warns_once_of_another_torch() -> None:
    code = f"""
import sys, torch
torch.__version__ = '2.16.0'
import hyper_cp, hyper_cp.ops
print([m for m in {HEAVY} if m in sys.modules])
"""
    command = [sys.executable, "-W", "error::FutureWarning", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr.count("supports torch 2.11 to 2.15") == 1 == done.stderr.count("Warning:")


def test_version_and_marker() -> None:
    assert metadata.version("hyper-cp") == hyper_cp.__version__
    assert resources.files("hyper_cp").joinpath("py.typed").is_file()


def test_public_names_resolve() -> None:
    assert all(hasattr(hyper_cp, name) for name in hyper_cp.__all__)


def test_only_comm_communicates() -> None:
    calls = r"dist\.(all_|batch_|broadcast|isend|irecv|send|recv|reduce|gather|scatter|barrier)"
    for name, path in modules():
        if name not in ("mesh/comm.py", "cli/demo.py"):
            assert not re.search(calls, path.read_text()), f"{path} communicates"


# --------------------------------------------------------------------------- names that are private elsewhere

HOME = "_torch/"
"""The room of everything that is private to PyTorch."""

WRITES = "the counter of writes to a tensor, for which PyTorch has no public name"
VIEWS = "the tensor whose memory a view shares, for which PyTorch has no public name"
AUTOGRAD = "autograd inside an op, for which PyTorch has no public name: see the comment there"
HOOKS = "the hooks of a module, for which PyTorch has no public name"
READS = "read by transformers itself of a model's class or configuration"
PREPARED = "how accelerate knows the models that it has wrapped; an evaluation marks them, too"
PRIVATE_ELSEWHERE = {
    ("data/head.py", "_forward_hooks"): HOOKS,
    ("data/head.py", "_backward_pre_hooks"): HOOKS,
    ("mesh/batch_state.py", "_DummyThread"): "a thread that Python has not started, which has no public name",
    (
        "integrations/huggingface/masks.py",
        "_prepare_decoder_attention_mask",
    ): "the method by which Kosmos 2 makes its mask, as the model of transformers defines it",
    (
        "integrations/huggingface/inline_media.py",
        "_get_feat_extract_output_lengths",
    ): "the numbers of rows of clips, which Qwen2-Audio's tower computes under this name only",
    ("planner/model.py", "_sliding_window_pattern"): "the name of an entry of config.json files of Gemma 3",
    ("mesh/groups.py", "_get_backend"): "the backend of a device, which alone says whether it can be split",
    ("mesh/groups.py", "_timeout"): "the timeout among NCCL's options, without which new_group warns",
    ("mesh/groups.py", "_world"): "the number that is part of the name of the next process group",
    ("module/running_call.py", "_base"): VIEWS,
    ("ops/writes.py", "_version"): WRITES,
    ("ops/masks.py", "_base"): VIEWS,
    ("ops/differentiable.py", "_base"): VIEWS,
    ("ops/recurrence/engine.py", "_base"): VIEWS,
    ("integrations/accelerate.py", "_shared_state"): "whether an Accelerator is choosing between DDP and FSDP",
    ("integrations/accelerate.py", "_models"): "models that an Accelerator has prepared before enable",
    ("integrations/accelerate.py", "_schedulers"): "schedulers that an Accelerator has prepared before enable",
    ("integrations/accelerate.py", "_dataloaders"): "loaders that an Accelerator has prepared before enable",
    ("integrations/accelerate.py", "_step_count"): "that of a scheduler, as accelerate's own wrapper reads it",
    ("integrations/trainer.py", "_orig_mod"): "the module inside a compiled one, which has no public name",
    ("integrations/huggingface/seams.py", "_orig_mod"): "a loss function that is a compiled module, as above",
    ("integrations/trainer.py", "_get_num_items_in_batch"): "Trainer's count of labels, which users override",
    ("integrations/trainer.py", "_models"): PREPARED,
    ("integrations/trainer.py", "_is_accelerate_prepared"): PREPARED,
    ("integrations/trainer.py", "_tr_loss"): "the losses of Trainer that were not logged yet",
    ("integrations/huggingface/checks.py", "_attn_implementation"): READS,
    (
        "ops/kernels/scores/flex_kernel.py",
        "_dynamo",
    ): "the limit of graphs of a compiled function: see the comment there",
    ("ops/kernels/derivative.py", "_C"): AUTOGRAD,
    ("ops/kernels/derivative.py", "_dispatch_tls_is_dispatch_key_excluded"): AUTOGRAD,
    ("ops/kernels/derivative.py", "_dispatch_tls_set_dispatch_key_excluded"): AUTOGRAD,
    ("context_manager.py", "_base"): VIEWS,
    (
        "integrations/diffusers.py",
        "_diffusers_hook",
    ): "the hooks that diffusers keeps itself, as its caches",
    ("integrations/diffusers.py", "_parallel_config"): "set by diffusers where its own parallelism is enabled",
    ("integrations/huggingface/checks.py", "_can_set_attn_implementation"): READS,
    ("integrations/huggingface/latents.py", "_attn_implementation"): READS,
    ("integrations/huggingface/modules.py", "_attn_implementation"): READS,
    ("integrations/huggingface/decoder.py", "_attn_implementation"): READS,
    ("integrations/huggingface/sparse.py", "_short_conv"): "the convolution of Qwen 4, which is replaced if known",
    ("integrations/huggingface/decoder.py", "_can_set_attn_implementation"): READS,
}
"""``(module, name)``: the reason why a private name of another package may stand there."""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """``(line, name, expression)`` of every private name that this module does not define itself.

    Such names are PyTorch's (``torch._C``, ``tensor._version``) or another module's of ours.
    """
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.isidentifier() else []  # getattr(module, "_modules")
        text = ast.unparse(node) if names else ""
        yield from ((getattr(node, "lineno", 0), name, text) for name in names if re.match(r"_[A-Za-z]", name))


def defined_names(tree: ast.Module) -> set[str]:
    """Names that a module gives to its functions, classes, variables, arguments and attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


FACTORIES = {
    *("tensor", "as_tensor", "arange", "linspace", "zeros", "ones", "full", "empty", "eye", "tril_indices"),
    *("triu_indices", "rand", "randn", "randint", "randperm", "normal", "empty_strided", "logspace"),
}


def test_new_tensors_name_their_device() -> None:
    """The default device may be an accelerator, and tables belong on the host."""
    found = []
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            new = isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in FACTORIES
            if new and not {"device", None} & {given.arg for given in node.keywords}:
                found.append(f"hyper_cp/{module}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "tensors on the default device:\n" + "\n".join(found)


def test_one_thread_does_not_take_the_compilation_of_another_for_its_own() -> None:
    """torch's flag is one for all threads: ``hyper_cp._torch.compiling`` has that of the thread."""
    found = {module for module, path in modules() if "compiler.is_compiling" in path.read_text()}
    assert found == {"_torch/compiling.py"}


@pytest.mark.slow
def test_private_names_stay_at_home() -> None:
    """Private names of PyTorch stand in one room, its operators in the kernels; nobody reaches into a neighbour."""
    found, used = [], set()
    for module, path in modules():
        tree = ast.parse(path.read_text())
        own = defined_names(tree)
        for line, name, text in private_names(tree):
            # our room; fields and copies of a named tuple
            of_torch = name in ("_torch", "_fields", "_make", "_replace") or module.startswith(HOME)
            operator = module.startswith("ops/kernels/") and re.search(r"aten\._|torch\._fused_sdp_choice", text)
            if (module, name) in PRIVATE_ELSEWHERE:
                used.add((module, name))
            elif not (of_torch or operator or name in own):
                found.append(f"hyper_cp/{module}:{line}: {text}")
    assert not found, "private names of others:\n" + "\n".join(found)
    assert used == set(PRIVATE_ELSEWHERE), "reasons for names that are gone"
