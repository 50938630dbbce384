"""Gives each rank a host's network of its own: namespaces joined by a switch, with links of a fixed rate both ways.

A link is a pair of virtual devices. A token bucket (``tc tbf``) at either end limits what the rank sends and what it
receives, each to the whole rate, as on a full-duplex network card. Ranks of one host have a bucket for other hosts
only (``tc htb``): what they send to each other is not limited. Nothing here has a name outside of its namespace, so
there is nothing to clean up: the kernel removes namespaces, devices and limits with the last process in them, however
these processes end. Linux, root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET; os.unshare is new in Python 3.12
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"  # that of the namespace of the process that opens it
_MAKE_SWITCH = "ip link add switch type bridge && ip link set switch up"
_TRY = (
    f"{_MAKE_SWITCH} && echo reno > {_CONGESTION} && ip link add near type veth peer name far && "
    "tc qdisc replace dev near root tbf rate 100mbit burst 128kb limit 64mb"
)

BURST = 128 * 1024
"""Bytes that pass at once: a packet of 64 KiB must fit, which the kernel passes on uncut, as to a card that cuts it."""

QUEUE = 64 * 1024 * 1024
"""Bytes that may wait for a link: more than TCP has under way, so that nothing is dropped. (A loss that TCP detects by
its timeout costs 0.2 s, as long as a whole step.)"""


def why_not() -> str:
    """Return the reason why there can be no such links here, in a sentence; empty if there can."""
    if sys.platform != "linux":
        return f"Network namespaces exist on Linux only, and this is {sys.platform}."
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"The commands {', '.join(missing)} are missing (packages iproute2 and util-linux)."
    if os.geteuid() != 0:
        return "Only root may make network namespaces, and this process runs as another user."
    found = subprocess.run(["unshare", "--net", "sh", "-c", _TRY], capture_output=True, text=True)
    if found.returncode:
        return f"This machine cannot make such links: {' '.join(found.stderr.split()) or 'unshare --net failed'}."
    return ""


@contextmanager
def switch() -> Iterator[int]:
    """Run a process whose network namespace is the switch, and yield its number. It ends with its standard input, so
    with this process too."""
    command = ["unshare", "--net", "sh", "-c", f"{_MAKE_SWITCH} && echo ready && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the switch could not be made. {why_not()}")
            yield process.pid
        finally:
            process.kill()


def limit_all(link: Link | None, rate: float | None) -> None:
    """Limit the links of all ranks at the same time; every rank makes the call. Without links the ranks only meet."""
    dist.barrier()
    if link is not None:
        link.limit(rate)
    dist.barrier()


class Link:
    """The link of one rank. It moves the calling process into a network namespace of its own, so make it in a process
    of the rank, before its process group and in its main thread.

    Args:
        switch: the number of the process whose namespace is the switch.
        per_host: adjacent ranks of a host.
        congestion: how TCP decides how much it sends. With "reno", which every Linux has, it sends as much as the
            receiver takes where nothing is dropped. "cubic" and "bbr", the defaults of hosts, go by delays too, and
            several connections that share a link then seldom fill it. A namespace may have reno and the host's default.
    """

    def __init__(self, switch: int, rank: int, congestion: str = "reno", per_host: int = 1) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SIGNAL_OF_PARENT, signal.SIGKILL)  # a rank whose parent is gone would wait for other ranks
        if libc.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "no network namespace for this rank")
        self.switch, self.port = switch, f"port{rank}"
        first = rank - rank % per_host
        self.limited, self.inside = False, [other for other in range(first, first + per_host) if other != rank]
        self._run(f"ip link add {self.port} type veth peer name eth0 netns {os.getpid()}", at_switch=True)
        self._run(f"ip link set {self.port} master switch up", at_switch=True)
        self._control(congestion)
        self._run("ip link set lo up")
        self._run("ip link set eth0 addrgenmode none")  # gloo takes the interface's first address: there is one
        self._run(f"ip address add {_address(rank)}/24 dev eth0")
        self._run("ip link set eth0 up")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def limit(self, rate: float | None) -> None:
        """Limit both directions to ``rate`` Mbit/s; None: not at all."""
        if rate is None and not self.limited:
            return
        for device, at_switch in (("eth0", False), (self.port, True)):
            if rate is None or self.inside:
                self._run(f"tc qdisc del dev {device} root", at_switch, self.limited)
            if rate is not None and self.inside:
                self._divide(device, rate, at_switch)
            elif rate is not None:
                limit = f"tbf rate {round(rate * 1e6)}bit burst {BURST} limit {QUEUE}"
                self._run(f"tc qdisc replace dev {device} root {limit}", at_switch)
        self.limited = rate is not None

    def _divide(self, device: str, rate: float, at_switch: bool) -> None:
        """Limit what goes to other hosts, or comes from them."""
        limited = f"htb rate {round(rate * 1e6)}bit burst {BURST} cburst {BURST} quantum {BURST}"
        free = f"htb rate 100gbit burst {BURST} cburst {BURST} quantum {BURST}"
        self._run(f"tc qdisc add dev {device} root handle 1: htb default 1", at_switch)
        for number, what in (("1", limited), ("2", free)):
            self._run(f"tc class add dev {device} parent 1: classid 1:{number} {what}", at_switch)
            self._run(f"tc qdisc add dev {device} parent 1:{number} bfifo limit {QUEUE}", at_switch)
        for rank in self.inside:
            where = f"match ip {'src' if at_switch else 'dst'} {_address(rank)}/32 flowid 1:2"
            self._run(f"tc filter add dev {device} parent 1: protocol ip prio 1 u32 {where}", at_switch)

    def _control(self, congestion: str) -> None:
        with open(_CONGESTION.replace("tcp_", "tcp_allowed_")) as names:
            known = names.read().split()
        if congestion not in known:
            raise ValueError(f"congestion={congestion!r} is not among those that a namespace may have: {known}")
        with open(_CONGESTION, "w") as setting:
            setting.write(congestion)

    def _run(self, command: str, at_switch: bool = False, check: bool = True) -> None:
        enter = ["nsenter", "--net", "--target", str(self.switch)] if at_switch else []
        quiet = {} if check else {"stderr": subprocess.DEVNULL}
        subprocess.run([*enter, *command.split()], check=check, **quiet)


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"
