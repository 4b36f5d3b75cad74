"""The learner's rendezvous listens on one address."""

from __future__ import annotations

import socket

import psutil
import pytest

from pods_cluster.learning.process_group import RendezvousError, open_store


def test_the_store_listens_on_its_host_alone() -> None:
    store = open_store("127.0.0.1", 1, 10.0)
    store.set("a", "1")
    found = {
        c.laddr.ip
        for c in psutil.Process().net_connections("inet")
        if c.status == "LISTEN" and c.laddr.port == store.port
    }
    assert found == {"127.0.0.1"}
    with socket.create_connection(("127.0.0.1", store.port), 5):
        pass


def test_an_address_of_another_host_is_told() -> None:
    with pytest.raises(RendezvousError, match=r"rendezvous cannot listen on 192\.0\.2\.77"):
        open_store("192.0.2.77", 1, 10.0)
