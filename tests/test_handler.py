"""ContextParallelHandler: dispatch and combine are exact inverses, with the documented gradients."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, get_cp_handler_cls
from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from tests.harness import modules
from tests.harness.oracle import plain_attention, relative_error, token_positions
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def samples(length: int) -> list[tuple[Tensor, int]]:
    """Tensors of every dtype with the sequence in every place."""
    g = torch.Generator().manual_seed(0)
    found = []
    for dtype in DTYPES:
        for shape, dim in (((length,), 0), ((2, length), 1), ((2, length, 3), -2), ((2, 3, length), -1)):
            found.append(((torch.rand(shape, generator=g) * 100).to(dtype), dim))
    found.append((torch.rand(3, length, 2).transpose(0, 2), 1))  # not contiguous
    return found


@on_ranks
def round_trips(shape: tuple[int, ...], layout: str) -> bool:
    names = ("cp",) if len(shape) == 1 else ("ring", "ulysses")
    handler = ContextParallelHandler(init_device_mesh("cpu", shape, mesh_dim_names=names), layout)
    world, length = dist.get_world_size(), 12 * dist.get_world_size()
    mine = torch.tensor(token_positions(layout, dist.get_rank(), world, length))
    good = torch.equal(handler.position_ids(length), mine)
    for tensor, dim in samples(length):
        part = handler.dispatch(tensor, dim)
        whole = handler.combine(part, dim)
        good &= torch.equal(part, tensor.index_select(dim, mine)) and torch.equal(whole, tensor)
        good &= whole.dtype == tensor.dtype
    return good


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 2)])
def test_dispatch_and_combine_are_inverses(ranks: Any, shape: tuple[int, ...], layout: str) -> None:
    world = shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert all(ranks(world, round_trips, shape, layout))


@on_ranks
def combined_later(layout: str) -> list[bool]:
    """Call ``combine`` after the block, with the documents that have placed the tokens."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (3,)), layout)
    whole = torch.rand(2, 29)
    with handler.documents([0, 7, 8, 29]) as table:
        part = handler.dispatch(whole, pad_value=0.0)
        positions = handler.dispatch(torch.arange(30), 0)
    assert positions.tolist() != list(range(10 * dist.get_rank(), 10 * dist.get_rank() + 10))
    return [torch.equal(handler.combine(part, length=29, documents=d), whole) for d in ([0, 7, 8, 29], table)]


@pytest.mark.parametrize("layout", ["per_document", "balanced"])
def test_combine_after_the_documents_block(ranks: Any, layout: str) -> None:
    assert ranks(3, combined_later, layout) == [[True, True]] * 3


@on_ranks
def gradients(layout: str) -> bool:
    handler = ContextParallelHandler(init_device_mesh("cpu", (3,)), layout)
    length = 12
    mine = torch.tensor(token_positions(layout, dist.get_rank(), 3, length))
    weight = torch.arange(1.0, length + 1)
    whole = torch.rand(length, requires_grad=True)
    (got,) = torch.autograd.grad((handler.dispatch(whole, 0) * weight[mine]).sum(), whole)
    want = torch.zeros(length)
    want[mine] = weight[mine]
    part = torch.rand(length // 3, requires_grad=True)
    (local,) = torch.autograd.grad((handler.combine(part, 0) * weight).sum(), part)
    return torch.equal(got, want) and torch.equal(local, weight[mine])


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_gradients(ranks: Any, layout: str) -> None:
    assert all(ranks(3, gradients, layout))


@on_ranks
def written_in_place(layout: str) -> tuple[list[float], str]:
    """Errors of gradients through results that are written in place, beside new tensors; and the error of a result that
    attention has saved for its backward."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    handler, g = ContextParallelHandler(mesh, layout), torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    attended = partial(attention, x, x, x, mesh=mesh, layout=layout, is_causal=True)
    calls: list[Callable[[], Tensor]] = [
        lambda: handler.combine(x, 2, gradients=None),
        lambda: handler.combine(x, 2, length=7, gradients=None),
        lambda: handler.roll_tensor(x, -1, 2)[0],
        lambda: attended(ulysses_degree=2).transpose(1, 2).flatten(2),
    ]
    for call in calls:
        out, want = call(), call() * 3
        out *= 3
        grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, want)]
        found += [relative_error(out, want), relative_error(*grads)]
    out = attended()
    out *= 3
    return found, error_of(lambda: out.sum().backward())


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_results_may_be_written_in_place(ranks: Any, layout: str) -> None:
    """As on one device, where those that backward needs raise, too."""
    for errors, told in ranks(2, written_in_place, layout):
        assert errors == [0.0] * 8 and "has been modified by an inplace operation" in told


@on_ranks
def mistakes() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    style = ContextParallel(layout="head_tail")
    handler = ContextParallelHandler(mesh, style)
    found = [handler.layout]
    for make in (
        lambda: handler.dispatch(torch.zeros(2, 6), 1),
        lambda: handler.combine(torch.zeros(2, 3), 1),
        lambda: handler.dispatch(torch.zeros(2, 6), 2),
        lambda: handler.position_ids(6),
        lambda: handler.dispatch([1, 2]),  # type: ignore[arg-type]
        lambda: ContextParallelHandler(mesh, "zigzag"),
        lambda: ContextParallelHandler(mesh, 3),  # type: ignore[arg-type]
    ):
        try:
            make()
            found.append("nothing")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_mistakes_are_named(ranks: Any) -> None:
    words = ["head_tail", "shape[1]=6", "=6", "seq_dim=2", "length=6", "list", "'zigzag'", "style is a int"]
    for found in ranks(2, mistakes):
        for text, word in zip(found, words, strict=True):
            assert word in text, (text, word)


@on_ranks
def of_dtensors() -> dict[str, str]:
    world = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    handler = ContextParallelHandler(world["cp"], "head_tail")
    x = distribute_tensor(torch.zeros(2, 4, dtype=torch.float64), world["tp"], [Shard(1)])
    local, placed = x.to_local(), r"is a DTensor placed \(Shard\(dim=1\),\).*to_local.*full_tensor"
    return errors_of(
        {
            f"TypeError: tensor {placed}": lambda: handler.combine(x, 1),
            f"TypeError: tensor {placed}.*$": lambda: handler.roll_tensor(x, -1, 1),
            f"TypeError: x {placed}": lambda: handler.pool(x),
            f"TypeError: mask {placed}": lambda: handler.pool(local, mask=x),
            f"TypeError: labels {placed}": lambda: handler.mean_loss(local, x, elsewhere=True),
            f"TypeError: mask {placed}.*$": lambda: handler.mean_loss(local, mask=x, elsewhere=True),
            f"TypeError: labels {placed}.*$": lambda: handler.log_probs(local, x, head=torch.nn.Linear(4, 4)),
        }
    )


def test_dtensors_are_refused(ranks: Any) -> None:
    """Hidden states between layers of tensor parallelism may be DTensors."""
    check_errors(ranks(2, of_dtensors))


# --------------------------------------------------------------------------- any length


@on_ranks
def any_length(layout: str) -> dict[str, float]:
    """Errors of non-causal and causal attention, and of a loss, over lengths that do not split evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, kv_exchange="ring", layout=layout)
    handler, found = ContextParallelHandler(mesh, style), {}
    for length in (1, 7, 13, 24):
        g = torch.Generator().manual_seed(length)
        whole = [torch.randn(2, 2, length, 4, dtype=torch.float64, generator=g) for _ in range(3)]
        labels = torch.randint(4, (2, 2, length), generator=g)
        for causal in (True, False):
            module = modules.BNSD(causal)
            parallelize_module(module, mesh, {"": style})
            local = [handler.dispatch(x, 2, pad_value=9.0).requires_grad_() for x in whole]
            mine = handler.dispatch(labels, 2, pad_value=-100)
            with handler.documents([0, length]):
                out = module(*local)
            loss = F.cross_entropy(out.flatten(0, 2), mine.flatten(), reduction="sum", ignore_index=-100)
            grads = torch.autograd.grad(loss / labels.numel(), local)
            wide = [x.clone().requires_grad_() for x in whole]
            want = plain_attention(*wide, is_causal=causal)
            want_loss = F.cross_entropy(want.flatten(0, 2), labels.flatten())
            want_grads = torch.autograd.grad(want_loss, wide)
            total = loss.detach() / labels.numel()
            dist.all_reduce(total)
            key = f"{length} {'causal' if causal else 'full'}"
            found[f"{key} loss"] = abs(total.item() - want_loss.item())
            found[f"{key} out"] = relative_error(handler.combine(out.detach(), 2, length=length), want.detach())
            for a, b in zip(grads, want_grads, strict=True):
                difference = (handler.combine(a, 2, length=length) - b).abs().max().item()
                found[f"{key} gradients"] = max(found.get(f"{key} gradients", 0.0), difference)
    return found


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("world", [2, 3])
def test_any_sequence_length(ranks: Any, world: int, layout: str) -> None:
    for found in ranks(world, any_length, layout):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def wrong_length() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    handler = ContextParallelHandler(mesh, "head_tail")
    handler.combine(handler.dispatch(torch.zeros(1, 13), pad_value=0), length=3)


def test_combining_to_another_length_is_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "length=3 pads to 4 positions. The ranks hold 16", wrong_length)


# --------------------------------------------------------------------------- rotary embedding


def rotated(x: Tensor, at: Tensor, thetas: Tensor, interleaved: bool) -> Tensor:
    """The oracle: pairs of the last dimension of ``[B, S, H, D]`` as complex numbers, rotated by position x theta."""
    half = len(thetas)
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    angle = at[..., None, None] * thetas
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    pair = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((pair, rest), -1)


@on_ranks
def rotary(layout: str) -> float:
    world = dist.get_world_size()
    handler = ContextParallelHandler(init_device_mesh("cpu", (world,)), layout)
    length, g = 24, torch.Generator().manual_seed(5)
    mine = torch.tensor(token_positions(layout, dist.get_rank(), world, length))
    thetas = 0.7 ** torch.arange(3, dtype=torch.float64)
    x = torch.randn(2, length, 2, 8, dtype=torch.float64, generator=g)  # D = 8, R = 6
    local, worst = x[:, mine], 0.0
    assert handler.get_rotary_seq_len(local) == handler.get_rotary_seq_len(length // world) == length
    for documents in (None, [0, 5, 6, 17, 24], [[0, 24], [0, 3, 20, 24]]):
        rows = [[0, length]] if documents is None else documents if isinstance(documents[0], list) else [documents]
        at = torch.tensor([[p - max(b for b in row if b <= p) for p in range(length)] for row in rows]).double()
        longest = handler.get_rotary_seq_len(local.transpose(0, 1), 0, documents=documents)
        assert longest == at.max() + 1
        for interleaved in (False, True):
            single = torch.arange(longest, dtype=torch.float64)[:, None] * thetas
            table = single.repeat_interleave(2, -1) if interleaved else torch.cat((single, single), -1)
            want = rotated(x, at, thetas, interleaved)[:, mine]
            calls = [
                handler.apply_rotary_pos_emb(local, table, interleaved=interleaved, documents=documents),
                handler.apply_rotary_pos_emb(
                    local.transpose(0, 1), table[:, None, None], 0, interleaved=interleaved, documents=documents
                ).transpose(0, 1),
            ]
            if len(rows) == 1:
                here = handler.get_emb_on_this_cp_rank(table[:, None, None], documents=documents)
                assert here.shape == (length // world, 1, 1, 6)
                calls.append(handler.apply_rotary_pos_emb(local, here, interleaved=interleaved, local=True))
            if documents is not None:
                with handler.documents(documents):
                    calls.append(handler.apply_rotary_pos_emb(local, table, interleaved=interleaved))
                    assert handler.get_rotary_seq_len(local) == longest
            worst = max(worst, *(relative_error(c, want) for c in calls))
    scaled = handler.apply_rotary_pos_emb(local.bfloat16(), torch.zeros(length, 8), mscale=0.5)
    assert scaled.dtype == torch.bfloat16 and torch.equal(scaled, local.bfloat16() * 0.5)
    return worst


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("world", [2, 3])
def test_rotary_embedding_by_true_positions(ranks: Any, world: int, layout: str) -> None:
    assert max(ranks(world, rotary, layout)) <= 1e-12


@on_ranks
def behind_padding(layout: str) -> list[bool]:
    """True where rows of tables, and angles, are those of a batch's ``position_ids`` on its tokens, before which there
    is padding, in as many positions in each row or not."""
    handler, found = ContextParallelHandler(init_device_mesh("cpu", (2,)), layout), []
    table, x = torch.arange(11.0)[:, None], torch.randn(2, 11, 1, 2, dtype=torch.float64)
    packed = {"cu_seqlens": [0, 4, 9], "cu_seqlens_padded": [0, 5, 11]}
    for padding, more, longest in (
        ((3, 3), {}, 11),
        ((1, 4), {}, 11),
        ((1, 4), {"cu_seqlens": [0, 7, 11]}, 7),
        ((0, 2), packed, 5),
    ):
        mask = torch.arange(11) >= torch.tensor(padding)[:, None]
        batch = handler.get_batch_on_this_cp_rank({"x": x, "attention_mask": mask, **more})
        for given in (batch, pickle.loads(pickle.dumps(batch)), batch.documents):
            with handler.documents(given):
                rows = handler.get_emb_on_this_cp_rank(table)[:, 0]
                turned = handler.apply_rotary_pos_emb(batch["x"], table.double().expand(-1, 2))
                assert handler.get_rotary_seq_len(len(rows)) == longest
            at = batch["position_ids"]
            want = rotated(batch["x"], at.double(), torch.ones(1, dtype=torch.float64), False)
            found += [torch.equal(rows.expand(2, -1), at.float()), relative_error(turned, want) <= 1e-12]
    return found


@pytest.mark.parametrize("layout", ["head_tail", "per_document"])
def test_tables_have_the_positions_of_a_padded_batch(ranks: Any, layout: str) -> None:
    for found in ranks(2, behind_padding, layout):
        assert all(found), found


@on_ranks
def wrong_rotary() -> dict[str, str]:
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "head_tail")
    x = torch.zeros(2, 4, 1, 4)  # S = 8
    once = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    return errors_of(
        {
            "has 4 positions in dimension 0. Tokens of this rank are at positions up to": lambda: (
                handler.apply_rotary_pos_emb(x, torch.zeros(4, 4))
            ),
            "freqs has 8 rows, and tensor has 4": lambda: handler.apply_rotary_pos_emb(
                x, torch.zeros(8, 4), local=True
            ),
            "freqs has 3 angles": lambda: handler.apply_rotary_pos_emb(x, torch.zeros(8, 3)),
            "TypeError: freqs is torch.complex64, as tables of cosines": lambda: handler.apply_rotary_pos_emb(
                x, torch.polar(torch.ones(8, 2), once), interleaved=True
            ),
            "freqs has 2 angles per position, which are not each angle twice in halves, for 4": lambda: (
                handler.apply_rotary_pos_emb(x, once)
            ),
            r"each angle twice next to each other \(interleaved=True\), for 8": lambda: handler.apply_rotary_pos_emb(
                x.repeat(1, 1, 1, 2), once.repeat(1, 2), interleaved=True
            ),
            "Each position has R angles": lambda: handler.apply_rotary_pos_emb(x, torch.zeros(8, 2, 4)),
            "differ between the 2 rows": lambda: handler.get_emb_on_this_cp_rank(
                torch.zeros(8, 4), documents=[[0, 8], [0, 3, 8]]
            ),
            "restart=True without documents": lambda: handler.position_ids(8, restart=True),
        }
    )


def test_wrong_rotary_is_refused(ranks: Any) -> None:
    check_errors(ranks(2, wrong_rotary))


# --------------------------------------------------------------------------- attention without a plan


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, str]:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True), "note"


@on_ranks
def cores(layout: str, degree: int | None) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    handler = ContextParallelHandler(mesh, ContextParallel(2, 1, degree, None, layout=layout))
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, h, 24, 8, dtype=torch.float64, generator=g) for h in (4, 2, 2))
    local = [handler.dispatch(x, 2) for x in (q, k, v)]
    other = [x.transpose(1, 2) for x in local]  # [B, S, H, D] for a module that takes it
    documents = [0, 7, 24]
    seen = torch.ones(24, 24, dtype=torch.bool).tril()
    seen[7:, :7] = False
    worst = 0.0
    for _ in range(2):
        want = plain_attention(q, k, v, is_causal=True, scale=0.3)
        out, note = handler.core_attn(attend, *local, 0.3, causal=True)
        assert note == "note"
        worst = max(worst, relative_error(handler.combine(out, 2), want))
        out = handler.core_attn(modules.BSHD(True), *other, seq_dim=1, head_dim=2)
        want = plain_attention(q, k, v, is_causal=True)
        worst = max(worst, relative_error(handler.combine(out, 1).transpose(1, 2), want))
        out = handler.core_attn(modules.BNSD(False), *local, documents=documents)
        with handler.documents(documents):
            again = handler.core_attn(modules.BNSD(True), *local)
        want = plain_attention(q, k, v, is_causal=True, visible=seen)
        worst = max(worst, relative_error(handler.combine(again, 2), want))
        same = torch.ones(24, 24, dtype=torch.bool)
        same[7:, :7] = same[:7, 7:] = False
        worst = max(worst, relative_error(handler.combine(out, 2), plain_attention(q, k, v, visible=same)))
    return worst


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("world,degree", [(2, None), (3, 1), (4, 2)])
def test_core_attn_runs_any_callable(ranks: Any, world: int, degree: int | None, layout: str) -> None:
    assert max(ranks(world, cores, layout, degree)) <= 1e-10


@on_ranks
def core_without_style() -> None:
    x = torch.zeros(1, 2, 2, 4)
    ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous").core_attn(attend, x, x, x, 1.0)


def test_core_attn_needs_a_style(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "A layout does not say how attention runs", core_without_style)


# --------------------------------------------------------------------------- Megatron's cp_comm_type


@on_ranks
def of_comm_type(word: Any, sizes: list[int] | None, names: tuple[str, ...]) -> tuple[float, list[str]]:
    """The error of causal attention of [S, B, H, D] in Megatron's layout, and the transfers of each layer."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)
    handler = get_cp_handler_cls("transformer_engine", word)(mesh, hierarchical_context_parallel_sizes=sizes)
    assert handler.layout == "head_tail" and handler.style is handler.styles[0]
    g, worst, travels = torch.Generator().manual_seed(9), 0.0, []
    q, k, v = (torch.randn(16, 1, 4, 8, dtype=torch.float64, generator=g) for _ in range(3))
    local = [handler.dispatch(tensor=x, seq_dim=0) for x in (q, k, v)]
    want = plain_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True).permute(2, 0, 1, 3)
    for style in handler.styles:
        module = SBHD()
        parallelize_module(module, mesh, style)
        with comm.record_traffic() as log:
            out = module(*local)
        travels.append("+".join(sorted({name for name, _ in log.entries if name != "agreement"})))
        worst = max(worst, relative_error(handler.combine(tensor=out, seq_dim=0), want))
    worst = max(worst, relative_error(handler.combine(handler.core_attn(SBHD(), *local), 0), want))
    return worst, travels


class SBHD(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


@pytest.mark.parametrize(
    "word,sizes,names,travels",
    [
        ("p2p", None, ("cp",), ["send_recv"]),
        ("all_gather", None, ("cp",), ["all_gather"]),
        ("a2a", None, ("cp",), ["all_to_all"]),
        ("a2a+p2p", [2, 2], ("cp",), ["all_to_all+send_recv"]),
        ("a2a+p2p", None, ("ring", "ulysses"), ["all_to_all+send_recv"]),
        (["a2a", "p2p", "a2a"], None, ("cp",), ["all_to_all", "send_recv", "all_to_all"]),
    ],
)
def test_every_cp_comm_type(ranks: Any, word: Any, sizes: Any, names: Any, travels: list[str]) -> None:
    for worst, found in ranks(4, of_comm_type, word, sizes, names):
        assert worst <= 1e-10 and found == travels


@pytest.mark.parametrize(
    "backend,word,words",
    [
        ("flash", "p2p", "backend='flash'.*'transformer_engine'"),
        (None, "ring", r"cp_comm_type='ring' is unknown\. .* Choose one of 'p2p', 'all_gather', 'a2a', 'a2a\+p2p'"),
        (None, ["p2p", None], "cp_comm_type=None is unknown"),
        (None, [], r"cp_comm_type=\[\] is unknown"),
    ],
)
def test_an_unknown_cp_comm_type_lists_the_known(backend: Any, word: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_cp_handler_cls(backend, word)


@on_ranks
def wrong_options(**options: Any) -> None:
    get_cp_handler_cls(None, "a2a+p2p")(init_device_mesh("cpu", (2,)), **options)


def test_wrong_options_of_a_handler_class(ranks: Any) -> None:
    ranks.raises(2, "ValueError", r"sizes=None with cp_comm_type='a2a\+p2p'.*product of .* must be 2", wrong_options)
    sizes = [2, 2]
    ranks.raises(2, "ValueError", r"sizes=\[2, 2\]", wrong_options, hierarchical_context_parallel_sizes=sizes)
    ranks.raises(2, "ValueError", "qkv_format='bsh'.*'sbhd'", wrong_options, qkv_format="bsh")
    ranks.raises(2, "ValueError", "kv_exchange is what cp_comm_type", wrong_options, kv_exchange="ring")


@on_ranks
def dropout_masks(seeded: bool) -> list[list[bool]]:
    """The masks of nn.Dropout on this rank: of one seed on all ranks, and again."""
    handler = ContextParallelHandler(init_device_mesh("cpu", (2,)), "contiguous")
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        if seeded:
            handler.seed_dropout(3)
        found.append((torch.nn.Dropout(0.5)(torch.ones(64)) == 0).tolist())
    return found


def test_ranks_draw_other_dropout_masks_once_they_are_seeded(ranks: Any) -> None:
    for seeded in (False, True):
        (a, again), (b, _) = ranks(2, dropout_masks, seeded)
        assert a == again and (a != b) == seeded


@on_ranks
def copied_and_renamed() -> list[float]:
    """Errors of a mean whose labels have a name of the user's, and of a pooled value of a batch that was pickled, in
    batches that are padded."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    handler = ContextParallelHandler(mesh, ContextParallel(ulysses_degree=1, layout="head_tail"))
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 5, dtype=torch.float64, generator=g)
    targets = torch.randint(5, (2, 9), generator=g)
    batch = handler.get_batch_on_this_cp_rank({"logits": logits, "targets": targets}, {"logits": 1, "targets": 1})
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    given, labels = batch["logits"], batch["targets"]
    with handler.documents(batch):
        found.append((handler.mean_loss(given, labels, elsewhere=True) - want).abs().item())
        losses = F.cross_entropy(given.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        every = torch.ones_like(labels, dtype=torch.bool)  # on padding, too
        found.append((handler.mean_loss(losses, mask=every, elsewhere=True) - want).abs().item())
    other = handler.dispatch(F.pad(targets, (0, 3), value=1), 1)  # a whole batch of that length, in no block
    logits = F.pad(logits, (0, 0, 0, 3))
    want = F.cross_entropy(logits.flatten(0, 1), F.pad(targets, (0, 3), value=1).flatten())
    found.append((handler.mean_loss(handler.dispatch(logits, 1), other, elsewhere=True) - want).abs().item())
    logits = logits[:, :9]
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    whole = {"x": logits, "attention_mask": mask}
    copy = pickle.loads(pickle.dumps(handler.get_batch_on_this_cp_rank(whole, {"x": 1})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no attention runs in this block
        with handler.documents(copy):
            pooled = handler.pool(copy["x"])
    means = torch.stack([logits[0, 4:].mean(0), logits[1].mean(0)])[:, None]
    found.append((pooled - means).abs().max().item() if pooled.shape == means.shape else 1.0)
    return found


def test_padded_batches_that_are_copied_or_have_other_names(ranks: Any) -> None:
    for found in ranks(2, copied_and_renamed):
        assert max(found) <= 1e-12, found
