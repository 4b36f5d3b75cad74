"""The compose file: a head and two workers whose commands Ray and `pods` know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from ray.scripts.scripts import cli as ray_command

from pods_cluster.config import load_config

DOCKER = Path(__file__).parents[2] / "docker"
TEXT = (DOCKER / "compose.yaml").read_text()


@pytest.fixture
def services() -> dict[str, Any]:
    return yaml.safe_load(TEXT)["services"]


def test_two_workers_join_the_head_with_their_labels(services: dict[str, Any]) -> None:
    assert list(services) == ["head", "generators", "learners", "page"]
    for name in ("generators", "learners"):
        command = services[name]["command"]
        assert "--address=head:6379" in command
        assert f"--labels=pool={name}" in command
        assert services[name]["depends_on"]["head"]["condition"] == "service_healthy"
    assert "--port=6379" in services["head"]["command"]
    assert "--num-cpus=0" in services["head"]["command"]


def test_ray_knows_the_options(services: dict[str, Any]) -> None:
    known = {option for parameter in ray_command.commands["start"].params for option in parameter.opts}
    for name in ("head", "generators", "learners"):
        program, action, *options = services[name]["command"]
        assert (program, action) == ("ray", "start")
        assert {option.partition("=")[0] for option in options} <= known
    test = services["head"]["healthcheck"]["test"]
    assert CliRunner().invoke(ray_command, [*test[2:3], "--help"]).exit_code == 0


def test_nodes_share_token_runs_and_image_and_nothing_is_open_to_others(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["image"] == "${PODS_IMAGE:-pods-cluster:cpu}"
        assert service["volumes"] == ["runs:/runs"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        if name != "page":
            assert service["environment"]["RAY_AUTH_MODE"] == "token"
            assert ":?" in service["environment"]["RAY_AUTH_TOKEN"], "without a token it does not start"
            drain = float(service["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            assert drain < float(service["stop_grace_period"].removesuffix("s"))


def test_the_labels_of_its_comment_are_those_of_its_nodes(services: dict[str, Any]) -> None:
    config = Path(load_config.__code__.co_filename).parents[1] / "quickstart" / "run.yaml"
    for pool, name in (("generator", "generators"), ("learner", "learners")):
        word = f"{pool}.place={{pool: {name}}}"
        assert word.replace("={", "='{") in TEXT
        assert config.is_file()
        assert f"--labels=pool={name}" in services[name]["command"]
