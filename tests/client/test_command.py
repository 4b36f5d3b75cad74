"""`pods train` as its user types it: run, interrupt, resume, evaluate. Separate processes, the first two with a Ray cluster of
their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pods_cluster.client.demo import CONFIG
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.run_folder import RunFolder
from tests.client.command import environment, on_cluster, pods, run
from tests.tiny_run import Made

SETTINGS = [
    "selector.no_signal=keep",  # every step trains all its groups
    "generator.rollouts_per_prompt=8",
    "learner.prompts_per_step=4",
    "learner.learning_rate=1e-3",
    "learner.schedule=linear",
    "learner.warmup_steps=2",
    "run.steps=5",
    "run.eval.every=5",
    "run.checkpoint.every=0",
    "run.samples_every=2",
]


def arguments(made: Made, runs: Path, name: str) -> list[str]:
    reward = Path(__file__).parents[1] / "run" / "rewards.py"
    return [*made.overrides(runs), f"run.name={name}", f"reward.0.name={reward}:even_digits", *SETTINGS]


def listening_elsewhere(pid: int) -> list[str]:
    """Sockets of this process and of all that it started that listen on another address than the loopback one."""
    found: list[str] = []
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for socket_ in process.net_connections("inet"):
                if socket_.status == "LISTEN" and not ip_address(socket_.laddr.ip.removeprefix("::ffff:")).is_loopback:
                    found.append(f"{process.name()}: {socket_.laddr.ip}:{socket_.laddr.port}")
    return found


def interrupt_after(step: int, folder: Path, *command: str) -> tuple[int, str]:
    """Start a run, send Ctrl-C when its metrics reach `step`, and wait for its end."""
    with subprocess.Popen(
        pods(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(cold=True)
    ) as process:
        deadline = time.monotonic() + 240
        metrics = folder / "metrics.jsonl"
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and any(json.loads(line)["step"] >= step for line in metrics.read_text().splitlines()):
                break
            time.sleep(0.05)
        elsewhere = listening_elsewhere(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert elsewhere == [], "a cluster of this machine alone can be reached from others"
        return process.returncode, output


@pytest.mark.slow  # three commands, each with processes of its own
def test_an_interrupted_and_resumed_run_equals_an_unbroken_one(cluster: None, made: Made, tmp_path: Path):
    broken = ("train", "--plain", str(CONFIG), *arguments(made, tmp_path, "broken"))
    # Two commands at a time, the first two with a cluster of their own: most of their time they wait for processes to come up.
    with ThreadPoolExecutor(1) as beside:
        unbroken = beside.submit(run, "train", "--plain", str(CONFIG), *arguments(made, tmp_path, "whole"))
        code, output = interrupt_after(2, tmp_path / "broken", *broken)
        whole = unbroken.result()
        assert whole.returncode == 0, whole.stdout + whole.stderr
        assert code == 0, output
        assert "Ctrl-C" in output
        stopped = RunFolder.open(tmp_path / "broken")
        reached = max(record["step"] for record in stopped.read_metrics())
        assert 2 <= reached < 5, output
        evaluated = beside.submit(run, "eval", "--json", str(tmp_path / "whole"), env=on_cluster())
        resumed = run(*broken, "--resume", "run.checkpoint.keep=2", env=on_cluster())
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        evaluation = evaluated.result()

    first, second = RunFolder.open(tmp_path / "whole"), RunFolder.open(tmp_path / "broken")
    rewards = [{r["step"]: r["reward"] for r in folder.read_metrics() if "reward" in r} for folder in (first, second)]
    assert list(rewards[0]) == [1, 2, 3, 4, 5]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    rates = [
        {r["step"]: r["learning_rate"] for r in folder.read_metrics() if "loss" in r} for folder in (first, second)
    ]
    assert rates[0] == rates[1]
    (changed,) = [event["text"] for event in second.read_events() if event["kind"] == "settings_changed"]
    assert changed == "resumed with other settings: run.checkpoint.keep: 1 → 2"
    weights = [load_file(folder.model / "model.safetensors") for folder in (first, second)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(
            weights[1][name], tensor, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )

    _a_run_leaves_what_people_read(first)
    _it_made_every_metric_of_the_catalogue(first)
    _a_second_start_is_refused(made, tmp_path)
    _its_checkpoint_was_evaluated(evaluation, first)


def _a_run_leaves_what_people_read(folder: RunFolder) -> None:
    samples = folder.read_samples()
    assert {sample["step"] for sample in samples if sample["fate"] == "trained"} == {2, 4}
    for sample in samples:
        assert len(sample["rollouts"]) == 8
        kept = 4 if sample["fate"] == "trained" else 0  # dropped groups are there too
        assert sum(rollout["kept"] for rollout in sample["rollouts"]) == kept
        assert all(rollout["reward"] is not None for rollout in sample["rollouts"])
    summary = json.loads(folder.summary.read_text())
    assert summary["status"] == "finished"
    assert summary["rollouts"]["trained"] == 5 * 4 * 4
    assert (folder.figures / "curve.png").stat().st_size > 10_000


NOT_IN_THIS_RUN: dict[str, tuple[str, ...]] = {
    "selector.settle": (
        "reward/settled",
        "reward/uncensored",
        "completions/settled_mean_length",
        "completions/settled_kept_mean_length",
        "rollouts/unissued",
        "tokens/saved",
        "groups/settled",
        "groups/settled_share",
    ),
    "staleness above 0": ("completions/stale_mean_length", "timing_s/wait"),
    "rewards that fail": ("scoring/failures/<kind>/<reward>", "scoring/restarts"),
    "environment": ("turns/mean", "turns/limited", "tokens/environment"),
    "learner.kl": ("kl",),
    "learner.correction": ("sampling/effective_sample_size", "sampling/capped_ratio", "sampling/masked_ratio"),
    "run.eval.samples": ("eval/pass_at_k",),
    "data.revisit_target": ("data/revisit_chance/easy", "data/revisit_chance/hard"),
    "run.checkpoint": ("timing_s/checkpoint",),
    "a GPU": ("memory/<role>/gpu_peak",),
    "a disk that fails": ("telemetry/failed_writes", "telemetry/dropped_lines", "checkpoint/failed"),
    "float16": ("updates_overflowed",),
}
"""Metrics that a short, healthy run on CPUs does not make, by what makes them."""
NOT_IN_EVERY_RUN = {"generator/idle_share"}
"""It needs an engine that was busy for long enough to know its rate."""


def _it_made_every_metric_of_the_catalogue(folder: RunFolder) -> None:
    """And no other, which PODS_STRICT_METRICS would have refused."""
    names = {name for record in folder.read_metrics() for name in record}
    made = {registry[name].name for name in names}
    expected = {name for names in NOT_IN_THIS_RUN.values() for name in names}
    missing = {metric.name for metric in registry} - made - NOT_IN_EVERY_RUN
    assert sorted(missing - expected) == []
    assert sorted(expected - missing) == []


def _a_second_start_is_refused(made: Made, runs: Path) -> None:
    again = run("train", str(CONFIG), *arguments(made, runs, "whole"))
    assert again.returncode == 1
    assert "--resume" in again.stderr
    assert again.stderr.startswith("error: ")
    assert ".py" not in again.stderr  # no line of a traceback either


def _its_checkpoint_was_evaluated(result: subprocess.CompletedProcess[str], folder: RunFolder) -> None:
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout.strip().splitlines()[-1])
    last = [record for record in folder.read_metrics() if "eval/reward" in record][-1]
    assert values["eval/reward"] == pytest.approx(last["eval/reward"], abs=1e-6)
    assert values["eval/rows"] == 32


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["selector.keep=99"], "selector.keep"),
        (["learner.lerning_rate=1"], "did you mean learning_rate"),
        (["reward.0.name=exact_mach"], "exact_match"),
        (["reward.0.name=no_such_module:f"], "reward.0.name: 'no_such_module:f' cannot be used"),
        (["selector.rule=max_varance"], "max_variance"),
        (["data.prompt=question"], "data.prompt"),
        (["model.path=/nowhere"], "model.path"),
        (["selector.settle=abort", "selector.rule=random"], "settled condition"),
    ],
)
def test_what_cannot_run_is_refused_by_check(made: Made, tmp_path: Path, overrides: list[str], said: str):
    result = run("check", str(CONFIG), *made.overrides(tmp_path), *overrides)
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_check_prints_plan_and_prompt_without_ray_or_torch(made: Made, tmp_path: Path):
    code = (
        "import sys; sys.argv = ['pods', 'check', *sys.argv[1:]]\n"
        "from pods_cluster.client.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'ray', 'torch', 'vllm'} & set(sys.modules), 'imported'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(CONFIG), *made.overrides(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "rollouts per trained rollout" in result.stdout
    assert "first prompt, as the engine reads it" in result.stdout


def test_the_controller_needs_neither_torch_nor_transformers():
    """The command imports it too: it would start three seconds later."""
    code = (
        "import sys, pods_cluster.run.run_actors, pods_cluster.learning.reports\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_pools_larger_than_the_cluster_are_refused(cluster: None, made: Made, tmp_path: Path):
    large = ["train", str(CONFIG), *arguments(made, tmp_path, "large"), "generator.gpus_per_worker=4"]
    result = run(*large, env=on_cluster())
    assert result.returncode == 1
    assert "need 4 GPUs, the cluster has 0" in result.stderr
    assert not (tmp_path / "large").exists()


def test_a_cluster_that_is_not_there_is_told_at_once(made: Made, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    result = run("check", str(CONFIG), *arguments(made, tmp_path, "away"), "--address", nobody, timeout=120)
    assert result.returncode == 1
    assert f"cluster.address: {nobody} cannot be used" in result.stderr
    assert "refused" in result.stderr
