"""The file for Ray's cluster launcher is what Ray's own schema and its own completion take."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray import autoscaler

from pods_cluster.generation.placement import RESOURCE as GENERATOR
from pods_cluster.learning.rank_actors import RESOURCE as LEARNER

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "aws.yaml"
SCHEMA = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_ray_takes_it(cluster: dict[str, Any]) -> None:
    jsonschema.validate(cluster, SCHEMA)
    wrong = copy.deepcopy(cluster)
    wrong["available_node_types"]["generators"]["min_worker"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_the_pools_are_told_apart_and_the_head_has_no_room_for_them(cluster: dict[str, Any]) -> None:
    kinds = cluster["available_node_types"]
    head = kinds[cluster["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert GENERATOR in kinds["generators"]["resources"]
    assert LEARNER in kinds["learners"]["resources"]
    assert kinds["learners"]["resources"][LEARNER] == kinds["learners"]["resources"]["GPU"], "a rank a card"
    assert len({kind["labels"]["pool"] for name, kind in kinds.items() if "labels" in kind}) == 2
    workers = [kind for name, kind in kinds.items() if name != cluster["head_node_type"]]
    assert all(kind["min_workers"] >= 1 for kind in workers), "a run that does not fit at its start is refused"
    assert cluster["max_workers"] == sum(kind["max_workers"] for kind in workers)
    assert "spot" in json.dumps(kinds["generators"]["node_config"])
    assert "spot" not in json.dumps(kinds["learners"])


def test_every_node_asks_for_the_token(cluster: dict[str, Any]) -> None:
    """`ray start` asks for none where neither the file nor the variable is there."""
    assert list(cluster["file_mounts"].values()) == ["~/.ray/auth_token"]
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        (start,) = [command for command in commands if "ray start" in command]
        assert start.startswith("export RAY_AUTH_MODE=token; ray start ")


def test_its_comment_says_which_labels_there_are(cluster: dict[str, Any]) -> None:
    text = FILE.read_text()
    for pool, name in (("generator", "generators"), ("learner", "learners")):
        label = cluster["available_node_types"][name]["labels"]["pool"]
        assert f"{pool}.place='{{pool: {label}}}'" in text
