"""`pods submit` against a real job server of a cluster with tokens, in a process group of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from pods_cluster.telemetry.run_folder import RunFolder
from tests.tiny_run import Made

SECRET = "value-of-the-forwarded-secret"
SETTINGS = [
    "run.steps=2",
    "run.eval.every=0",
    "run.export=false",
    "learner.warmup_steps=0",
    "learner.prompts_per_step=4",
    "generator.engine=paced",
    "generator.rollouts_per_prompt=8",
    "selector.no_signal=keep",
]


@dataclass
class Head:
    server: str
    env: dict[str, str]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    port, server = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="rj-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text("f" * 64)
        known = {"RAY_AUTH_TOKEN_PATH": str(token), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder, "HOME": folder}
        env = {**os.environ, **known, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"):
            env.pop(name, None)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
                   "--dashboard-host=127.0.0.1", f"--dashboard-port={server}", "--num-cpus=4",
                   # the agent takes jobs on a fixed port, which another cluster of this machine may have
                   f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats"]  # fmt: skip
        log = (Path(folder) / "log").open("w+")
        process = subprocess.Popen(
            command, env={**env, "RAY_AUTH_MODE": "token"}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 90
            while not _listens(server):
                assert process.poll() is None, (Path(folder) / "log").read_text()
                assert time.monotonic() < deadline, "the job server did not come up"
                time.sleep(0.3)
            yield Head(f"http://127.0.0.1:{server}", env)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                log.close()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_a_job_runs_with_its_log_its_secret_and_its_exit_code(head: Head, made: Made, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        f"assert os.environ['MY_SECRET'] == {SECRET!r}\n"
        "def reward(prompts, completions, **columns):\n"
        "    return [float(len(completion) % 3) for completion in completions]\n"
    )
    (tmp_path / "unneeded.bin").write_bytes(b"0" * 1000)
    (tmp_path / "run.yaml").write_text((Path(__file__).parents[2] / "pods_cluster/quickstart/run.yaml").read_text())

    def submit(name: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        overrides = [*made.overrides(tmp_path / "runs"), *SETTINGS, "reward.0.name=mine.py:reward", name, *arguments]
        command = [sys.executable, "-m", "pods_cluster.client.cli", "submit", "run.yaml", *overrides]
        return subprocess.run(
            [*command, "--address", head.server, "--env", "MY_SECRET"], cwd=tmp_path, capture_output=True, text=True,
            env={**head.env, "MY_SECRET": SECRET}, timeout=200, check=False,
        )  # fmt: skip

    # Both at once: a job waits for its processes to come up, most of its time.
    with ThreadPoolExecutor(2) as pool:
        done, failed = pool.map(submit, ["run.name=job", "run.name=failing"], [[], ["model.path=/nowhere"]])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sent mine.py, run.yaml" in done.stdout
    assert "forwarded MY_SECRET" in done.stdout
    assert "step 2/2" in done.stdout, "the job's log is followed"
    folder = RunFolder.open(tmp_path / "runs" / "job")
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]
    told = done.stdout + done.stderr + "".join(path.read_text() for path in folder.path.glob("*.*"))
    assert SECRET not in told

    assert failed.returncode == 1
    assert "/nowhere" in failed.stdout
