"""Addresses of clusters that no run can use are told at once."""

from __future__ import annotations

import socket

import pytest

from pods_cluster.client.demo import CONFIG
from pods_cluster.config import load_config
from pods_cluster.run.cluster import ClusterError, connect
from pods_cluster.run.ray_access import check_reachable, token_hint


def test_ray_client_is_refused_with_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of this process may have a cluster
    config = load_config(CONFIG, ["cluster.address=ray://head:10001"])
    with pytest.raises(ClusterError, match=r"cluster.address: ray://head:10001 .*pods submit .*http://host:8265"):
        connect(config)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ClusterError, match="Ray Client"):
        connect(load_config(CONFIG, []))


@pytest.mark.parametrize(
    ("error", "mode", "told"),
    [
        ("Unauthorized: Missing authentication token", None, "set RAY_AUTH_MODE=token, in RAY_AUTH_TOKEN"),
        ("HTTP 401", "disabled", "set RAY_AUTH_MODE=token (it is 'disabled')"),
        ("InvalidAuthToken: Unauthenticated", "token", "the token of here is not the cluster's"),
        ("Connection refused", None, ""),
        ("10.0.0.1:4010: timed out", "token", ""),
    ],
)  # fmt: skip
def test_a_cluster_that_asks_for_a_token_is_told_with_the_line_that_works(
    error: str, mode: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    hint = token_hint(RuntimeError(error))
    assert told in hint
    assert bool(hint) == bool(told)


def test_nobody_there_is_told_without_rays_own_minutes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}: Connection refused"):
        check_reachable(f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
    check_reachable("auto")  # left to Ray
