"""The base and the example that people copy, as kustomize renders them, against KubeRay's schema and one another."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_kuberay import problems

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDERS = ("kuberay", "kustomize/example")

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@cache
def render(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl apply -k` would apply, by kind and name."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_rendered_is_what_the_schemas_ask_for(folder: str) -> None:
    found = render(folder)
    assert all(problems(document) == [] for (kind, _), document in found.items() if kind not in ("Secret", "Namespace"))
    assert {"Service", "NetworkPolicy", "PersistentVolumeClaim", "RayCluster"} <= {kind for kind, _ in found}


@pytest.mark.parametrize("folder", FOLDERS)
def test_service_and_policy_reach_the_pods(folder: str) -> None:
    found = render(folder)
    head = found["RayCluster", "pods"]["spec"]["headGroupSpec"]["template"]
    service = found["Service", "pods-dashboard"]["spec"]
    assert service["selector"].items() <= head["metadata"]["labels"].items()
    (port,) = service["ports"]
    named = {item["name"]: item["containerPort"] for c in head["spec"]["containers"] for item in c.get("ports", [])}
    assert named[port["targetPort"]] == port["port"] == 8765
    policy = found["NetworkPolicy", "pods"]["spec"]
    selected = policy["podSelector"]["matchLabels"]
    for group in (found["RayCluster", "pods"]["spec"]["headGroupSpec"], *groups(found["RayCluster", "pods"]).values()):
        assert selected.items() <= group["template"]["metadata"]["labels"].items()
    ports = [{item["port"] for item in rule.get("ports", [])} for rule in policy["ingress"]]
    assert ports == [set(), {8765}, {8265}]
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": selected}}], (
        "all ports: to one another alone"
    )


def test_the_example_changes_what_it_says() -> None:
    base, found = render("kuberay"), render("kustomize/example")
    cluster = found["RayCluster", "pods"]
    templates = [cluster["spec"]["headGroupSpec"], *groups(cluster).values()]
    images = {container["image"] for group in templates for container in group["template"]["spec"]["containers"]}
    assert images == {"ghcr.io/you/pods-cluster:gpu-1"}
    assert {document["metadata"]["namespace"] for document in found.values()} == {"pods"}
    pools = {name: (group["minReplicas"], group["maxReplicas"]) for name, group in groups(cluster).items()}
    assert pools == {"generators": (2, 32), "learners": (1, 8)}
    assert {name: group["labels"]["pool"] for name, group in groups(cluster).items()} == {
        "generators": "cheap",
        "learners": "fast",
    }
    claim = found["PersistentVolumeClaim", "pods-runs"]["spec"]
    assert claim["accessModes"] == base["PersistentVolumeClaim", "pods-runs"]["spec"]["accessModes"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("shared-nfs", "2Ti")


def test_every_secret_that_is_asked_for_is_there() -> None:
    found = render("kustomize/example")
    cluster = found["RayCluster", "pods"]
    asked: set[tuple[str, str | None]] = set()
    for group in (cluster["spec"]["headGroupSpec"], *groups(cluster).values()):
        for container in group["template"]["spec"]["containers"]:
            for source in container.get("envFrom", []):
                asked.add((source["secretRef"]["name"], None))
            for variable in container.get("env", []):
                if key := variable.get("valueFrom", {}).get("secretKeyRef"):
                    asked.add((key["name"], key["key"]))
    assert asked == {("pods-environment", None), ("pods-dashboard", "token")}
    for name, key in asked:
        assert key is None or key in found["Secret", name]["data"]
        assert found["Secret", name]["data"]
    (dashboard,) = [
        container
        for container in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        if container["name"] == "pods-dashboard"
    ]
    script = dashboard["args"][2]
    assert "--token-file /tmp/token" in script
    assert "umask 077" in script
    assert subprocess.run(["bash", "-n", "-c", script], timeout=10, check=False).returncode == 0


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_that_is_deleted_has_time_to_drain(folder: str) -> None:
    for group in groups(render(folder)["RayCluster", "pods"]).values():
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        environment = {item["name"]: item.get("value") for item in container["env"]}
        drain = float(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 30 <= drain < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_is_asked_whether_it_lives(folder: str) -> None:
    head = render(folder)["RayCluster", "pods"]["spec"]["headGroupSpec"]["template"]["spec"]
    (page,) = [container for container in head["containers"] if container["name"] == "pods-dashboard"]
    for probe in (page["readinessProbe"], page["livenessProbe"]):
        assert probe["httpGet"] == {"path": "/healthz", "port": "pods"}
