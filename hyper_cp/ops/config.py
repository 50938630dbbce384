"""The description of one attention call: what the style says, what the call asks for, and both once checked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import is_compiling
from ..mesh.arguments import check_bool, check_choice, check_int
from ..mesh.cp_mesh import CPMesh
from ..schedule import arrivals, tiles
from ..schedule import layout as layouts
from ..schedule.tiles import Band
from .entries import Entries
from .kernels.scores import Score
from .settings import read, text

EXCHANGE_DTYPES = (torch.bfloat16, torch.float32)
"""Those in which numbers may travel; float16 would overflow."""


@dataclass(frozen=True)
class Mode:
    """The settings that all modules of one style share: how keys are obtained, how the sequence lies on the ranks,
    and how far a query sees."""

    kv_exchange: str = "all_gather"
    layout: str = "contiguous"
    load_balance: bool = False
    window: tuple[int | None, int | None] | None = None
    head_groups: int | Literal["auto"] = 1
    exchange_stages: int | Literal["auto"] = "auto"
    latents: bool | None = None
    """In latent attention, True: latents travel. False: heads travel. None: those that are fewer numbers for a
    token."""
    exchange_dtype: torch.dtype | None = None
    """Keys, values and their gradients travel in this dtype where theirs is wider."""
    max_logits: bool = False
    """Modules keep the largest logit of each head, see :mod:`hyper_cp.ops.max_logits`."""

    @property
    def groups(self) -> int:
        """The number of groups of heads; 1 while ``"auto"`` is not decided (see ``ops.head_groups``)."""
        return self.head_groups if isinstance(self.head_groups, int) else 1

    @property
    def stages(self) -> int | None:
        """The number of stages of the exchange; None: it is chosen with the schedule."""
        if isinstance(self.exchange_stages, int):
            return self.exchange_stages
        return None if self.kv_exchange in arrivals.STAGED else 1

    @cached_property
    def signature(self) -> tuple[tuple[str, Hashable], ...]:
        """These settings as pairs of a name and a value, which ranks compare."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    def key_length(self, keys: int, ranks: int) -> int:
        """The global number of keys, of which ``ranks`` ranks have ``keys`` each."""
        return keys if self.kv_exchange == "replicated" else keys * ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", tiles.check_window(self.window))
        name = arrivals.family(self.kv_exchange)[0]
        check_choice("kv_exchange", name, arrivals.KV_EXCHANGES, "It says how keys and values travel")
        layouts.check_layout(self.layout)
        why = '1 exchanges all heads at once, and "auto" chooses by the sizes of a call'
        check_int("head_groups", self.head_groups, why, others=("auto",))
        why = '1 exchanges all rows at once, and "auto" chooses by the sizes of a call'
        check_int("exchange_stages", self.exchange_stages, why, others=("auto",))
        if self.exchange_stages != "auto" and self.kv_exchange not in arrivals.STAGED:
            raise ValueError(
                f"exchange_stages={self.exchange_stages} with kv_exchange={self.kv_exchange!r}, which has no stages. "
                f"Only {' and '.join(map(repr, sorted(arrivals.STAGED)))} send in stages. Leave exchange_stages out, "
                "or use one of these"
            )
        if self.latents not in (None, True, False):
            raise TypeError(
                f"latents={self.latents!r} must be True, False or None. Latents travel, or heads, or whichever are "
                "fewer numbers. Pass one of them"
            )
        if self.exchange_dtype is not None and self.exchange_dtype not in EXCHANGE_DTYPES:
            raise ValueError(
                f"exchange_dtype={self.exchange_dtype!r} must be {' or '.join(map(str, EXCHANGE_DTYPES))}, or None. "
                "Keys, values and their gradients travel in it where theirs is wider, which loses bits. Leave it out "
                "to lose none"
            )
        check_bool("load_balance", self.load_balance, "It exchanges tails of queries, or does not")
        check_bool("max_logits", self.max_logits, "Modules keep the largest logit of each head, or do not")
        if self.load_balance and self.layout != "contiguous":
            raise ValueError(
                f"load_balance=True with layout={self.layout!r}, which is balanced already. Queries are exchanged for "
                "contiguous data only. Use load_balance=False, or layout='contiguous'"
            )


@dataclass(eq=False)
class Call:
    """The arguments of one attention call beside q, k, v, as its caller gave them. Nobody changes them (a frozen
    dataclass would refuse that, but takes five times as long to make, in every call)."""

    is_causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None
    """Explicit, broadcastable to ``[B, H, Sq, Skv]``, global (the query dimension may be local)."""
    documents: Tensor | None = None
    """Table of cumulative lengths, see :func:`hyper_cp.schedule.documents.documents_table`."""
    dropout_p: float = 0.0
    name: str = "attention"
    """The module that calls, for errors and for the comparison between ranks."""
    sinks: Tensor | None = None
    """A logit per query head that takes weight and gives no value: ``[H]`` of all heads, or of this rank's."""
    score: Score | None = None
    """A function that changes logits, of global positions and heads."""
    enable_gqa: bool = True
    """False: keys must have as many heads as queries."""
    weight: Tensor | None = None
    """In latent attention: the weight ``[H * (Dn + Dv), R]`` that makes keys and values. k and v are then latents and
    their rotary part, see :mod:`hyper_cp.ops.latents`."""
    bias: Tensor | None = None
    """The bias ``[H * (Dn + Dv)]`` of that layer."""
    selected: Tensor | None = None
    """The global positions of the keys that each of this rank's queries has selected, ``[B, 1|Hkv, S/n, k]``; -1 is no
    key."""
    block: int = 1
    """The number of adjacent keys in a block, if ``selected`` lists blocks."""
    max_logits: bool = False
    """The largest logit of each query is returned too, ``[B, H, Sq]``."""
    entries: Entries | None = None
    """Pooled keys and values under the same softmax. All ranks form one ring then."""

    @property
    def of_latents(self) -> list[Tensor]:
        """Weight and bias, as far as there are any."""
        return [x for x in (self.weight, self.bias) if x is not None]


@dataclass(eq=False, kw_only=True)
class CheckedCall(Call):
    """A call with everything checked and decided. Nothing below checks or parses it again.

    Its ``mask`` (with four dimensions), ``sinks``, ``weight``, ``bias`` and ``selected`` (int32) are those of the heads
    that this rank attends.
    """

    cp: CPMesh
    mode: Mode
    band: Band
    scale: float
    exchanged: bool
    """The Ulysses all-to-all was done before the call: its tensors hold the sequence of a whole ring rank and
    1/ulysses of the heads."""
    lengths: tuple[int, int]
    """Global numbers of queries and keys."""

    def settings(self, kernel: str, absorbed: bool = False) -> OpSettings:
        """The settings of the op that computes this call with a kernel, or with one that the op chooses ("")."""
        m, chosen = self.mode, self.selected if self.entries is None else self.entries.selected
        return OpSettings(
            self.cp.key,
            m.layout,
            m.kv_exchange,
            # Every query sees equally many selected keys: there are no tails to exchange.
            m.load_balance and chosen is None,
            m.stages,
            self.band,
            m.groups,
            kernel=kernel,
            score="" if self.score is None else self.score.key,
            absorbed=absorbed,
            exchange_dtype="" if m.exchange_dtype is None else str(m.exchange_dtype).removeprefix("torch."),
            block=self.block,
            max_logits=self.max_logits,
            every=0 if self.entries is None else self.entries.every,
            in_graph=is_compiling(),
        )


class Operands(NamedTuple):
    """The tensors of a call beside q, k, v. An op takes those that there are as one list, and their names with its
    settings, and saves them for backward. What kernels need of another one is a field of their ``TileInputs`` too."""

    sinks: Tensor | None = None
    """One logit for each query head that takes weight and gives no value, ``[H]``, of the heads that the op attends."""
    documents: Tensor | None = None
    """Table of cumulative lengths, on the CPU."""
    mask: Tensor | None = None
    """Explicit, ``[B|1, H|1, Sq|1, Skv|1]``, of the heads that the op attends."""
    seed: Tensor | None = None
    """The seed of dropout, ``[1]`` on the CPU."""
    dlse: Tensor | None = None
    """In backward, of calls with a score function: the gradient of the log-sum-exp."""
    kernel: Tensor | None = None
    """In backward: the number of the kernel that ran in forward, ``[1]`` on the CPU."""
    mark: Tensor | None = None
    """In backward: the fingerprint of the documents that forward had, see :mod:`recompute`."""
    weight: Tensor | None = None
    """In latent attention: what makes keys and values of k and v, ``[H * (Dn + Dv), R]``."""
    bias: Tensor | None = None
    """The bias of that layer."""
    entry_keys: Tensor | None = None
    """Pooled keys ``[B, Hkv, E, D]``, all on every rank."""
    entry_values: Tensor | None = None
    """Pooled values ``[B, Hkv, E, Dv]``."""
    selected: Tensor | None = None
    """The keys that each query has selected, ``[B, 1|Hkv, Sq, k]`` global positions in int32."""
    entry_selected: Tensor | None = None
    """The entries that each query has selected, ``[B, 1|Hkv, Sq, k]`` in int32."""
    captured: Sequence[Tensor] = ()
    """Tensors that the score function uses and gives gradients to."""

    @property
    def differentiated(self) -> list[Tensor]:
        """The tensors that backward gives gradients to."""
        single = self.sinks, self.weight, self.bias, self.entry_keys, self.entry_values
        return [*(x for x in single if x is not None), *self.captured]

    def named(self) -> list[tuple[str, Tensor]]:
        """The tensors that there are, with their names."""
        single = [(name, x) for name, x in zip(self._fields, self[:-1], strict=False) if x is not None]
        return single + [("captured", x) for x in self.captured]

    @staticmethod
    def of(tensors: Sequence[Tensor], names: Sequence[str]) -> Operands:
        """The operands of a list with these names; the inverse of :meth:`named`."""
        single = len(names) - names.count("captured")
        return Operands(**dict(zip(names[:single], tensors[:single], strict=True)), captured=tensors[single:])


DIFFERENTIATED = frozenset({"sinks", "weight", "bias", "entry_keys", "entry_values", "captured"})
"""The names of :attr:`Operands.differentiated`."""


class OpSettings(NamedTuple):
    """Everything that an op of attention needs beside tensors and numbers."""

    mesh: str
    """The key of the mesh, see :func:`hyper_cp.mesh.cp_mesh.by_key`."""
    layout: str = "contiguous"
    kv_exchange: str = "all_gather"
    load_balance: bool = False
    exchange_stages: int | None = None
    """None: chosen with the schedule."""
    band: Band = (None, None)
    head_groups: int = 1
    first_head: int | None = None
    """The global number of the first query head, in a group of heads; None: the heads are all those of this rank."""
    kernel: str = ""
    """The name of the kernel, or "" if it is chosen when the op runs."""
    score: str = ""
    """The key of the function that changes logits, see :func:`hyper_cp.ops.kernels.scores.find`, or ""."""
    tensors: tuple[str, ...] = ()
    """The names of the operands that the op takes."""
    absorbed: bool = False
    """Latents and their rotary part are the one key head of all queries, see :func:`hyper_cp.ops.latents.absorb`."""
    exchange_dtype: str = ""
    """The name of a dtype of torch, or "" for that of each tensor."""
    block: int = 1
    """The number of adjacent keys in a block, if queries have selected blocks."""
    max_logits: bool = False
    every: int = 0
    """The number of tokens from one entry to the next; 0: there are no entries."""
    in_graph: bool = False
    """The call is part of a compiled graph, which puts other values into a tensor without counting a write."""

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype in which wider rows travel."""
        found: torch.dtype | None = getattr(torch, self.exchange_dtype) if self.exchange_dtype else None
        return found

    @staticmethod
    def read(text: str) -> OpSettings:
        """The settings of a text."""
        found: OpSettings = read(OpSettings, text)
        return found

    def heads_before(self, rank: int, heads: int) -> int:
        """The global number of the first of ``heads`` query heads on a rank of the Ulysses dimension."""
        return rank * heads if self.first_head is None else self.first_head

    def arguments(
        self, given: Operands, scale: float, dropout_p: float = 0.0
    ) -> tuple[list[Tensor], float, float, str]:
        """The last arguments of an op: its operands, its numbers, and these settings as text."""
        return self.listed(given.named(), scale, dropout_p)

    def listed(
        self, named: Sequence[tuple[str, Tensor]], scale: float, dropout_p: float
    ) -> tuple[list[Tensor], float, float, str]:
        """The same for operands with their names."""
        names = tuple([name for name, _ in named])
        return [x for _, x in named], scale, dropout_p, text(self._replace(tensors=names))
