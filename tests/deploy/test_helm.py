"""The chart, as Helm renders it: the shipped manifests with its own values, and what its values say with others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import pods_cluster
from tests.deploy.test_kuberay import load, problems

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "kuberay" / "chart"
HELMS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")

pytestmark = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60, check=False)


@cache
def render(*settings: str) -> dict[str, Any]:
    """What `helm install pods` would apply, by kind."""
    done = helm("template", "pods", str(CHART), *(word for setting in settings for word in ("--set-json", setting)))
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout) if document}


def without_helms(node: Any) -> Any:
    """Without the labels and annotations by which Helm knows its releases."""
    if isinstance(node, list):
        return [without_helms(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {name: without_helms(item) for name, item in node.items() if name not in HELMS and name != "annotations"}
    return {name: item for name, item in plain.items() if not (name == "labels" and not item)}


@pytest.mark.parametrize("mode", ["cluster", "job"])
def test_with_its_own_values_it_is_what_lies_beside_it(mode: str) -> None:
    found = without_helms(render(f'mode="{mode}"'))
    ray = load("rayjob.yaml" if mode == "job" else "raycluster.yaml")
    assert problems(render(f'mode="{mode}"')[ray["kind"]]) == []
    assert found[ray["kind"]]["spec"] == ray["spec"]
    for name in ("runs-volume.yaml", "dashboard-service.yaml", "network-policy.yaml"):
        beside = load(name)
        assert problems(render(f'mode="{mode}"')[beside["kind"]]) == []
        assert found[beside["kind"]]["spec"] == beside["spec"]
        assert found[beside["kind"]]["metadata"]["name"] == beside["metadata"]["name"]


def test_values_reach_the_objects() -> None:
    pool = {"replicas": 3, "minReplicas": 2, "maxReplicas": 32, "cards": 4, "labels": {"pool": "cheap"}}
    pool |= {"nodeSelector": {"card": "l4"}, "tolerations": []}
    found = render(
        f"generators={json.dumps(pool)}",
        'image={"repository": "ghcr.io/you/pods", "tag": "gpu-1", "pullPolicy": "Always", "pullSecrets": ["pull"]}',
        'secrets={"environment": "keys", "dashboardToken": "page"}',
        'storage={"storageClass": "nfs", "size": "2Ti", "keep": false}',
        "token=false",
    )
    cluster = found["RayCluster"]
    assert [problems(document) for document in found.values()] == [[]] * 4
    assert "authOptions" not in cluster["spec"]
    group, learners = cluster["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 2, 32)
    assert (group["labels"], learners.get("labels")) == ({"pool": "cheap"}, None)
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"pods_generator": 4}
    pod = group["template"]["spec"]
    assert (pod["nodeSelector"], pod.get("tolerations")) == ({"card": "l4"}, None)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    for spec in (head, pod, learners["template"]["spec"]):
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
        assert {c["image"] for c in spec["containers"]} == {"ghcr.io/you/pods:gpu-1"}
        assert {c["imagePullPolicy"] for c in spec["containers"]} == {"Always"}
        assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    page = head["containers"][1]
    assert "envFrom" not in page, "the page needs no keys of the runs"
    assert page["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "page", "key": "token"}
    assert "--token-file /tmp/token" in page["args"][2]
    assert subprocess.run(["bash", "-n", "-c", page["args"][2]], timeout=10, check=False).returncode == 0
    claim = found["PersistentVolumeClaim"]
    assert (claim["spec"]["storageClassName"], claim["metadata"].get("annotations")) == ("nfs", None)
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"


def test_what_is_not_wanted_is_not_there() -> None:
    found = render(
        'storage={"existingClaim": "mine"}',
        'dashboard={"enabled": false}',
        'networkPolicy={"enabled": false}',
        'learners={"cards": 0}',
    )
    assert found.keys() == {"RayCluster"}
    assert problems(found["RayCluster"]) == []
    head = found["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert [container["name"] for container in head["containers"]] == ["ray-head"]
    assert head["volumes"][0]["persistentVolumeClaim"] == {"claimName": "mine"}
    learners = found["RayCluster"]["spec"]["workerGroupSpecs"][1]
    assert learners["template"]["spec"]["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory"}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("generators.workers=2", "additional properties 'workers' not allowed"),
        (
            "generators.replicas=9",
            r"generators.replicas \(9\) must lie between minReplicas \(1\) and maxReplicas \(8\)",
        ),
        ("drainSeconds=120", r"drainSeconds \(120\) must be less than terminationGracePeriodSeconds \(120\)"),
        ("mode=run", "must be one of 'cluster', 'job'"),
        ("storage.size=big", "does not match pattern"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, told: str) -> None:
    done = helm("template", "pods", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert re.search(told, done.stderr), done.stderr


def test_helms_own_linter_has_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_charts_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == pods_cluster.__version__
