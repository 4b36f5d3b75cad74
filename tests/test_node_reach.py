"""A node that does not take connections is told from one whose processes are stopped or busy, by the kernel's answer alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

import pytest

from pods_cluster import node_reach
from pods_cluster.config.labels import has_labels, wrong_labels
from pods_cluster.node_reach import NODE_LABEL, Address, elsewhere, unreached


@pytest.fixture
def silent() -> Iterator[Address]:
    """An address at which packets are dropped: the queue of connections that nobody accepts is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()


def test_only_those_that_take_no_connection_are_not_reached(silent: Address) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listens,  # nobody accepts: as in a process that is stopped
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        there, refused = listens.getsockname(), closed.getsockname()
        closed.close()
        assert unreached([there, refused, silent, there], 0.2) == {refused, silent}
        assert unreached([there], 0.2) == set()
    assert unreached([], 0.2) == set()


def test_what_says_nothing_about_a_node_is_no_loss_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_handle(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_handle)
    assert unreached([("127.0.0.1", 9)], 0.2) == set()


@pytest.mark.parametrize("nodes", [[], ["a" * 56], ["b" * 56, "a" * 56]])
def test_labels_of_all_other_nodes(nodes: list[str]) -> None:
    place = {"pool": "learn"}
    labels = elsewhere(nodes, place)
    assert not list(wrong_labels(labels))
    for node in ("a" * 56, "b" * 56, "c" * 56):
        assert has_labels(labels, place | {NODE_LABEL: node}) == (node not in nodes)
    assert not has_labels(labels, {NODE_LABEL: "c" * 56})


def test_a_node_that_was_not_reached_is_not_tried_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Address] = []
    there = {"a": ("one", 1), "b": ("two", 2)}

    def unreached(addresses: Sequence[Address]) -> set[Address]:
        tried.extend(addresses)
        return {("two", 2)} & set(addresses)

    monkeypatch.setattr(node_reach, "_living", lambda: there)
    monkeypatch.setattr(node_reach, "unreached", unreached)
    monkeypatch.setattr(node_reach, "_lost_at", {})
    assert asyncio.run(node_reach.unreached_nodes()) == {"b"}
    assert asyncio.run(node_reach.unreached_nodes()) == {"b"}
    assert tried == [("one", 1), ("two", 2), ("one", 1)]
    monkeypatch.setattr(node_reach, "KNOWN_SECONDS", 0.0)
    assert asyncio.run(node_reach.unreached_nodes()) == {"b"}
    assert tried[3:] == [("one", 1), ("two", 2)]
    del there["b"]
    assert not asyncio.run(node_reach.unreached_nodes())
