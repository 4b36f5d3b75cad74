"""Sender and receivers over gloo, in processes of their own where one is to die or stand still."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from pods_cluster.weights import gloo
from pods_cluster.weights.fingerprint import difference, fingerprints
from pods_cluster.weights.protocol import (
    Invitation,
    TensorSpec,
    WeightLoadError,
    WeightTransferError,
    WeightUpdate,
)
from pods_cluster.weights.receiver import Receiver, make_receiver
from pods_cluster.weights.sender import WeightSender
from pods_cluster.weights.transport import Closed, bind, local_address
from tests.weights.weight_parts import SHAPES, TensorSource, make_tensors, make_update

TIMEOUT = 20.0  # where nothing is to fail
SHORT = 1.5  # where a deadline is to be met

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "pods_cluster.weights.gloo", "pods_cluster.weights.sender"])

Held = dict[str, torch.Tensor]


@contextmanager
def sender_of(version: int = 0) -> Iterator[WeightSender]:
    sender = WeightSender(TensorSource(version), 0, "127.0.0.1")
    try:
        yield sender
    finally:
        sender.close()


def invite(sender: WeightSender, receivers: int, timeout: float = TIMEOUT, name: str = "group") -> list[Invitation]:
    host, port = sender.open("gloo", name, receivers, timeout)
    return [Invitation("gloo", host, port, receivers + 1, 1 + place, name, timeout) for place in range(receivers)]


def take(invitation: Invitation, update: WeightUpdate, held: Held) -> None:
    receiver = make_receiver(invitation)
    try:
        receiver.receive(update, lambda rows: held.update((spec.name, tensor.clone()) for spec, tensor in rows))
    finally:
        receiver.close()


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("receivers", [1, 2, 3])
def test_both_ends_hold_the_same(receivers):
    update = make_update(7, TIMEOUT)
    assert len(update.buckets) > 3, "two buffers in turn need more buckets than two"
    held: list[Held] = [{} for _ in range(receivers)]
    with sender_of(7) as sender:
        takers = [
            in_thread(take, invitation, update, part)
            for invitation, part in zip(invite(sender, receivers), held, strict=True)
        ]
        sender.connect(TIMEOUT)
        sender.send(update)
        for taker in takers:
            taker.result(TIMEOUT)
        sent = sender.fingerprints()
    assert sent == fingerprints(make_tensors(7))
    for part in held:
        assert difference(sent, fingerprints(part)) == ""
        assert list(part) == list(SHAPES), "in the update's order"


def test_one_group_carries_many_versions():
    source = TensorSource(1)
    sender = WeightSender(source, 0, "127.0.0.1")
    (invitation,) = invite(sender, 1)
    joining = in_thread(make_receiver, invitation)
    sender.connect(TIMEOUT)
    receiver = joining.result(TIMEOUT)
    for version in (1, 2, 3):
        source.tensors = make_tensors(version)
        held: Held = {}
        update = make_update(version, TIMEOUT)
        taking = in_thread(
            receiver.receive, update, lambda rows, held=held: held.update((s.name, t.clone()) for s, t in rows)
        )
        sender.send(update)
        taking.result(TIMEOUT)
        assert fingerprints(held) == fingerprints(make_tensors(version))
    receiver.close()
    sender.close()


def test_the_default_process_group_is_left_alone():
    before = torch.distributed.group.WORLD  # None, or that of another test in this process
    test_both_ends_hold_the_same(1)
    assert torch.distributed.group.WORLD is before


def test_a_rank_that_does_not_come_is_named():
    with sender_of() as sender:
        first, _ = invite(sender, 2, SHORT)
        joining = in_thread(make_receiver, first)
        with pytest.raises(WeightTransferError, match=r"rank 0 of 3.*ranks \[2\] did not come in 1\.5 s") as caught:
            sender.connect(SHORT)
        assert caught.value.missing == (2,)
        with pytest.raises(WeightTransferError, match="rank 1"):
            joining.result(TIMEOUT)


def test_a_learner_that_does_not_answer_is_an_error_at_the_deadline():
    with bind("127.0.0.1") as silent:  # takes the connection, says nothing
        port = silent.getsockname()[1]
        with pytest.raises(WeightTransferError, match=rf"reach the learner at 127\.0\.0\.1:{port}"):
            make_receiver(Invitation("gloo", "127.0.0.1", port, 2, 1, "group", 0.5))
    with pytest.raises(WeightTransferError, match=rf"reach the learner at 127\.0\.0\.1:{port}"):
        make_receiver(Invitation("gloo", "127.0.0.1", port, 2, 1, "group", 0.5))


def test_an_unknown_transport_is_named():
    with pytest.raises(WeightTransferError, match="'carrier-pigeon'"):
        make_receiver(Invitation("carrier-pigeon", "127.0.0.1", 1, 2, 1, "group", 1.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_a_gpu_says_what_to_use():
    with pytest.raises(WeightTransferError, match=r"no GPU; use weights\.transport: gloo"):
        make_receiver(Invitation("nccl", "127.0.0.1", 1, 2, 1, "group", 1.0))


def test_an_address_of_another_host_cannot_be_listened_on():
    sender = WeightSender(TensorSource(), 0, "203.0.113.7")
    with pytest.raises(WeightTransferError, match=r"cannot listen on 203\.0\.113\.7"):
        sender.open("gloo", "group", 1, 1.0)


def test_the_address_towards_loopback_is_loopback():
    assert local_address("127.0.0.1") == "127.0.0.1"


def test_closing_ends_a_rendezvous_on_both_ends():
    with sender_of() as sender:
        first, _ = invite(sender, 2)
        receiver = Receiver(first)
        joining, meeting = in_thread(receiver.connect), in_thread(sender.connect, TIMEOUT)
        time.sleep(0.2)
        receiver.close()
        with pytest.raises(WeightTransferError, match="closed"):
            joining.result(TIMEOUT)
        sender.close()
        with pytest.raises(WeightTransferError, match="closed"):
            meeting.result(TIMEOUT)


def test_closing_ends_a_transfer_on_both_ends():
    update = make_update(0, TIMEOUT)
    with sender_of() as sender:
        first, second = invite(sender, 2)
        receiver, idle = Receiver(first), Receiver(second)
        joining = [in_thread(member.connect) for member in (receiver, idle)]
        sender.connect(TIMEOUT)
        for future in joining:
            future.result(TIMEOUT)
        taking = in_thread(receiver.receive, update, lambda rows: None)
        time.sleep(0.2)
        receiver.close()
        with pytest.raises(WeightTransferError, match="closed"):
            taking.result(TIMEOUT)
        with pytest.raises(WeightTransferError, match="not connected"):
            receiver.receive(update, lambda rows: None)
        idle.close()


def test_a_receiver_that_cannot_load_says_why_and_leaves():
    update = make_update(0, SHORT)
    with sender_of() as sender:
        (invitation,) = invite(sender, 1)
        joining = in_thread(make_receiver, invitation)
        sender.connect(TIMEOUT)
        receiver = joining.result(TIMEOUT)

        def full(rows: list[tuple[TensorSpec, torch.Tensor]]) -> None:
            raise MemoryError("no room")

        taking = in_thread(receiver.receive, update, full)
        # with buckets this small it may be through before the receiver leaves
        with suppress(WeightTransferError):
            sender.send(update)
        with pytest.raises(WeightLoadError, match=r"version 0, bucket embed … .*MemoryError: no room"):
            taking.result(TIMEOUT)


def test_an_update_announced_otherwise_is_refused_before_anything_is_loaded():
    update = make_update(3, SHORT)
    other = WeightUpdate(4, update.tensors, update.buckets, SHORT)
    taken: list[Any] = []
    with sender_of() as sender:
        (invitation,) = invite(sender, 1)
        joining = in_thread(make_receiver, invitation)
        sender.connect(TIMEOUT)
        taking = in_thread(joining.result(TIMEOUT).receive, other, taken.append)
        with suppress(WeightTransferError):
            sender.send(update)
        with pytest.raises(WeightTransferError, match="sends another update than the version 4"):
            taking.result(TIMEOUT)
    assert taken == []


def test_a_tensor_unlike_its_spec_fails_the_send_after_all_gathers():
    source = TensorSource()
    sender = WeightSender(source, 0, "127.0.0.1")
    update = make_update(0, SHORT)
    source.tensors["norm"] = source.tensors["norm"].double()
    (invitation,) = invite(sender, 1)
    taking = in_thread(take, invitation, update, {})
    sender.connect(TIMEOUT)
    with pytest.raises(WeightTransferError, match=r"norm: the learner gathered float64\[33\], announced float32\[33\]"):
        sender.send(update)
    assert source.gathered == list(update.buckets)
    with pytest.raises(WeightTransferError):
        taking.result(TIMEOUT)


def test_other_ranks_gather_the_same_and_open_nothing():
    source = TensorSource()
    sender = WeightSender(source, 1)
    update = make_update(0, SHORT)
    sender.send(update)
    assert source.gathered == list(update.buckets)
    assert sender.fingerprints() == {}
    with pytest.raises(ValueError, match="only rank 0"):
        sender.open("gloo", "group", 1, 1.0)


def test_a_send_without_a_group_gathers_and_then_raises():
    with sender_of() as sender, pytest.raises(WeightTransferError, match="in no broadcast group"):
        sender.send(make_update(0, SHORT))


def test_groups_leave_no_threads_and_no_sockets_behind():
    def settled() -> tuple[int, int]:
        end = time.monotonic() + 10
        while time.monotonic() < end and any(thread.name.startswith("weights") for thread in threading.enumerate()):
            time.sleep(0.02)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    rounds, counts = 6, []
    for _ in range(rounds):
        test_both_ends_hold_the_same(2)
        counts.append(settled())
    # A leak is at least one a round; single ones come and go with torch's own pools.
    (sockets, threads), (sockets_after, threads_after) = counts[0], counts[-1]
    assert sockets_after - sockets < rounds - 1, counts
    assert threads_after - threads < rounds - 1, counts


# Deaths and standstills.


def receiver_process(invitation: Invitation, update: WeightUpdate, at: int, number: int) -> None:
    """Sends itself the signal once bucket `at` is there."""
    count = 0

    def sink(rows: list[tuple[TensorSpec, torch.Tensor]]) -> None:
        nonlocal count
        if count == at:
            os.kill(os.getpid(), number)
        count += 1

    make_receiver(invitation).receive(update, sink)


class SignalledSource(TensorSource):
    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number = at, number

    def gather(self, start: int, stop: int) -> list[torch.Tensor]:
        if len(self.gathered) == self.at:
            os.kill(os.getpid(), self.number)
        return super().gather(start, stop)


def sender_process(pipe: Any, receivers: int, update: WeightUpdate, at: int, number: int) -> None:
    sender = WeightSender(SignalledSource(at, number), 0, "127.0.0.1")
    pipe.send(invite(sender, receivers))
    sender.connect(TIMEOUT)
    sender.send(update)


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[Any]:
    child = processes.Process(target=target, args=args, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join(10)


def large_update(timeout: float) -> tuple[TensorSource, WeightUpdate]:
    """Buckets beyond what sockets buffer, so that a sender cannot finish without its receiver."""
    source = TensorSource()
    source.tensors = {f"w{index}": torch.full((8 * 2**20,), float(index)) for index in range(5)}
    specs = source.specs()
    return source, WeightUpdate(0, specs, tuple((index, index + 1) for index in range(5)), timeout)


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGKILL, 6.0), (signal.SIGSTOP, SHORT)])
def test_a_receiver_lost_in_the_middle_fails_the_send_but_no_gather(number, timeout):
    source, update = large_update(timeout)
    sender = WeightSender(source, 0, "127.0.0.1")
    (invitation,) = invite(sender, 1)
    with process(receiver_process, invitation, update, 1, number):
        sender.connect(TIMEOUT)
        with pytest.raises(WeightTransferError, match="rank 0 of 2"):
            sender.send(update)
    assert source.gathered == list(update.buckets)
    with pytest.raises(WeightTransferError, match="in no broadcast group"):
        sender.send(update)


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGKILL, TIMEOUT), (signal.SIGSTOP, SHORT)])
def test_a_lost_sender_fails_every_receiver(number, timeout):
    update = make_update(0, timeout)
    ours, theirs = processes.Pipe()
    with process(sender_process, theirs, 2, update, 2, number):
        takers = [in_thread(take, invitation, update, {}) for invitation in ours.recv()]
        for taker in takers:
            with pytest.raises(WeightTransferError, match=r"rank [12] of 3"):
                taker.result(TIMEOUT)


def test_a_slow_engine_is_late_even_if_all_arrived():
    update = make_update(0, 0.5)
    with sender_of() as sender:
        (invitation,) = invite(sender, 1)
        joining = in_thread(make_receiver, invitation)
        sender.connect(TIMEOUT)
        taking = in_thread(joining.result(TIMEOUT).receive, update, lambda rows: time.sleep(0.3))
        with suppress(WeightTransferError):
            sender.send(update)
        with pytest.raises(WeightTransferError):
            taking.result(TIMEOUT)


def test_a_name_server_that_does_not_answer_ends_a_join_at_its_deadline(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(gloo, "local_address", lambda *_: answer.wait(60))
    listener = gloo.GlooListener("127.0.0.1")
    try:
        invitation = Invitation("gloo", "127.0.0.1", listener.port, 2, 1, "names", 0.5)
        with pytest.raises(WeightTransferError, match=r"to reach the learner .* not done within 0\.5 s"):
            gloo.join_gloo(invitation, Closed())
        assert not answer.is_set()
    finally:
        answer.set()
        listener.close()
