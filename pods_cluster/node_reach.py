"""Whether this machine reaches the nodes of the Ray cluster: one that is gone or cut off is known in seconds, while Ray takes up
to a minute to call it dead, and places processes there until then.

Ray's own process on a node (the raylet) listens at a port that all nodes have to reach. There the kernel accepts connections,
however busy the node and its processes are, also those that are stopped. Where none is made, the node is gone or cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import select
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

CONNECT_SECONDS = 2.0
"""Time for a connection: the kernel asks twice in it."""
LOOK_UP_SECONDS = 5.0
"""Deadline of Ray's answer where its nodes are. Without one nothing is known of any."""
KNOWN_SECONDS = 10.0
"""A node that was not reached is not tried again for so long by what looks for places."""
NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives to each node: its id."""
_NOT_REACHED = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
}

Address = tuple[str, int]

_addresses: dict[str, Address] = {}  # a node keeps its address as long as it has its id
_lost_at: dict[str, float] = {}


async def reaches(node: str) -> bool:
    """Whether this machine reaches a Ray node; True where that cannot be known."""
    try:
        address = await asyncio.wait_for(asyncio.to_thread(_address_of, node), LOOK_UP_SECONDS)
    except Exception:  # Ray does not answer
        return True
    return address is None or not await asyncio.to_thread(unreached, [address])


def reaches_now(node: str) -> bool:
    """The same for a thread that may wait."""
    address = _address_of(node)
    return address is None or not unreached([address])


def node_of(actor: Any) -> str | None:
    """The node of a Ray actor, by its handle; None where Ray does not tell."""
    from ray._private.state import actors

    try:
        return actors(actor._ray_actor_id.hex())["Address"]["NodeID"] or None
    except Exception:  # it has none yet, or another release of Ray tells it in another way
        return None


async def unreached_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray takes for alive and this machine does not reach: nothing is to be placed there."""
    try:
        there = await asyncio.wait_for(asyncio.to_thread(_living), LOOK_UP_SECONDS)
    except Exception:
        return frozenset()
    now = time.monotonic()
    known = {node for node in there if now - _lost_at.get(node, -math.inf) < KNOWN_SECONDS}
    lost = await asyncio.to_thread(unreached, [address for node, address in there.items() if node not in known])
    _lost_at.update({node: now for node, address in there.items() if address in lost})
    return frozenset(known | {node for node, address in there.items() if address in lost})


def elsewhere(nodes: Collection[str], place: Mapping[str, str]) -> dict[str, str]:
    """The labels `place`, and that the node is none of these: what Ray takes as `label_selector`."""
    if not nodes:
        return dict(place)
    return {NODE_LABEL: f"!in({', '.join(sorted(nodes))})" if len(nodes) > 1 else f"!{next(iter(nodes))}", **place}


def unreached(addresses: Sequence[Address], seconds: float = CONNECT_SECONDS) -> set[Address]:
    """Those of these addresses at which no connection is made within `seconds`, all at the same time."""
    lost: set[Address] = set()
    with contextlib.ExitStack() as close:
        poll, waiting = select.poll(), dict[int, tuple[socket.socket, Address]]()
        for address in set(addresses):
            try:
                family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
                there = close.enter_context(socket.socket(family, kind, protocol))
            except OSError:  # no name, no free handle: that says nothing about the node
                continue
            there.setblocking(False)
            if (error := there.connect_ex(target)) == errno.EINPROGRESS:
                poll.register(there, select.POLLOUT)
                waiting[there.fileno()] = there, address
            elif error in _NOT_REACHED:
                lost.add(address)
        end = time.monotonic() + seconds
        while waiting and (ready := poll.poll(max(end - time.monotonic(), 0.0) * 1000)):
            for number, _ in ready:
                there, address = waiting.pop(number)
                poll.unregister(there)
                if there.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _NOT_REACHED:
                    lost.add(address)
        return lost | {address for _, address in waiting.values()}


def _address_of(node: str) -> Address | None:
    """Where a node's raylet listens; None for this node and for one that Ray does not know (any more)."""
    import ray

    if not ray.is_initialized() or node == ray.get_runtime_context().get_node_id():
        return None
    if node not in _addresses:
        _addresses.update(_living())
    return _addresses.get(node)


def _living() -> dict[str, Address]:
    """Where the raylets of the other nodes listen that Ray takes for alive."""
    import ray

    if not ray.is_initialized():
        return {}
    here = ray.get_runtime_context().get_node_id()
    nodes: Sequence[Mapping[str, Any]] = ray.nodes()
    return {
        node["NodeID"]: (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
        for node in nodes
        if node["Alive"] and node["NodeID"] != here
    }
