"""The sbatch script with stand-ins for Slurm's commands, Ray and `pods`: what it starts where, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "pods.sbatch"

STAND_INS = {
    "scontrol": 'printf "%s\\n" node-a node-b node-c',
    # the step's own command, as srun would start it on the node
    "srun": 'echo "srun $*" >> "$LOG"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "sleep": "exec /bin/sleep 0.03",
    "hostname": "echo 10.0.0.1 fe80::1",
    "ray": 'echo "ray $*" >> "$LOG"\ntrap "echo ray ended >> $LOG; exit 0" TERM\n'
    '[ -z "${RAY_FAILS:-}" ] || exit 1\nwhile true; do sleep 0.05; done',
    "python": 'case "$2" in *secrets*) echo secret-token;; *) echo "${JOINED:-$(grep -c "^ray start" "$LOG")}";; esac',
    "pods": 'echo "pods $* [$RAY_ADDRESS] [$RAY_AUTH_MODE $RAY_AUTH_TOKEN]" >> "$LOG"\n'
    'trap "/bin/sleep 0.3; echo saved >> $LOG; exit 0" TERM\n'
    '[ -z "${LONG:-}" ] || { for i in $(seq 200); do sleep 0.05; done; }\n'
    "exit ${POD_STATUS:-0}",
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """Environment of a job whose commands are stand-ins that write to LOG."""
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "log").touch()
    return {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "LOG": str(tmp_path / "log"),
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "PODS_START_SECONDS": "20",
    }


def start(job: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.Popen(command, env=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def log(job: dict[str, str]) -> list[str]:
    return Path(job["LOG"]).read_text().splitlines()


def test_ray_runs_on_every_node_and_the_run_on_it(job: dict[str, str]) -> None:
    run = start(job, "run.yaml", "generator.workers=8")
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 0, errors
    lines = log(job)
    steps = sorted(line for line in lines if line.startswith("srun") and " ray start" in line)
    assert [line.split("--nodelist=")[1].split()[0] for line in steps] == ["node-a", "node-b", "node-c"]
    assert "ray start --head --node-ip-address=10.0.0.1 --port=6379" in steps[0]
    assert all("ray start --address=10.0.0.1:6379" in line for line in steps[1:])
    assert all("--labels" not in line for line in steps)
    (line,) = [line for line in lines if line.startswith("pods ")]
    assert line == "pods train run.yaml generator.workers=8 --plain [10.0.0.1:6379] [token secret-token]"


def test_nodes_are_labelled_by_the_pool_that_they_are_for(job: dict[str, str]) -> None:
    run = start(job | {"PODS_LEARNER_NODES": "1", "SLURM_RESTART_COUNT": "1"}, "run.yaml")
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 0, errors
    labels = {
        line.split("--nodelist=")[1].split()[0]: line.rsplit("--labels=", 1)[1]
        for line in log(job)
        if line.startswith("srun") and "--labels=" in line
    }
    assert labels == {"node-a": "pool=learners", "node-b": "pool=generators", "node-c": "pool=generators"}
    (line,) = [line for line in log(job) if line.startswith("pods ")]
    assert "learner.place={pool: learners} generator.place={pool: generators} --resume --plain" in line


def test_a_signal_reaches_the_run_which_saves_its_state(job: dict[str, str]) -> None:
    run = start(job | {"LONG": "1"}, "run.yaml")
    deadline = time.monotonic() + 20
    while not any(line.startswith("pods ") for line in log(job)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGTERM)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 0, errors
    lines = log(job)
    assert "saved" in lines
    assert "ray ended" not in lines[: lines.index("saved")], "the cluster outlives the run"
    deadline = time.monotonic() + 10
    while log(job).count("ray ended") < 3:
        assert time.monotonic() < deadline, "no node is left behind"
        time.sleep(0.02)


def test_the_runs_status_is_the_jobs(job: dict[str, str]) -> None:
    run = start(job | {"POD_STATUS": "3"}, "run.yaml")
    run.communicate(timeout=30)
    assert run.returncode == 3


@pytest.mark.parametrize(
    ("environment", "arguments", "text"),
    [
        ({}, [], "usage: sbatch pods.sbatch RUN.yaml"),
        ({"PODS_LEARNER_NODES": "3"}, ["run.yaml"], "3 of 3 node(s) leave none for the generators"),
        (
            {"JOINED": "2", "PODS_START_SECONDS": "1"},
            ["run.yaml"],
            "2 of 3 node(s) joined within 1 s (PODS_START_SECONDS)",
        ),
        ({"JOINED": "0", "RAY_FAILS": "1"}, ["run.yaml"], "a node's Ray has ended before the run began"),
    ],
)
def test_what_cannot_begin_says_why(
    job: dict[str, str], environment: dict[str, str], arguments: list[str], text: str
) -> None:
    run = start(job | environment, *arguments)
    _, errors = run.communicate(timeout=30)
    assert run.returncode in (1, 2)
    assert text in errors
    assert not any(line.startswith("pods ") for line in log(job))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", [SCRIPT, SCRIPT.parents[2] / ".ci/run", SCRIPT.parents[2] / ".ci/rehearse"])
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
