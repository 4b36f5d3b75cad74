"""A Ray cluster whose nodes are the hosts of a `NodeNetwork`, and a run that is submitted to it from outside."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.node_network import Host, NodeNetwork
from pods_cluster.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
PORT, JOBS = 6379, 8265
SECONDS = 120.0
"""Patience with a node that joins, and with a command."""
DRAIN_SECONDS = 20.0
"""Time that a node has after SIGTERM."""
_ALIVE = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
end = time.monotonic() + float(sys.argv[3])
while (found := sum(node["Alive"] for node in ray.nodes())) != int(sys.argv[2]):
    if time.monotonic() > end: sys.exit(f"{found} node(s) are alive, not {sys.argv[2]}")
    time.sleep(0.1)
"""


class RayNodes:
    """The cluster: a head and what joined it. Everything of it lies in `folder`, whose path has to be short."""

    def __init__(self, network: NodeNetwork, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.head: Host | None = None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        known = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
        self.environment = {name: value for name, value in os.environ.items() if name not in known} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{DRAIN_SECONDS:g}",
            "RAY_worker_niceness": "0",
            "RAY_prestart_worker_first_driver": "0",
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    @property
    def address(self) -> str:
        assert self.head is not None
        return f"{self.head.address}:{PORT}"

    def start_head(self, host: Host) -> None:
        """Ray's head on this host, with a job server and without CPUs."""
        self.head = host
        self._start(host, "--head", f"--port={PORT}", f"--temp-dir={self.folder / 'ray'}", "--num-cpus=0",
                    "--dashboard-host=0.0.0.0", f"--dashboard-port={JOBS}")  # fmt: skip

    def join(self, host: Host, labels: Mapping[str, str], cpus: int) -> None:
        """A node on this host that joins the head; it is not waited for."""
        text = ",".join(f"{key}={value}" for key, value in labels.items())
        self._start(host, f"--address={self.address}", f"--num-cpus={cpus}", f"--labels={text}")

    def wait(self, count: int, seconds: float = SECONDS) -> None:
        """Wait until the cluster has so many nodes."""
        assert self.head is not None
        self.command(self.head, sys.executable, "-c", _ALIVE, self.address, str(count), str(seconds))

    def preempt(self, host: Host) -> None:
        """Tell the node to go, as a cloud or Kubernetes does."""
        self.processes[host.name].send_signal(signal.SIGTERM)

    def command(self, host: Host, *command: str) -> str:
        """Output of a command on this host. Raises RuntimeError with it where the command fails."""
        done = subprocess.run([*self._inside(host), *command], env=self.environment, capture_output=True, text=True,
                              timeout=SECONDS + 30, check=False, cwd=self.folder)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def pods(self, host: Host, *arguments: str) -> str:
        """Output of a `pods` command on this host."""
        return self.command(host, sys.executable, "-m", "pods_cluster.client.cli", *arguments)

    def submit(self, outside: Host, run: Mapping[str, Any]) -> SubmittedRun:
        """Send a run from a host that is no node, and do not wait for it."""
        assert self.head is not None
        path = self.folder / f"{run['run']['name']}.yaml"
        path.write_text(json.dumps(run))
        self.pods(outside, "submit", str(path), "--no-wait", "--address", f"http://{self.head.address}:{JOBS}")
        return SubmittedRun(self, RunFolder(Path(run["run"]["dir"]) / run["run"]["name"]))

    def end(self) -> None:
        """End every node, the head last; the network ends what is left of them."""
        for name, process in reversed(self.processes.items()):
            self.network.hosts[name].kill()
            process.wait(10)

    def _inside(self, host: Host) -> list[str]:
        """Goes before a command there: Ray's own folder is another one on each host, as it is on other machines."""
        disk, seen = self.folder / "disks" / host.name, self.folder / "ray"
        for folder in (disk, seen):
            folder.mkdir(parents=True, exist_ok=True)
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return [*host.inside, "unshare", "--mount", "bash", "-c", script, "disk", str(disk), str(seen)]

    def _start(self, host: Host, *options: str) -> None:
        command = ["ray", "start", "--block", f"--node-ip-address={host.address}", "--disable-usage-stats",
                   "--object-store-memory=200000000", *options]  # fmt: skip
        log = (self.folder / f"{host.name}.log").open("wb")
        with log:
            self.processes[host.name] = subprocess.Popen(
                [*self._inside(host), *command], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )


class SubmittedRun:
    """A run on the cluster, seen by the files of its folder."""

    def __init__(self, nodes: RayNodes, folder: RunFolder) -> None:
        self.nodes, self.folder = nodes, folder

    def rows(self) -> list[dict[str, Any]]:
        """The records of the steps so far."""
        return [row for row in _lines(self.folder.metrics) if "timing_s/step" in row]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in _lines(self.folder.events) if event["kind"] == kind]

    def wait_for_steps(self, more: int, seconds: float = SECONDS) -> list[dict[str, Any]]:
        """Wait for so many more steps; their records. Raises RuntimeError with the run's last events after `seconds`."""
        there = len(self.rows())
        self.wait(f"{more} more steps", lambda: len(self.rows()) >= there + more, seconds)
        return self.rows()[there : there + more]

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = SECONDS) -> float:
        """Seconds until the condition held."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + seconds or self.events("failed"):
                told = "\n".join(f"{event['kind']}: {event['text']}" for event in _lines(self.folder.events)[-12:])
                raise RuntimeError(f"{what}: not after {time.monotonic() - began:.0f} s\n{told}")
            time.sleep(0.05)
        return time.monotonic() - began

    def places(self) -> dict[str, list[str]]:
        """Hosts of the run's live processes, by role; the selector's id is not told, so it is known by its title."""
        assert self.nodes.head is not None
        status = json.loads(self.nodes.pods(self.nodes.head, "status", str(self.folder.path), "--json"))
        found: dict[str, list[str]] = {}
        owners = {pid: host.name for host in self.nodes.network.hosts.values() for pid in host.processes()}
        for worker in status["live"]["workers"]:
            if worker["pid"] is not None:
                found.setdefault(worker["role"], []).append(owners.get(worker["pid"], "none"))
        found["selector"] = [host for pid, host in owners.items() if _title(pid).startswith("ray::SelectorActor")]
        return {role: sorted(hosts) for role, hosts in found.items()}


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _lines(path: Path) -> Sequence[dict[str, Any]]:
    """Lines of a file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
