"""The comparison with other trainers: what is made of an arm's steps, and arms that fail or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.peers import ours_arm
from benchmarks.peers.arms import ARMS, Settings
from benchmarks.peers.measure import measure
from benchmarks.peers.processes import run_command
from benchmarks.peers.summary import config_of, ratios, render_table, summarize
from pods_cluster.config import load_config
from pods_cluster.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def step(number: int, seconds: float, correct: float, **more: Any) -> dict[str, Any]:
    row = {"step": number, "seconds": seconds, "at": 10.0 * number, "correct": correct, "reward": correct}
    return row | {"tokens_made": 1000.0, "tokens_trained": 250.0, "stages": {"update": 1.0}} | more


def test_rates_leave_the_first_two_steps_out() -> None:
    steps = [step(1, 50, 0.1), step(2, 40, 0.2), step(3, 2, 0.3), step(4, 3, 0.3), step(5, 10, 0.3), step(6, 5, 0.6)]
    evals = [
        {"step": 0, "at": 0.0, "accuracy": 0.27, "seconds": 9},
        {"step": 6, "at": 60.0, "accuracy": 0.31, "seconds": 9},
    ]
    found = summarize(steps, evals, target=0.30)
    assert found["median_seconds"] == 4
    assert found["mean_seconds"] == 5
    assert found["made_per_second"] == 200
    assert found["trained_per_second"] == 50
    assert found["training_accuracy"] == pytest.approx({"first": 0.2, "last": 0.4})
    assert found["target_seconds"] == 60
    assert found["held_out"] == {"before": 0.27, "after": 0.31}
    assert summarize(steps, evals, target=0.32)["target_seconds"] is None


def test_few_steps_give_no_rates() -> None:
    found = summarize([step(1, 5, 0.1), step(2, 5, 0.1)], [], target=0.3)
    assert found["steps"] == 2
    assert "median_seconds" not in found
    assert summarize([], [], target=0.3)["steps"] == 0


def test_ours_is_compared_with_trl_at_the_same_n_and_on_as_many_cards() -> None:
    arms = [
        {"name": "ours-16", "peer": "ours", "n": 16, "cards": 1, "median_seconds": 2.0},
        {"name": "trl-16", "peer": "trl", "n": 16, "cards": 1, "median_seconds": 6.0},
        {"name": "ours-64", "peer": "ours", "n": 64, "cards": 1, "median_seconds": 4.0},
        {"name": "trl-16-other", "peer": "trl", "n": 16, "cards": 1, "median_seconds": 5.0},
        {"name": "trl-64", "peer": "trl", "n": 64, "cards": 1},  # failed
        {"name": "trl-16-server", "peer": "trl", "n": 16, "cards": 2, "median_seconds": 9.0},
        {"name": "ours-16-two-cards", "peer": "ours", "n": 16, "cards": 2, "median_seconds": 1.5},
    ]
    assert ratios(arms) == {"ours-16": 3.0, "ours-16-two-cards": 6.0}


def test_of_several_rounds_the_median_counts_and_every_round_has_its_row() -> None:
    plain = {"m": 16, "n": 16, "cards": 1, "staleness": 0, "status": "done"}

    def rounds(name: str, peer: str, *seconds: float) -> list[dict[str, Any]]:
        return [
            {"name": name, "peer": peer, "round": number, **plain}
            | summarize([step(i, each, 0.25) for i in range(4)], [], 0.3)
            for number, each in enumerate(seconds, 1)
        ]

    ours, trl = rounds("ours-16", "ours", 2, 4, 3), rounds("trl-16", "trl", 60, 6, 9)
    failed = {"name": "ours-16", "peer": "ours", "round": 4, **plain, "status": "failed", "error": "out of memory"}
    arms = [*ours, failed, *trl]
    assert ratios(arms) == {"ours-16": 3.0}
    lines = render_table({"arms": arms}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        *(f"ours-16, round {number}" for number in (1, 2, 3, 4)),
        *(f"trl-16, round {number}" for number in (1, 2, 3)),
        "ours-16, median of 3 rounds",
        "trl-16, median of 3 rounds",
    ]
    assert "| 9.00 |" in lines[-1]


def test_the_result_names_the_configuration_of_ours_by_arm_where_they_differ() -> None:
    one, two, trl = (ARMS[name].plain() for name in ("ours-16-k1", "ours-16-k1-two-cards", "trl-16-server"))
    assert config_of([trl]) == "none of ours"
    assert config_of([trl, two, two]) == "gsm8k-2gpu.yaml"
    assert config_of([one, trl, two]) == {"ours-16-k1": "gsm8k-1gpu.yaml", "ours-16-k1-two-cards": "gsm8k-2gpu.yaml"}


def test_the_table_has_a_row_for_each_arm_and_the_cause_of_a_failure() -> None:
    plain = {"n": 16, "m": 16, "staleness": 0, "status": "done"}
    done = {"name": "a", **plain, **summarize([step(i, 2, 0.25) for i in range(8)], [], 0.3)}
    done |= {"card": {"peak_gb": 80.25, "busy": 0.5}}
    failed = {"name": "b", **plain, "status": "failed", "error": "exit status 3; its output ends with: out of\nmemory"}
    lines = render_table({"arms": [done, failed]}).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "2.00, 2.00" in lines[2]
    assert "80.2" in lines[2]
    assert "failed: exit status 3" in lines[3]


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.peer == "ours"])
def test_every_arm_of_ours_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    arm, settings = ARMS[name], Settings(model="some/model", data="/some/gsm8k")
    path = ROOT / arm.config
    command = ours_arm.command(replace(arm, config=str(path)), settings, tmp_path)
    config = load_config(path, command[command.index(str(path)) + 1 :])
    assert (config.generator.rollouts_per_prompt, config.selector.keep, config.staleness) == (
        arm.n,
        arm.m,
        arm.staleness,
    )
    assert config.learner.prompts_per_step == settings.prompts
    assert config.run.max_seconds == arm.seconds
    assert config.run.eval.every == arm.evaluate


def test_a_command_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log.txt"
    began = time.monotonic()
    error = run_command([sys.executable, "-c", code], log, deadline=3.0)
    assert time.monotonic() - began < 60
    assert error is not None
    assert error.startswith("not done after 3 s")
    assert not psutil.pid_exists(int(log.read_text().split()[0]))


def test_an_arm_that_fails_is_told_with_its_cause(tmp_path: Path) -> None:
    arm, settings = ARMS["ours-16-sync"], Settings(model="there/is/none", data=str(tmp_path), device="cpu")
    entry = measure(replace(arm, config=str(tmp_path / "no-such-file.yaml")), settings, tmp_path / "arm", target=0.3)
    assert entry["status"] == "failed"
    assert "no-such-file.yaml" in entry["error"]
    assert entry["steps"] == 0


def peers(*more: str, cards: str | None = None) -> subprocess.CompletedProcess[str]:
    """The benchmark as its user starts it."""
    environment = os.environ | ({} if cards is None else {"CUDA_VISIBLE_DEVICES": cards})
    command = [sys.executable, "-m", "benchmarks.peers", "--model", "none", "--data", "none", *more]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_rounds_run_the_arms_in_turn_and_append_counts_on(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = ("--out", str(out), "--device", "cpu", "--deadline", "0.001", "--arms", "trl-16-server")  # none gets far
    assert peers(*given, "ours-16-k1-two-cards", "--rounds", "2").returncode == 0
    ended = peers(*given, "--append")
    assert ended.returncode == 0
    found = json.loads(out.read_text())
    assert [(arm["name"], arm["round"]) for arm in found["arms"]] == [
        ("trl-16-server", 1),
        ("ours-16-k1-two-cards", 1),
        ("trl-16-server", 2),
        ("ours-16-k1-two-cards", 2),
        ("trl-16-server", 3),
    ]
    assert found["settings"]["config"] == "gsm8k-2gpu.yaml"
    assert "trl-16-server, round 3" in ended.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_the_steps_that_the_arm_made(number: signal.Signals, tmp_path: Path) -> None:
    rows = "".join(json.dumps(step(i, 2.0 + i, 0.25, time=1000.0 * i)) + "\n" for i in range(1, 6))
    arm = (
        "import pathlib, sys, time; new = pathlib.Path(sys.argv[1], 'new'); "
        f"new.write_text({rows!r}); new.rename(new.with_name('steps.jsonl')); time.sleep(600)"
    )
    code = (
        "import signal, sys; from benchmarks.peers import __main__, measure; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"measure._command = lambda arm, settings, out: [sys.executable, '-c', {arm!r}, str(out)]; __main__.main()"
    )
    out, work = tmp_path / "result.json", tmp_path / "work"
    given = ("--model", "none", "--data", "none", "--device", "cpu", "--out", str(out), "--work", str(work))
    command = [sys.executable, "-c", code, *given, "--arms", "trl-16-server", "trl-16"]
    outer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (work / "trl-16-server-1" / "steps.jsonl").is_file() and time.monotonic() < until:
            time.sleep(0.1)
        outer.send_signal(number)
        assert outer.wait(60) == 130
    finally:
        outer.kill()
    (entry,) = json.loads(out.read_text())["arms"]
    assert (entry["status"], entry["error"]) == ("interrupted", "this command was interrupted")
    assert (entry["steps"], entry["median_seconds"]) == (5, 6.0)


def test_a_light_copy_counts_among_the_seconds_of_a_step(tmp_path: Path) -> None:
    arm = ARMS["ours-16-sync"]
    folder = RunFolder.create(str(tmp_path), arm.name, "")
    records = [{"timing_s/step": 3.0}, {"timing_s/step": 2.0, "timing_s/copy": 1.5}, {"timing_s/step": 4.0}]
    folder.metrics.write_text(
        "".join(json.dumps({"step": i, "time": 10.0 * i} | r) + "\n" for i, r in enumerate(records, 1))
    )
    steps = ours_arm.read(arm, tmp_path)["steps"]
    assert [(row["seconds"], row["at"]) for row in steps] == [(3.0, 3.0), (3.5, 6.5), (4.0, 10.5)]


@pytest.mark.parametrize(
    ("cards", "seen"), [("0", "1 card is"), ("", "0 cards are"), ("GPU-8932f937,-1,2", "1 card is")]
)
def test_arms_of_two_cards_are_refused_where_one_is_visible(cards: str, seen: str, tmp_path: Path) -> None:
    arms = ("trl-16", "trl-16-server", "ours-16-k1-two-cards")
    ended = peers("--out", str(tmp_path / "result.json"), "--arms", *arms, cards=cards)
    assert ended.returncode == 2
    assert f"--arms: trl-16-server, ours-16-k1-two-cards need two cards, but {seen} visible; name two" in ended.stderr
    assert not (tmp_path / "result.json").exists()


def test_rounds_below_one_are_refused(tmp_path: Path) -> None:
    ended = peers("--out", str(tmp_path / "result.json"), "--device", "cpu", "--rounds", "0")
    assert ended.returncode == 2
    assert "--rounds: 0 is too few; give 1 or more" in ended.stderr
