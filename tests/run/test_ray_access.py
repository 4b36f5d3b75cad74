"""Clusters of this machine alone: how Ray is told, and which addresses mean one."""

from __future__ import annotations

import contextlib
import socket

import pytest
from ray._private import ray_constants, services
from ray._private.node import Node

from pods_cluster.run.ray_access import loopback_cluster, reaching, without_onlookers


def test_ray_keeps_to_the_loopback_address_within_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.worker._global_node", None)  # another test's cluster would give its own address
    before = services.get_node_ip_address()
    with contextlib.suppress(RuntimeError), loopback_cluster():
        assert services.get_node_ip_address() == "127.0.0.1"
        raise RuntimeError
    assert services.get_node_ip_address() == before


def test_ray_has_the_parts_that_are_left_out_and_gets_them_back() -> None:
    parts = [(Node, "start_log_monitor"), (Node, "start_monitor"), (services, "start_api_server")]
    before = [getattr(place, name) for place, name in parts]
    with contextlib.suppress(RuntimeError), without_onlookers():
        assert not any(now in before for now in (getattr(place, name) for place, name in parts))
        raise RuntimeError
    assert [getattr(place, name) for place, name in parts] == before


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_the_loopback_address_alone_is_such_a_cluster(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{host}:{server.getsockname()[1]}"
        monkeypatch.setattr(
            services, "get_node_ip_address", lambda: "192.0.2.1" if ray_constants.ENABLE_RAY_CLUSTER else host
        )
        monkeypatch.setattr("pods_cluster.run.ray_access._answers", lambda asked, port: asked == host)
        with reaching(address):
            assert not ray_constants.ENABLE_RAY_CLUSTER
        monkeypatch.setenv("RAY_ADDRESS", address)
        with reaching("auto"):
            assert not ray_constants.ENABLE_RAY_CLUSTER
        # a cluster that listens on all interfaces, as the head of one with more nodes does
        monkeypatch.setattr("pods_cluster.run.ray_access._answers", lambda asked, port: True)
        with reaching(address):
            assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "local", "127.0.0.1", "ray://127.0.0.1:10001", "head:6379"])
def test_other_addresses_are_rays_own_matter(address: str) -> None:
    with reaching(address):
        assert ray_constants.ENABLE_RAY_CLUSTER
