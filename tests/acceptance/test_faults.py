"""Faults on real processes: ranks that are killed, stop, raise or leave a step out; restarts."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh.agreement import Agreement
from hyper_cp.mesh.failures import TransferError
from hyper_cp.ops import SplitCache, decode_attention
from tests.harness import ranks as pool
from tests.harness.ranks import RankEnds, RankError, Ranks, error_of, on_ranks
from tests.harness.small_training import LENGTH, MODES, Fault, Training, close, one_device, tokens

VICTIM = 1
TIMEOUT, SPARE = 2.0, 5.0
"""Seconds of the process groups; seconds beyond in which every other rank must have raised."""

OPERATIONS = "attention|exchange of heads|attention in groups of heads"


# --------------------------------------------------------------------------- ranks that are killed, or stop


@on_ranks
def lose_ranks(teams: list[tuple[list[int], dict[str, Any], str]], number: int) -> None:
    """The first step of each team is right; in the second a signal hits its second rank in the kernel of a layer."""
    members, mode, step = next(team for team in teams if dist.get_rank() in team[0])
    training = Training(mode, TIMEOUT, members, comparisons=30.0)  # ranks start at different times
    training.step(0)
    if dist.get_rank() == members[1]:
        Fault(training.model, step, lambda: os.kill(os.getpid(), number)).arm()
    dist.barrier(training.group)
    started = time.monotonic()
    try:
        training.step(1)
    except Exception as error:
        text = f"{type(error).__name__}: {error} [{time.monotonic() - started:.1f} s]"
        # A rank may wait for one that only waits: it sees that one end.
        raise (RankEnds if len(members) > 2 else RuntimeError)(text) from error


def lose(own_pool: Ranks, number: int, *teams: tuple[list[int], str, str]) -> None:
    world = max(rank for members, _, _ in teams for rank in members) + 1
    with pytest.raises(RankError) as caught:
        own_pool(world, lose_ranks, [(members, MODES[mode], step) for members, mode, step in teams], number)
    texts = caught.value.messages
    for members, mode, step in teams:
        peers = []
        for rank in members[:1] + members[2:]:
            want = (
                rf"TransferError: module 'layers\.[012]\.inner' \(Inner\): ({OPERATIONS}) in {step} on the cp mesh of "
                rf"{len(members)} ranks \(ring \d x ulysses \d\), in batch 2 of this rank: \w+ between this rank "
                rf"\({rank}\) and global ranks? ([\d, ]+) failed: .*Read the first rank's error.*\[([\d.]+) s\]"
            )
            found = re.fullmatch(want, texts[rank], re.S)
            assert found, f"{mode}, {step}, rank {rank}: {texts[rank]}"
            assert float(found[3]) <= TIMEOUT + SPARE
            peers.append(found[2])
        assert any(str(members[1]) in x for x in peers), peers


@pytest.mark.slow
def test_a_killed_rank_in_every_mode(own_pool: Ranks) -> None:
    for mode in MODES:
        if mode != "hybrid":
            lose(own_pool, signal.SIGKILL, ([0, 1], mode, "forward"), ([2, 3], mode, "backward"))
    lose(own_pool, signal.SIGKILL, ([0, 1, 2, 3], "hybrid", "forward"))
    lose(own_pool, signal.SIGKILL, ([0, 1, 2, 3], "hybrid", "backward"))


@pytest.mark.slow
def test_a_rank_that_stops(own_pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 2.5)  # the ranks that have stopped never answer; both teams start about together
    lose(own_pool, signal.SIGSTOP, ([0, 1], "ring", "forward"), ([2, 3], "head groups", "backward"))


@on_ranks
def lose_while_decoding() -> None:
    """A rank is killed between two new tokens: in the gather of the next one the others raise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    cache = SplitCache(mesh)
    cache.fill(k, v)
    for step in range(3):
        if (step, dist.get_rank()) == (2, VICTIM):
            os.kill(os.getpid(), signal.SIGKILL)
        cache.append(k[:, :, :1], v[:, :, :1])
        decode_attention(q[:, :, :1], cache)


def test_a_rank_that_is_killed_while_decoding(own_pool: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        own_pool(2, lose_while_decoding)
    want = (
        r"decode_attention in forward on the cp mesh of 2 ranks \(ring 2 x ulysses 1\): all_gather between this rank "
        r"\(0\) and global rank 1 failed: .*Read the first rank's error.*"
    )
    assert caught.value.types[0] == "TransferError" and re.fullmatch(want, caught.value.messages[0], re.S), caught.value


# --------------------------------------------------------------------------- ranks that raise, or leave a step out


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("simulated")


@on_ranks
def all_raise(modes: list[dict[str, Any]]) -> list[list[float]]:
    """In each mode all ranks run out of memory in a forward and in a backward, and make that step again."""
    found = []
    for mode in modes:
        training, losses = Training(mode), []
        for number, step in enumerate(("forward", "backward")):
            fault = Fault(training.model, step, out_of_memory)
            fault.arm()
            with pytest.raises(torch.OutOfMemoryError):
                training.step(number)
            fault.remove()
            losses.append(training.step(number))
        found.append(losses)
    return found


@pytest.mark.slow
def test_after_an_error_of_all_ranks_the_step_is_exact(ranks: Any) -> None:
    want, hybrid = one_device(2), MODES["hybrid"]
    for found in (*ranks(2, all_raise, [m for m in MODES.values() if m != hybrid]), *ranks(4, all_raise, [hybrid])):
        assert all(close(losses, want) for losses in found), found


@on_ranks
def one_raises() -> list[str]:
    """One rank runs out of memory in backward and goes on with the next step by itself."""
    training, texts = Training(MODES["ring"], 1.5), []
    training.step(0)
    if dist.get_rank() == VICTIM:
        Fault(training.model, "backward", out_of_memory).arm()
    for number in (1, 2):
        started = time.monotonic()
        texts.append(error_of(lambda n=number: training.step(n)))
        assert time.monotonic() - started <= 1.5 + SPARE
        if dist.get_rank() != VICTIM:
            break
    return texts


@pytest.mark.slow
def test_one_rank_that_raises_and_goes_on(ranks: Any) -> None:
    """The others raise; the next step of that rank meets none of their transfers, but waits, and raises too."""
    for rank, (first, *later) in enumerate(ranks(3, one_raises)):
        if rank == VICTIM:
            assert first == "OutOfMemoryError: simulated"
            assert re.search(r"layers.0.*compares its attention call, but ranks .* have not come", later[0]), later
        else:
            assert first.startswith("TransferError: module 'layers.1.inner' (Inner): attention in backward on"), first


@on_ranks
def leaves_a_step_out(with_documents: bool) -> list[str]:
    """One rank leaves the second of three steps out, and then evaluates at another length."""
    training = Training(MODES["ring"], 1.5)
    texts = []
    for number in range(3):
        if number == 1 and dist.get_rank() == VICTIM:
            continue
        entries = {"documents": [0, 4 + 4 * number, LENGTH]} if with_documents else {}
        texts.append(error_of(lambda n=number, e=entries: training.step(n, **e)))
        if texts[-1]:
            return texts
    batch = training.handler.get_batch_on_this_cp_rank({"tokens": tokens(9)[:, :16]}, {"tokens": 1})
    return [*texts, error_of(lambda: training.model(batch["tokens"]))]


@pytest.mark.slow
def test_a_rank_that_leaves_a_step_out(ranks: Any) -> None:
    for found in ranks(2, leaves_a_step_out, True):
        assert re.search(r"different packed documents: ranks \[1\] have others", found[1]), found
    for rank, found in enumerate(ranks(2, leaves_a_step_out, False)):
        want = "RuntimeError.*compares its attention call, but ranks" if rank == VICTIM else "TransferError.*layers"
        assert re.match(want, found[-1]) and not any(found[:-1]), found


# --------------------------------------------------------------------------- another number of ranks


@on_ranks
def part_of_a_training(mode: dict[str, Any], first: int, path: str) -> list[float]:
    """Two steps, from the last checkpoint of others, if there is one, to the next."""
    training = Training(mode)

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        return {"model": model, "optimizer": optimizer}

    if first:
        loaded = state()
        checkpoint.load(loaded, checkpoint_id=f"{path}/{first}")
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
    losses = [training.step(first), training.step(first + 1)]
    checkpoint.save(state(), checkpoint_id=f"{path}/{first + 2}")
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_restart_on_another_number_of_ranks(ranks: Any, tmp_path: Any) -> None:
    losses: list[float] = []
    for world, mode in ((1, "ring"), (2, "load balance"), (4, "hybrid"), (2, "Ulysses")):
        found = ranks(world, part_of_a_training, MODES[mode], len(losses), str(tmp_path))
        assert all(close(x, found[0]) for x in found)
        losses += found[0]
    assert close(losses, one_device(8))


# --------------------------------------------------------------------------- the store


class LostStore:
    """A store whose process has ended."""

    timeout = timedelta(seconds=5)

    def __init__(self) -> None:
        self.add = lambda *_: 1

    def set(self, *_: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "PrefixStore", lambda _, store: store)
    with pytest.raises(TransferError, match=r"layer: rank 0 of the cp mesh compares.*torchrun.*first rank's"):
        Agreement(LostStore(), [0, 1], 0).compare_if_new("call", (("shapes", "x"),), "cp mesh", "layer")
