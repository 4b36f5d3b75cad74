"""A Ray cluster whose nodes are hosts of their own on this machine, and a run that is submitted to it from outside.

The hosts are network namespaces where these can be made, else processes with loopback addresses.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks._run_processes import role_of
from benchmarks.hosts import Host, HostNetwork
from benchmarks.node_network import NodeNetwork, usable
from benchmarks.node_processes import ProcessNetwork
from pods_cluster.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
PORT, JOBS, AGENT = 6379, 8265, 52365
SECONDS = 120.0
"""Patience with a node that joins, and with a command."""
DRAIN_SECONDS = 20.0
"""Time that a node has after SIGTERM."""
STARTED = "Ray runtime started."
"""What `ray start` prints once its node belongs to the cluster."""
ACTORS = ("controller", "selector", "generator", "learner")
"""Roles of a run's processes whose places are told."""


def hosts_of_this_system(processes: bool | None = None) -> HostNetwork:
    """Network namespaces, or `processes`; left out: processes where namespaces cannot be made."""
    if processes is None:
        processes = not usable()
    return ProcessNetwork() if processes else NodeNetwork()


class RayNodes:
    """The cluster: a head and what joined it. Everything of it lies in `folder`, whose path has to be short."""

    def __init__(self, network: HostNetwork, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.port, self.jobs = network.port(PORT), network.port(JOBS)
        self.head: Host | None = None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        known = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
        self.environment = {name: value for name, value in os.environ.items() if name not in known} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{DRAIN_SECONDS:g}",
            "RAY_worker_niceness": "0",
            "RAY_prestart_worker_first_driver": "0",
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([*filter(None, paths), str(ROOT)])),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    @property
    def address(self) -> str:
        assert self.head is not None
        return f"{self.head.address}:{self.port}"

    def start_head(self, host: Host) -> None:
        """Ray's head on this host, with a job server and without CPUs."""
        self.head = host
        self._start(host, "--head", f"--port={self.port}", f"--temp-dir={self.folder / 'ray'}", "--num-cpus=0",
                    f"--dashboard-host={host.address}", f"--dashboard-port={self.jobs}")  # fmt: skip

    def join(self, host: Host, labels: Mapping[str, str], *, generators: int = 0, ranks: int = 0) -> None:
        """A node on this host that joins the head, with room for so many workers; it is not waited for."""
        text = ",".join(f"{key}={value}" for key, value in labels.items())
        room = json.dumps({"pods_generator": generators, "pods_learner": ranks})
        self._start(host, f"--address={self.address}", f"--num-cpus={generators + ranks}", f"--labels={text}",
                    f"--resources={room}", *self.network.own_files(host, self.folder))  # fmt: skip

    def wait(self, seconds: float = SECONDS) -> None:
        """Wait until every node that was started belongs to the cluster. Raises RuntimeError with what one said that ended."""
        end = time.monotonic() + seconds
        for name, process in self.processes.items():
            while STARTED not in (told := self._log(name).read_text()):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} has not joined within {seconds:g} s:\n{told[-2000:]}")
                time.sleep(0.05)

    def drain(self, node: str, seconds: int) -> None:
        """Tell the cluster that a node (its id) goes in so many seconds, as an autoscaler does before a preemption."""
        assert self.head is not None
        self.command(self.head, "ray", "drain-node", f"--address={self.address}", f"--node-id={node}",
                     "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the machine goes",
                     f"--deadline-remaining-seconds={seconds}")  # fmt: skip

    def preempt(self, host: Host) -> None:
        """Tell the node to go, as a cloud or Kubernetes does."""
        self.processes[host.name].send_signal(signal.SIGTERM)

    def command(self, host: Host, *command: str) -> str:
        """Output of a command on this host. Raises RuntimeError with it where the command fails."""
        done = subprocess.run([*self._own_disk(host), *command], env=self.environment, capture_output=True, text=True,
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
        self.pods(outside, "submit", str(path), "--no-wait", "--address", f"http://{self.head.address}:{self.jobs}")
        return SubmittedRun(self, RunFolder(Path(run["run"]["dir"]) / run["run"]["name"]))

    def end(self) -> None:
        """End every node, the head last; the network ends what is left of them."""
        for name, process in reversed(self.processes.items()):
            self.network.hosts[name].kill()
            process.wait(10)

    def _own_disk(self, host: Host) -> list[str]:
        return self.network.own_disk(host, self.folder / "disks", self.folder / "ray")

    def _start(self, host: Host, *options: str) -> None:
        command = ["ray", "start", "--block", f"--node-ip-address={host.address}", "--disable-usage-stats",
                   f"--dashboard-agent-listen-port={self.network.port(AGENT)}", "--include-log-monitor=false",
                   "--object-store-memory=200000000", *options]  # fmt: skip
        with self._log(host.name).open("wb") as log:
            self.processes[host.name] = subprocess.Popen(
                [*self._own_disk(host), *command], env=self.environment, cwd=self.folder, stdout=log, stderr=log,
                start_new_session=self.network.own_sessions
            )  # fmt: skip
        self.network.started(host, self.processes[host.name].pid)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


class SubmittedRun:
    """A run on the cluster, seen by the files of its folder."""

    def __init__(self, nodes: RayNodes, folder: RunFolder) -> None:
        self.nodes, self.folder = nodes, folder

    def rows(self) -> list[dict[str, Any]]:
        """The records of the steps so far."""
        return [row for row in _lines(self.folder.metrics) if "timing_s/step" in row]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in _lines(self.folder.events) if event["kind"] == kind]

    def pools(self) -> tuple[int, int]:
        """Generators and learner ranks that made the newest step; 0 before the first one."""
        row = (self.rows() or [{}])[-1]
        return int(row.get("generator/workers", 0)), int(row.get("learner/workers", 0))

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

    def workers(self) -> list[dict[str, Any]]:
        """The run's live processes, as `pods status` tells of them."""
        assert self.nodes.head is not None
        status = json.loads(self.nodes.pods(self.nodes.head, "status", str(self.folder.path), "--json"))
        return status["live"]["workers"]

    def places(self) -> dict[str, list[str]]:
        """Hosts of the cluster's live actors of a run, by role."""
        found: dict[str, list[str]] = {}
        for host in self.nodes.network.hosts.values():
            for pid in host.processes():
                with suppress(psutil.NoSuchProcess):
                    if (role := role_of(psutil.Process(pid))) in ACTORS:
                        found.setdefault(role, []).append(host.name)
        return {role: sorted(hosts) for role, hosts in found.items()}


def _lines(path: Path) -> Sequence[dict[str, Any]]:
    """Lines of a file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
