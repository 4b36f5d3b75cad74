"""Neighbours that pass a version on: a hub among the receivers or the learner itself, and every way in which one fails."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from typing import Any

import pytest
import ray
import torch

from pods_cluster.weights import relay_socket
from pods_cluster.weights.protocol import Invitation, WeightTransferError
from pods_cluster.weights.receiver import Receiver
from pods_cluster.weights.relay_plan import WorkerLocation
from pods_cluster.weights.sender import WeightSender
from pods_cluster.weights.transport import Deadline
from tests.weights.weight_cluster import PATIENT, SHORT, WAIT, Cluster, alive, broadcaster, holds, publish
from tests.weights.weight_parts import TensorSource, make_tensors, make_update

ELSEWHERE = WorkerLocation("another node")


def neighbours(cluster: Cluster, *names: str, location: WorkerLocation | None = ELSEWHERE) -> dict[str, Any]:
    """Workers on one node: another one than the learner's, so that the first is the hub; or (None) the learner's."""
    workers = cluster.workers(*names)
    ray.get([worker.move.remote(location) for worker in workers.values()], timeout=WAIT)
    return workers


def roles(workers: dict[str, Any]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(rank, hub[-2:], others) for rank, hub, others in ray.get([w.role.remote() for w in workers.values()])]


def test_a_hub_passes_on_every_version(cluster):
    workers = neighbours(cluster, "a", "b", "c")
    caster = broadcaster(cluster, relay="node", verify=True, **PATIENT)
    first = publish(caster, cluster, 1, workers)
    assert (first.failed, first.attempts) == ({}, 1)
    assert roles(workers) == [(1, ".1", (2, 3)), (2, ".1", ()), (3, ".1", ())]
    second = publish(caster, cluster, 2, workers)
    assert (second.failed, second.rebuilt) == ({}, False)
    for worker in workers.values():
        holds(worker, 2)
    alive(cluster)
    cluster.give_back()


def test_the_learner_is_the_hub_of_its_own_place_and_sends_to_others_too(cluster):
    here = neighbours(cluster, "a", "b", location=None)
    caster = broadcaster(cluster, relay="node", **PATIENT)
    assert publish(caster, cluster, 1, here).failed == {}
    assert [found[0] for found in roles(here)] == [1, 2], "no broadcast group at all"
    both = here | neighbours(cluster, "c", "d")
    assert publish(caster, cluster, 2, both).failed == {}
    assert [found[0] for found in roles(both)] == [2, 3, 1, 4]
    for worker in both.values():
        holds(worker, 2)
    alive(cluster)
    cluster.give_back()


@pytest.mark.parametrize("who", ["hub", "follower"])
@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_killed_neighbour_is_reported_and_the_others_get_the_version(cluster, who, moment):
    workers = neighbours(cluster, "a", "b", "c")
    caster = broadcaster(cluster, relay="node", **PATIENT)
    assert publish(caster, cluster, 1, workers).failed == {}
    victim = "a" if who == "hub" else "b"
    if moment == "during":
        ray.get(workers[victim].fault.remote(at=2, act="die", times=1), timeout=WAIT)
        cluster.taken.pop(victim)
    else:
        cluster.kill(victim)
    report = publish(caster, cluster, 2, workers)
    assert list(report.failed) == [victim]
    assert "ActorDied" in report.failed[victim]
    rest = {name: worker for name, worker in workers.items() if name != victim}
    for worker in rest.values():
        holds(worker, 2)
    assert publish(caster, cluster, 3, rest).failed == {}
    alive(cluster)
    cluster.give_back()


@pytest.mark.parametrize("who", ["hub", "follower"])
def test_a_stopped_neighbour_is_reported_and_the_others_recover(cluster, who):
    workers = neighbours(cluster, "a", "b", "c")
    victim = "a" if who == "hub" else "b"
    caster = broadcaster(cluster, grace=2.0, relay="node", **SHORT)
    ray.get(workers[victim].fault.remote(at=1, act="stop", times=1), timeout=WAIT)
    report = publish(caster, cluster, 1, workers)
    assert list(report.failed) == [victim]
    assert "did not answer within 2 s" in report.failed[victim]
    for name in workers.keys() - {victim}:
        holds(workers[name], 1)
    alive(cluster)
    cluster.give_back(spent=(victim,))


def test_a_follower_that_does_not_come_is_the_one_that_is_blamed(cluster):
    workers = neighbours(cluster, "a", "b", "c")
    ray.get(workers["b"].fault.remote(act="absent"), timeout=WAIT)
    report = publish(broadcaster(cluster, grace=2.0, relay="node", **SHORT), cluster, 1, workers)
    assert list(report.failed) == ["b"]
    for name in "ac":
        holds(workers[name], 1)
    cluster.give_back()


def test_a_follower_that_cannot_load_costs_a_second_attempt_and_nobody(cluster):
    workers = neighbours(cluster, "a", "b")
    ray.get(workers["b"].fault.remote(at=3, act="raise", times=1), timeout=WAIT)
    report = publish(broadcaster(cluster, relay="node", **PATIENT), cluster, 1, workers)
    assert (report.failed, report.attempts) == ({}, 2)
    for worker in workers.values():
        holds(worker, 1)
    cluster.give_back()


def test_a_newcomer_beside_a_hub_gets_the_version_by_itself(cluster):
    workers = neighbours(cluster, "a", "b")
    newcomer = neighbours(cluster, "c")["c"]
    caster = broadcaster(cluster, relay="node", **PATIENT)
    publish(caster, cluster, 1, workers)
    assert asyncio.run(caster.catch_up(1, "c", newcomer)).failed == {}
    holds(newcomer, 1)
    assert publish(caster, cluster, 2, workers | {"c": newcomer}).failed == {}
    holds(newcomer, 2)
    cluster.give_back()


class Pair:
    """A sender that is a hub, and its one follower, as threads of this process."""

    def __init__(self, name: str) -> None:
        self.source = TensorSource(1)
        self.sender = WeightSender(self.source, 0, "127.0.0.1")
        self.name = name
        self.invitation = Invitation("gloo", "127.0.0.1", 0, 1, 1, name, 10.0, hub=f"{name}.sender")
        self.receiver = Receiver(self.invitation)
        self.held: dict[str, torch.Tensor] = {}

    def meet(self) -> None:
        self.sender.open("gloo", self.name, 0, 10.0, f"{self.name}.sender", (1,))
        coming = threading.Thread(target=self.receiver.connect)
        coming.start()
        self.sender.connect(10.0)
        coming.join()

    def transfer(self) -> None:
        update = make_update(1, 10.0, self.source.specs())
        sending = threading.Thread(target=self.sender.send, args=(update,))
        sending.start()
        self.receiver.receive(update, lambda rows: self.held.update((s.name, t.clone()) for s, t in rows))
        sending.join()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def test_a_handle_that_cannot_be_mapped_makes_the_bytes_come_themselves(monkeypatch):
    """As between containers that share a card but not its memory: torch's and CUDA's errors end there."""
    tried = []

    def handle(buffer: torch.Tensor) -> bytes:
        tried.append(buffer.numel())
        return b"no pickle of ours"

    monkeypatch.setattr(relay_socket, "ipc_handle", handle)
    pair = Pair("unmapped")
    try:
        pair.meet()
        pair.transfer()
    finally:
        pair.close()
    assert len(tried) == 1, "not tried again for the next bucket"
    assert all(torch.equal(pair.held[name], tensor) for name, tensor in make_tensors(1).items())


def test_a_stranger_is_not_taken_for_a_follower():
    pair = Pair("stranger")
    pair.sender.open("gloo", pair.name, 0, 10.0, f"{pair.name}.sender", (1,))
    with relay_socket.open_socket() as stranger:
        stranger.connect(relay_socket.address(f"{pair.name}.sender"))
        stranger.sendall(relay_socket.GREETING.pack(7))
        coming = threading.Thread(target=pair.receiver.connect)
        coming.start()
        pair.sender.connect(10.0)
        coming.join()
        assert stranger.recv(1) == b""
    pair.transfer()
    pair.close()


def drip(stop: threading.Event, other: socket.socket, content: bytes, seconds: float) -> None:
    """Send byte by byte, each well before the receiver's deadline."""
    for byte in content:
        if stop.wait(seconds):
            return
        other.sendall(bytes([byte]))


def test_a_follower_that_answers_byte_by_byte_does_not_outlast_the_deadline():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    stop = threading.Event()
    follower = relay_socket.HubConnection(ours, "drip")
    dripping = threading.Thread(target=drip, args=(stop, theirs, bytes(64), 0.1))
    dripping.start()
    try:
        with pytest.raises(WeightTransferError, match=r"drip: the transfer was not done within 0\.5 s"):
            follower.receive(torch.empty(1000, dtype=torch.uint8), Deadline(0.5))
        assert dripping.is_alive(), "it ended at the deadline, not with the last byte"
    finally:
        stop.set()
        dripping.join()
        theirs.close()
        follower.close()


def test_closing_from_another_thread_ends_every_wait():
    pair = Pair("closed")
    ends = {
        "a hub that waits for its followers": (lambda: pair.sender.connect(30.0), pair.sender.close),
        "a follower that waits for its hub": (pair.receiver.connect, pair.receiver.close),
    }
    pair.sender.open("gloo", "closed", 0, 30.0, "closed.nobody", (1,))
    for what, (wait, close) in ends.items():
        began = time.monotonic()
        threading.Timer(0.3, close).start()
        with pytest.raises(WeightTransferError, match="closed"):
            wait()
        assert time.monotonic() - began < 10, what
    pair = Pair("closed later")
    pair.meet()
    threading.Timer(0.3, pair.receiver.close).start()
    with pytest.raises(WeightTransferError, match=r"left|closed|Bad file"):
        pair.receiver.receive(make_update(1, 30.0), lambda rows: None)
    pair.close()


def test_one_of_another_user_is_refused(monkeypatch):
    pair = Pair("user")
    pair.sender.open("gloo", pair.name, 0, 0.5, f"{pair.name}.sender", (1,))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(WeightTransferError, match=r"was not there in 0\.2 s"):
        Receiver(Invitation("gloo", "127.0.0.1", 0, 1, 1, "user", 0.2, hub="user.sender")).connect()
    with pytest.raises(WeightTransferError, match=r"1 follower\(s\) \(ranks \[1\]\) did not come in 0.5 s") as caught:
        pair.sender.connect(0.5)
    assert caught.value.missing == (1,)
