"""A weight group's rendezvous listens on one address, and on none once it is closed."""

from __future__ import annotations

import gc

import psutil

from pods_cluster.weights.gloo import GlooListener
from pods_cluster.weights.transport import bind


def listening(port: int) -> set[str]:
    found = psutil.Process().net_connections("inet")
    return {each.laddr.ip for each in found if each.status == "LISTEN" and each.laddr.port == port}


def test_the_store_of_a_group_is_reached_at_its_host_alone() -> None:
    listener = GlooListener("127.0.0.1")
    assert listening(listener.port) == {"127.0.0.1"}
    listener.close()
    gc.collect()
    assert listening(listener.port) == set()


def test_a_socket_of_any_transport_is_bound_to_its_host() -> None:
    with bind("127.0.0.1") as one:
        assert listening(one.getsockname()[1]) == {"127.0.0.1"}
