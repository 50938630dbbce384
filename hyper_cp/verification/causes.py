"""Name the usual cause of a difference from what was recorded around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .compare import Found
from .record.trace import Observation
from .report import DIFFERS, EQUAL, Cause

MIXING_TYPES = (
    *("Conv1d", "Conv2d", "Conv3d", "RNN", "LSTM", "GRU", "BatchNorm1d", "BatchNorm2d", "SyncBatchNorm"),
    *("AvgPool1d", "MaxPool1d", "AdaptiveAvgPool1d", "AdaptiveMaxPool1d"),
)
SAY = {
    "positions": "{where} counts positions locally ({what}). A rank does not hold positions 0 to S/n - 1. Use the "
    "position_ids of get_batch_on_this_cp_rank, or handler.position_ids, and index tables of positions by them.",
    "dropout": "{where}: {what}. Ranks draw other numbers than one device, so that the runs cannot be equal from here "
    "on. Verify with dropout probabilities of 0, or with model.eval().",
    "attention": "{where}: {what}. It sees this rank's share of the sequence only. Add the module to the "
    "ContextParallel plan, and let it call F.scaled_dot_product_attention.",
    "mixing": "{where} mixes positions ({what}), and its neighbours are on other ranks. Gather the sequence around it "
    "(handler.combine, then handler.dispatch), use handler.roll_tensor for shifts, or replace the module.",
    "shift": "{where}: {what}. A share does not contain the next token of its last position. Shift over the whole "
    "sequence: get_batch_on_this_cp_rank(batch, shift_labels=True).",
    "mask": "The batch has packed documents or padding, but no module ran with them, so that attention sees across "
    "their boundaries. Run the forward inside `with handler.documents(batch):`, with the batch that "
    "get_batch_on_this_cp_rank returned.",
    "loss": "All modules agree, and the loss differs. The loss itself is computed from a share: labels that are "
    "shifted after sharding, or a mean over another number of tokens on each rank. Use shift_labels=True and "
    "handler.mean_loss.",
    "batch": "{where} {what}. Attention takes the local rows for the positions of the model's layout. Split the whole "
    "batch with the handler that loss_fn receives (get_batch_on_this_cp_rank), or with one of the model's style.",
    "unknown": "{where} differs, and no usual cause was recognised. {what}",
}


@dataclass
class Evidence:
    """All that a cause is found from, in the run of the rank where the first difference is largest."""

    ranks: int
    rows: Sequence[Found]
    """Module rows in the order of execution."""
    first: Found | None
    """The first row that differs, of a module, the loss or a gradient."""
    gradients: Sequence[Found]
    observations: Sequence[Observation]
    dropped: bool
    """True if the batch has documents or padding, and they were not in force."""
    styled: frozenset[str]
    """Names of styled modules."""
    losses: tuple[Sequence[float], float]
    """With context parallelism on every rank, and on one device."""


def explain(e: Evidence) -> list[Cause]:
    """The causes that fit, the most likely one first; never empty if something differs."""
    causes = [
        Cause("tensor parallel", o.module, f"{o.text}. The sum over tensor-parallel ranks was not made. Give "
              "RowwiseParallel output_layouts=Replicate(), or all-reduce the output.")
        for o in e.observations
        if o.kind == "tensor parallel"
    ]  # fmt: skip
    if e.first is None:
        return causes[:1]
    if e.first.kind in ("input", "output"):
        causes += _of_module(e, e.first)
    elif e.first.kind == "loss":
        causes += _of_loss(e)
    else:
        causes += _of_gradients(e)
    return causes[:3]


# --------------------------------------------------------------------------- a module differs


def _of_module(e: Evidence, first: Found) -> list[Cause]:
    if first.local_positions:
        place = f" in {first.kind} {first.place}".rstrip()
        return [_say("positions", first.name, f"0, 1, 2, ...{place}")]
    if first.name in e.styled and first.same_shape:
        shape = "x".join(map(str, first.shape))
        return [_say("batch", first.name, f"has {shape} on every rank as on one device: its inputs were not split")]
    if first.kind == "input" and not first.name:
        what = f"receives other rows as {first.place} than this rank holds: the batch was split in another layout"
        return [_say("batch", first.name, what)]
    since = max((r.tick for r in e.rows if r.tick < first.tick and r.status == EQUAL), default=-1)
    near = [o for o in e.observations if since <= o.tick <= first.tick]
    before = [o for o in e.observations if o.tick < since]
    inputs_differ = any(r.key[:2] == first.key[:2] and r.kind == "input" and r.status == DIFFERS for r in e.rows)
    for kind in ("dropout", "attention"):
        for o in near:
            if o.kind == kind:
                return [_say(kind, o.module, o.text)]
    if e.dropped and (first.name in e.styled or not near):
        return [Cause("mask", first.name, SAY["mask"])]
    if first.kind == "output" and first.type in MIXING_TYPES:
        return [_say("mixing", first.name, f"nn.{first.type}")]
    for kind in ("positions", "mixing", "shift"):
        for o in near:
            if o.kind == kind:
                return [_say("mixing" if kind == "shift" else kind, o.module, o.text)]
    if first.kind == "output" and not inputs_differ and first.name not in e.styled:
        return [_say("mixing", first.name, "its inputs agree, and its output does not")]
    for kind in ("dropout", "positions", "attention"):
        for o in reversed(before):
            if o.kind == kind:
                return [_say(kind, o.module, o.text)]
    what = "Something between the modules computes it from this rank's share, or from local positions."
    if first.kind == "output":
        what = "Its inputs agree. Check seq_dim, head_dim, layout and window of its style, and its masks."
    return [_say("unknown", first.name, what)]


def _say(kind: str, module: str | None, what: str) -> Cause:
    where = "loss_fn" if module is None else f"Module {module}" if module else "The model itself"
    return Cause(kind, module, SAY[kind].format(where=where, what=what))


# --------------------------------------------------------------------------- only loss or gradients differ


def _of_loss(e: Evidence) -> list[Cause]:
    dropouts = [o for o in e.observations if o.kind == "dropout"]
    if dropouts:
        return [_say("dropout", dropouts[0].module, dropouts[0].text)]
    values, one = e.losses
    n = e.ranks
    if one:
        for what, value in (("each rank's loss", values[0]), ("the mean of the ranks' losses", sum(values) / n)):
            for factor, name in ((n, f"{n} times"), (1 / n, f"1/{n} of"), (n * n, f"{n * n} times")):
                if abs(value / one - factor) < 1e-3 * factor and len({round(v / one, 3) for v in values}) == 1:
                    text = f"{what} is {name} that of one device: the loss is divided or multiplied by the number of"
                    return [Cause("factor", None, f"{text} ranks once too often. Use handler.mean_loss.")]
    shifts = [o for o in e.observations if o.kind == "shift"]
    if shifts:
        text = SAY["shift"].format(where="The loss", what=shifts[-1].text)
        return [Cause("labels", shifts[-1].module, text)]
    return [Cause("mask", None, SAY["mask"])] if e.dropped else [Cause("loss", None, SAY["loss"])]


def _of_gradients(e: Evidence) -> list[Cause]:
    n = e.ranks
    bad = [row for row in e.gradients if row.status == DIFFERS]
    factors: dict[str, list[str]] = {}
    for row in bad:
        for factor, name in ((n, f"{n} times"), (1 / n, f"1/{n} of")):
            if row.factor is not None and abs(row.factor / factor - 1) < 0.02:
                factors.setdefault(name, []).append(row.name)
    if factors and sum(len(names) for names in factors.values()) == len(bad):
        parts = [f"{names[0]}{' and others' if len(names) > 1 else ''} {k} that" for k, names in factors.items()]
        return [
            Cause(
                "factor",
                None,
                f"Gradients are those of one device but for a factor of cp ({'; '.join(parts)} of one device; "
                f"{len(bad)} of {len(e.gradients)}). The loss and the reduction of gradients assume different things. "
                'Use handler.mean_loss(gradients="mean") if gradients are averaged over the ranks (DDP, FSDP), and '
                '"sum" if they are summed (then also verify(..., gradients="sum")); see combine(gradients=) for '
                "outputs that were gathered.",
            )
        ]
    if e.dropped:
        return [Cause("mask", None, SAY["mask"])]
    what = (
        "The forward agrees. A tensor was detached, gathered without its gradient, or used by another number of ranks "
        "than its gradient is reduced over."
    )
    name = bad[0].name if bad else ""
    return [Cause("unknown", None, SAY["unknown"].format(where=f"The gradient of {name}", what=what))]
