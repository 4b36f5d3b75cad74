"""The manifests are what KubeRay's and Kubernetes' own schemas ask for, and the pools land on the groups that are meant."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pods_cluster.config import load_config
from pods_cluster.generation.placement import RESOURCE as GENERATOR
from pods_cluster.learning.rank_actors import RESOURCE as LEARNER

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kuberay"
SCHEMA = json.loads(Path(__file__).with_name("kuberay-rayjob.schema.json").read_text())
KUBERNETES = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())
"""Of the kinds beside Ray's; it refuses unknown fields as it is."""


def strict(node: Any) -> Any:
    """The schema with unknown fields refused: Kubernetes drops them without a word, and a typing error with them."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {name: strict(value) for name, value in node.items()}
    if result.pop("x-kubernetes-int-or-string", False):
        result.pop("anyOf", None)
        return {"type": ["integer", "string"], **({"pattern": node["pattern"]} if "pattern" in node else {})}
    keeps = result.pop("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(result.get("properties"), dict) and result.get("type") == "object" and not keeps:
        result.setdefault("additionalProperties", False)
    return result


def schema_of(kind: str) -> dict[str, Any]:
    """Of RayJob, of RayCluster, whose spec is a part of it, or of a kind of Kubernetes itself."""
    if kind in KUBERNETES["$defs"]:
        return {"$ref": f"#/$defs/{kind}", "$defs": KUBERNETES["$defs"]}
    schema = strict(SCHEMA)
    if kind == "RayCluster":
        schema["properties"]["spec"] = schema["properties"]["spec"]["properties"]["rayClusterSpec"]
    return schema


def load(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((MANIFESTS / name).read_text())
    return document


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"].get("rayClusterSpec", document["spec"])


@pytest.fixture(params=["rayjob.yaml", "raycluster.yaml"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def problems(document: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema_of(document["kind"]))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(document)]


def test_it_is_what_the_operators_schema_asks_for(document: dict[str, Any]) -> None:
    assert document["apiVersion"] == "ray.io/v1"
    assert problems(document) == []


def test_the_schema_refuses_what_is_wrong(document: dict[str, Any]) -> None:
    wrong = copy.deepcopy(document)
    cluster_of(wrong)["workerGroupSpecs"][0]["replica"] = 1
    assert any("replica" in text for text in problems(wrong))
    wrong = copy.deepcopy(document)
    cluster_of(wrong)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert any("volumeMount" in text for text in problems(wrong))
    wrong = copy.deepcopy(document)
    cluster_of(wrong)["workerGroupSpecs"][0]["maxReplicas"] = "many"
    assert any("maxReplicas" in text for text in problems(wrong))


@pytest.mark.parametrize("name", ["runs-volume.yaml", "dashboard-service.yaml", "network-policy.yaml"])
def test_what_stands_beside_the_cluster_is_what_kubernetes_asks_for(name: str) -> None:
    document = load(name)
    assert problems(document) == []
    document["spec"]["podSelecter"] = {}
    assert any("podSelecter" in text for text in problems(document))


def test_two_groups_scale_apart_by_the_resources_that_the_actors_ask_for(document: dict[str, Any]) -> None:
    cluster = cluster_of(document)
    assert cluster["enableInTreeAutoscaling"] is True
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    offered = {name: json.loads(json.loads(g["rayStartParams"]["resources"])) for name, g in groups.items()}
    assert offered == {"generators": {GENERATOR: 1}, "learners": {LEARNER: 1}}
    for group in groups.values():
        assert 1 <= group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        # one pod holds one worker or rank: a GPU and its resource, and the CPU that the actor asks for beside
        assert container["resources"]["requests"]["nvidia.com/gpu"] == "1"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert int(container["resources"]["requests"]["cpu"]) >= 1
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_pools_of_the_job_fit_the_smallest_groups() -> None:
    job = load("rayjob.yaml")
    words = job["spec"]["entrypoint"].split()
    assert words[:2] == ["pods", "train"]
    path = words[2].removeprefix("/opt/pods/")
    config = load_config(ROOT / path, [word for word in words[3:] if "=" in word])
    smallest = {group["groupName"]: group["minReplicas"] for group in cluster_of(job)["workerGroupSpecs"]}
    assert (config.generator.workers, config.learner.workers) == (smallest["generators"], smallest["learners"])
    assert config.run.dir == "/runs"


def test_every_pod_shares_the_runs_and_none_is_root(document: dict[str, Any]) -> None:
    cluster = cluster_of(document)
    claim = load("runs-volume.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts["runs"] == "/runs"
            assert mounts.keys() <= volumes.keys()


def test_ray_is_the_version_of_the_images(document: dict[str, Any]) -> None:
    version = cluster_of(document)["rayVersion"]
    for name in ("requirements/cpu.txt", "requirements/gpu.txt"):
        (pin,) = [line for line in (ROOT / name).read_text().splitlines() if line.startswith(("ray==", "ray["))]
        assert pin.partition("==")[2] == version


def test_both_manifests_describe_one_cluster() -> None:
    job, cluster = cluster_of(load("rayjob.yaml")), dict(cluster_of(load("raycluster.yaml")))
    cluster.pop("authOptions")
    assert job == cluster
