"""Hosts in network namespaces of this machine, on one switch: each with an address of its own, some behind a slow link.

Linux and root. Nothing of the machine's own network is touched: the switch is a bridge in a namespace too. A host's link
can be capped (the kernel's token bucket, `tbf`) and, in kernels that have no `netem`, delayed: its frames then take a way
through two TAP devices, between which a thread of this process holds each of them back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.hosts import Host, HostNetwork

PREFIX = "10.251.78"
BRIDGE = "switch"
DEVICE = "eth0"
MTU = 9000
_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000


def usable() -> bool:
    """Whether this process may make network namespaces and links in them."""
    probe = "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["unshare", "--net", "bash", "-c", probe], capture_output=True, timeout=20, check=False)
        return os.geteuid() == 0 and done.returncode == 0
    return False


@dataclass
class NamespaceHost(Host):
    """A host that is a network namespace."""

    namespace: str = ""
    port: str = ""
    """Its end of the link at the switch."""

    def __post_init__(self) -> None:
        self.inside = ("ip", "netns", "exec", self.namespace)

    def processes(self) -> list[int]:
        return [int(pid) for pid in _sh("ip", "netns", "pids", self.namespace, check=False).split()]

    def bytes(self) -> tuple[int, int]:
        """Bytes that it has received and sent."""
        there = ("cat", *(f"/sys/class/net/{DEVICE}/statistics/{way}_bytes" for way in ("rx", "tx")))
        received, sent = _sh(*self.inside, *there).split()
        return int(received), int(sent)


class NodeNetwork(HostNetwork):
    """Hosts in network namespaces on one switch."""

    kind = "network namespaces"

    def __init__(self) -> None:
        super().__init__()
        self._name = f"pods{os.getpid()}"
        self._switch = f"{self._name}-switch"
        self._delays: dict[str, _Delay] = {}

    def __enter__(self) -> Self:
        _sh("ip", "netns", "add", self._switch)
        self._in_switch("ip", "link", "add", BRIDGE, "mtu", str(MTU), "type", "bridge")
        self._in_switch("ip", "link", "set", BRIDGE, "up")
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for delay in self._delays.values():
            delay.close()
        for host in self.hosts:
            _sh("ip", "netns", "del", self._space(host), check=False)
        _sh("ip", "netns", "del", self._switch, check=False)

    def add(self, name: str) -> NamespaceHost:
        number = len(self.hosts) + 1
        host = NamespaceHost(name, f"{PREFIX}.{number}", namespace=self._space(name), port=f"port{number}")
        _sh("ip", "netns", "add", host.namespace)
        self.hosts[name] = host
        self._in_switch("ip", "link", "add", host.port, "mtu", str(MTU), "type", "veth",
                        "peer", "name", DEVICE, "mtu", str(MTU), "netns", host.namespace)  # fmt: skip
        self._in_switch("ip", "link", "set", host.port, "master", BRIDGE, "up")
        _sh(*host.inside, "ip", "addr", "add", f"{host.address}/24", "dev", DEVICE)
        for device in (DEVICE, "lo"):
            _sh(*host.inside, "ip", "link", "set", device, "up")
        return host

    def cut(self, host: Host) -> None:
        self._in_switch("ip", "link", "set", self._port(host), "down")

    def own_disk(self, host: Host, folder: Path, seen: Path) -> list[str]:
        disk = folder / host.name
        for place in (disk, seen):
            place.mkdir(parents=True, exist_ok=True)
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return [*host.inside, "unshare", "--mount", "bash", "-c", script, "disk", str(disk), str(seen)]

    def cap(self, host: Host, megabits: float) -> None:
        """Cap the host's link in both directions; 0: no cap."""
        for where, device in ((host.inside, DEVICE), (self._inside, self._port(host))):
            _sh(*where, "tc", "qdisc", "del", "dev", device, "root", check=False)
            if megabits:
                _sh(*where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{megabits:g}mbit",
                    "burst", "64kb", "latency", "200ms")  # fmt: skip

    def delay(self, host: Host, milliseconds: float) -> None:
        """Make each frame from and to the host take so much longer; 0: as before."""
        if milliseconds and host.name not in self._delays:
            self._delays[host.name] = _Delay(self._switch, self._port(host))
        if (delay := self._delays.get(host.name)) is not None:
            delay.seconds = milliseconds / 1000
            self._in_switch("ip", "link", "set", self._port(host), "master", delay.bridge if milliseconds else BRIDGE)

    def round_trip(self, one: Host, other: Host) -> float:
        """Milliseconds of a TCP connection between two hosts, the best of five: one way there and back."""
        code = (
            "import socket, sys, time\n"
            "best = 9e9\n"
            "for _ in range(5):\n"
            "    began = time.perf_counter()\n"
            "    try: socket.create_connection((sys.argv[1], 9), 5)\n"
            "    except ConnectionRefusedError: best = min(best, time.perf_counter() - began)\n"
            "print(best * 1000)"
        )
        return float(_sh(*one.inside, "python3", "-c", code, other.address))

    def _space(self, name: str) -> str:
        return f"{self._name}-{name}"

    @staticmethod
    def _port(host: Host) -> str:
        assert isinstance(host, NamespaceHost)
        return host.port

    @property
    def _inside(self) -> tuple[str, ...]:
        return "ip", "netns", "exec", self._switch

    def _in_switch(self, *command: str) -> str:
        return _sh(*self._inside, *command)


class _Delay:
    """A bridge of its own for a host's link, joined to the switch by two TAP devices and a thread that waits."""

    def __init__(self, switch: str, port: str) -> None:
        self.bridge = f"{port}-far"
        self.seconds = 0.0
        near, far = f"{port}-n", f"{port}-f"
        self._taps = _taps(switch, (near, far))
        inside = ("ip", "netns", "exec", switch)
        _sh(*inside, "ip", "link", "add", self.bridge, "mtu", str(MTU), "type", "bridge")
        for device, bridge in ((near, BRIDGE), (far, self.bridge)):
            _sh(*inside, "ip", "link", "set", device, "mtu", str(MTU), "master", bridge, "up")
        _sh(*inside, "ip", "link", "set", self.bridge, "up")
        self._ends, self._end = os.pipe()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._end)
        self._thread.join(10)
        for number in (*self._taps, self._ends):
            os.close(number)

    def _pass_on(self) -> None:
        near, far = self._taps
        other = {near: far, far: near}
        waiting: deque[tuple[float, int, bytes]] = deque()
        with selectors.DefaultSelector() as ready:
            for number in (near, far, self._ends):
                ready.register(number, selectors.EVENT_READ)
            while True:
                patience = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
                for key, _ in ready.select(patience):
                    if key.fd == self._ends:
                        return
                    with contextlib.suppress(BlockingIOError):
                        while frame := os.read(key.fd, MTU + 64):
                            waiting.append((time.monotonic() + self.seconds, other[key.fd], frame))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, to, frame = waiting.popleft()
                    with contextlib.suppress(OSError):  # a queue that is full drops it, as a switch does
                        os.write(to, frame)


def _taps(namespace: str, names: Sequence[str]) -> tuple[int, ...]:
    """TAP devices in a namespace; a thread goes there to open them, since a namespace is a thread's own."""
    found: list[int] = []

    def open_them() -> None:
        with Path("/run/netns", namespace).open() as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
                return
        for name in names:
            number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
            found.append(number)

    thread = threading.Thread(target=open_them)
    thread.start()
    thread.join()
    if len(found) != len(names):
        raise OSError(f"no TAP device could be opened in {namespace}")
    return tuple(found)


def _sh(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
