"""Labels of nodes: what Ray would refuse is refused before it, and a node has them as Ray sees it."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private.label_utils import validate_label_selector

from pods_cluster.config import load_config
from pods_cluster.config.labels import has_labels, wrong_labels
from pods_cluster.run.cluster import lacking_places
from tests.run.parts import loop_config

GOOD = [
    {"pool": "cheap"},
    {"ray.io/accelerator-type": "H200"},
    {"market": "!spot"},
    {"zone": "in(a, b-1)"},
    {"zone": "!in(a,b)", "pool": "x"},
]
BAD = [{"pool": "not this one"}, {"pool": "in()"}, {"pool": "in(a,!b)"}, {"-pool": "a"}, {"pool": ""}, {"a b": "c"}]


@pytest.mark.parametrize("place", GOOD)
def test_what_ray_takes_is_taken(place: dict[str, str]) -> None:
    assert validate_label_selector(place) is None
    assert list(wrong_labels(place)) == []


@pytest.mark.parametrize("place", BAD)
def test_what_is_no_label_is_refused(place: dict[str, str]) -> None:
    assert len(list(wrong_labels(place))) == 1


def test_the_error_names_field_value_and_fix() -> None:
    with pytest.raises(Exception, match=r"generator\.place\.pool: 'two words' is no condition; write value, '!value'"):
        loop_config("generator.place={pool: two words}")
    assert loop_config("learner.place={pool: fast}").learner.place == {"pool": "fast"}


@pytest.mark.parametrize(
    ("condition", "labels", "holds"),
    [
        ("a", {"pool": "a"}, True),
        ("a", {"pool": "b"}, False),
        ("a", {}, False),
        ("!a", {"pool": "b"}, True),
        ("!a", {}, True),
        ("in(a, b)", {"pool": "b"}, True),
        ("in(a,b)", {"pool": "c"}, False),
        ("!in(a,b)", {"pool": "a"}, False),
        ("!in(a,b)", {}, True),
    ],
)
def test_a_node_has_what_the_condition_says(condition: str, labels: dict[str, str], holds: bool) -> None:
    assert has_labels({"pool": condition}, labels) is holds


def node(cpus: float, gpus: float = 0.0, **labels: str) -> dict[str, Any]:
    return {"Resources": {"CPU": cpus, "GPU": gpus}, "Labels": labels}


def test_a_pool_must_fit_the_nodes_that_it_asks_for() -> None:
    config = loop_config("generator.place={pool: cheap}", "generator.workers=3", "generator.cpus_per_worker=2")
    fast = node(64, pool="fast")
    (text,) = lacking_places(config, [fast])
    assert "generator.place: {pool: cheap} is on none of the cluster's 1 node, whose labels are pool: fast" in text
    (text,) = lacking_places(config, [fast, node(3, pool="cheap"), node(2, pool="cheap")])
    assert "the 2 node(s) have room for 2 of generator.workers: 3" in text
    assert list(lacking_places(config, [fast, node(4, pool="cheap"), node(2, pool="cheap")])) == []


def test_a_pool_on_cards_counts_its_nodes_cards() -> None:
    config = loop_config("learner.place={pool: fast}", "learner.workers=2")
    (text,) = lacking_places(config, [node(64, 1, pool="fast"), node(64, 8, pool="cheap")])
    assert "have room for 1 of learner.workers: 2 (1 CPU(s) and 1 GPU(s) each)" in text
    assert list(lacking_places(config, [node(64, 2, pool="fast")])) == []


def test_a_shipped_configuration_asks_for_no_labels() -> None:
    assert load_config("configs/gsm8k-2gpu.yaml").generator.place == {}
