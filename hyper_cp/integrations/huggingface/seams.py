"""Code of transformers that prepared models rely on, if it is known, and the batches that replaced code refuses."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import io
import linecache
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Collection, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import GenerationMixin

from ...schedule.layout import by_documents
from .forward import ForwardState

_SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}

CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a cache among keywords: the first one from transformers 5.24 on, the others before."""
_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next((name for name in CACHES if name in _TAKEN), "")
"""The name in the installed version; "" if it is none of them."""

outside_graphs = torch.compiler.disable(
    reason="The number of windows of a rank depends on its positions, which a compiled graph does not know. Compile "
    "without fullgraph=True"
)
"""A decorator of what takes windows or pools of the tokens."""


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache among keywords, under any of its names; None if there is none."""
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)


@cache
def source_of(function: Callable[..., Any]) -> str:
    """The source of a function or class; "" if there is none."""
    try:
        made = inspect.unwrap(function)
        return (_class_source(made) if inspect.isclass(made) else "") or inspect.getsource(made)
    except (OSError, TypeError):
        return ""


def _class_source(kind: type[Any]) -> str:
    """The source of a class that its file defines at the first level, without decorators; "" for others.
    ``inspect.getsource`` parses the whole file for each class before Python 3.13."""
    lines = linecache.getlines(inspect.getsourcefile(kind) or "")
    begins = re.compile(rf"class {kind.__qualname__}\b")
    at = [number for number, line in enumerate(lines) if begins.match(line)]
    return "".join(inspect.getblock(lines[at[0] :])) if len(at) == 1 else ""


@cache
def digest_of(function: Callable[..., Any], start: str = "") -> str:
    """A digest of the source of a function from the words ``start`` on; "" without these. Space, comments and the
    name of the cache, which is another one from transformers 5.24 on, do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(source_of(function))).readline)
    words = " ".join(x.string for x in tokens if x.type not in _SPACE).replace("past_key_values", "cache")
    words = re.sub(r"@ deprecate_kwarg \(.*?\) ", "", words)
    at = words.find(start)
    return "" if at < 0 else hashlib.sha256(words[at:].encode()).hexdigest()[:16]


def replace_in_file(kind: type[Any], name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what ``make`` returns for a function of the file of a class in its place, once. It must do the same while no
    forward over all ranks runs."""
    names = vars(sys.modules[kind.__module__])
    if name in names and not hasattr(names[name], "hyper_cp_replaces"):
        original = names[name]
        names[name] = functools.wraps(original)(make(original))
        names[name].hyper_cp_replaces = original


def in_file(owner: object, name: str, default: Any = None) -> Any:
    """Look a name up in the file of an object's class, and in those of the classes that it derives from: users and
    FSDP2 derive classes in files of their own."""
    files = [vars(sys.modules[kind.__module__]) for kind in type(owner).__mro__ if kind.__module__ in sys.modules]
    return next((names[name] for names in files if name in names), default)


def set_implementation(module: Any, implementation: str) -> None:
    """Give a module a configuration of its own, with this attention implementation."""
    module.config = copy.deepcopy(module.config)
    module.config._attn_implementation = implementation


Known = Mapping[str, tuple[str, ...]]
"""The digests of the forwards of classes of a file, or of other methods (``Class.method``)."""


def known_as(names: Collection[str], known: Known) -> Callable[[type[Any]], bool]:
    """A function that returns True for a class of one of these names whose file has the known methods."""
    methods = {name if "." in name else f"{name}.forward": digests for name, digests in known.items()}

    def check(kind: type[Any]) -> bool:
        file = sys.modules[kind.__module__]
        return kind.__name__ in names and all(digest_of(attrgetter(x)(file)) in methods[x] for x in methods)

    return check


def holds(module: nn.Module, is_kind: Callable[[type[Any]], bool]) -> bool:
    """True for a module with one of such a type in it."""
    return any(is_kind(type(x)) for x in module.modules())


SLOTS = "compares positions, which restart, with slots of keys, which do not"
"""The reason why a module that reads position ids mixes documents up."""


def refuse_batch(name: str, state: ForwardState, packed: str = SLOTS, between: str | None = None) -> None:
    """Raise ``NotImplementedError`` for batches of which a module of one device that counts slots makes something else
    than its queries should see. ``packed`` and ``between``: what is wrong there with packed documents, and with padding
    between tokens (None: nothing)."""
    batch, layout = state.batch, state.style.mode.layout
    if batch.documents is not None and batch.tokens is None and not (by_documents(layout) and batch.numbered):
        _refuse(name, "packed documents", packed)
    if by_documents(layout):
        _refuse(name, f"a batch in layout={layout!r}", "has no documents, by which that places tokens")
    if between is not None and batch.keys is not None:
        _refuse(name, "padding between tokens", between)
    if packed == SLOTS and not batch.numbered and "position_ids" in state.passed:
        _refuse(name, "position_ids", "compares them with slots of keys, so they must be 0, 1, 2 ...")
    if state.losses is not None:
        _refuse(name, "indexer_losses", "selects blocks or entries, for which no loss is known")


def _refuse(name: str, what: str, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} got {what}. On one device it {why}. Pass one document in each row, padded at its ends, without "
        'position_ids and indexer_losses, and use layout="contiguous" or "head_tail"'
    )


LIBRARIES = ("transformers.", "torch.", "peft.", "accelerate.", "hyper_cp.")
"""Beginnings of the names of modules whose code is no user's."""


def is_foreign(kind: Any) -> bool:
    """True for a class or function of a user, or of a model whose code comes with its weights."""
    # Generated code may have no module.
    return not str(kind.__module__).startswith(LIBRARIES)


def own_forward(module: nn.Module) -> Any:
    """The forward of a module, if a user has written it: that of its class, or one that was put in its place."""
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    return function if hasattr(function, "__code__") and is_foreign(function) else None


def has_head(model: nn.Module, names: re.Pattern[str]) -> bool:
    """True if a model, or a class that it is derived from, has one of these names."""
    return any(names.search(kind.__name__) for kind in type(model).__mro__)


def loss_of_user(model: nn.Module) -> Any:
    """The loss function that the forward of a model calls, if a user has written it (set on the model, as a method or
    property of its class, or in transformers' table of losses); None if it is one of transformers."""
    given: Any = getattr(model, "loss_function", None)
    function = inspect.unwrap(getattr(given, "func", given))  # of a partial or a compiled one
    function = getattr(function, "_orig_mod", getattr(function, "__func__", function))
    return None if function is None or str(function.__module__).startswith(("transformers.", "hyper_cp.")) else function


def code_of_user(model: nn.Module) -> list[ast.AST]:
    """The code that users have written around a model's forward: that of their classes, functions around it, and the
    methods that these call."""
    forwards = [model.forward, *(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))]
    found: dict[Any, ast.AST] = {}
    for function in forwards:
        while function is not None:  # functions around it, of which functools.wraps tells
            code = getattr(function, "__code__", None)
            if code is not None and is_foreign_code(function):
                found[code] = _parsed(code)
            function = getattr(function, "__wrapped__", None)
    nodes = [node for tree in found.values() for node in ast.walk(tree)]
    for name in {node.attr for node in nodes if isinstance(node, ast.Attribute)}:
        method = inspect.unwrap(getattr(type(model), name, None) or len)
        if hasattr(method, "__code__") and is_foreign(method):
            found[method.__code__] = _parsed(method.__code__)
    return [*found.values()]


def words_in(trees: list[ast.AST]) -> set[str]:
    """Names, attributes and texts that code uses, without docstrings, and without arguments that are handed on under
    their own name (``labels=labels``)."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    handed = {id(x.value) for x in nodes if isinstance(x, ast.keyword) and getattr(x.value, "id", "") == x.arg}
    said = {id(x.value) for x in nodes if isinstance(x, ast.Expr)}
    names = {x.id for x in nodes if isinstance(x, ast.Name) and id(x) not in handed}
    texts = {x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str) and id(x) not in said}
    hints = {
        id(y) for x in nodes if isinstance(x, ast.arg) and x.annotation is not None for y in ast.walk(x.annotation)
    }
    texts -= {x.value for x in nodes if isinstance(x, ast.Constant) and id(x) in hints}
    return names | texts | {x.attr for x in nodes if isinstance(x, ast.Attribute)}


def is_foreign_code(function: Any) -> bool:
    """The same as :func:`is_foreign` for the file of a function: ``functools.wraps`` copies ``__module__``."""
    file = getattr(function, "__globals__", {}).get("__name__", "")
    return not str(file).startswith(LIBRARIES)


@cache
def _parsed(code: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):  # a lambda inside of an expression, say
        return ast.Module([], [])
