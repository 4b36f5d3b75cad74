"""The analysis of runs: the paired interval, and everything that comes out of a run's folder."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gsm8k
from benchmarks.gsm8k import analyse, first_and_last, gain
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.summary import write_summary
from tests.dashboard.made import sample

answers = st.dictionaries(st.integers(0, 400), st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=200)


@given(answers)
def test_the_gain_is_that_of_the_discordant_rows(rows: dict[int, tuple[bool, bool]]) -> None:
    found = gain([rows])
    n = len(rows)
    assert found.gain == pytest.approx(found.after - found.before)
    assert found.gain == pytest.approx((found.gained - found.lost) / n)
    # the variance of differences in -1, 0, 1 from the discordant counts alone (McNemar's)
    variance = (found.gained + found.lost - (found.gained - found.lost) ** 2 / n) / (n - 1)
    assert found.high - found.gain == pytest.approx(gsm8k.Z95 * math.sqrt(max(variance, 0) / n), abs=1e-9)
    assert found.low <= found.gain <= found.high


def test_the_interval_is_the_bootstraps() -> None:
    rng = np.random.default_rng(0)
    before = rng.random(1319) < 0.35
    after = np.where(rng.random(1319) < 0.2, rng.random(1319) < 0.6, before)
    found = gain([{row: (bool(a), bool(b)) for row, (a, b) in enumerate(zip(before, after, strict=True))}])
    differences = after.astype(float) - before
    means = differences[rng.integers(0, 1319, (4000, 1319))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-3)


def test_runs_go_together_by_row() -> None:
    """Two runs of the same rows are no 2n independent rows: identical runs say no more than one of them."""
    rows = {row: (row % 3 == 0, row % 2 == 0) for row in range(300)}
    one, two = gain([rows]), gain([rows, rows])
    assert (one.gain, one.low, one.high) == pytest.approx((two.gain, two.low, two.high))
    fewer = {row: flags for row, flags in rows.items() if row < 200}
    assert gain([rows, fewer]).rows == 200
    with pytest.raises(ValueError, match="needs two or more"):
        gain([rows, {}])


def test_rows_that_were_not_scored_twice_are_left_out() -> None:
    rows = [{"step": step, "row": row, "greedy": greedy} for step, row, greedy in [
        (0, 0, False), (0, 1, None), (0, 2, True), (5, 0, True), (5, 2, True), (9, 0, True), (9, 1, True), (9, 2, False),
    ]]  # fmt: skip
    assert first_and_last(rows) == {0: (False, True), 2: (True, False)}
    assert first_and_last(rows[:3]) == {}


def make(root: Path, name: str, steps: int = 20, rows: int = 60) -> Path:
    """A run in which row r is right from step r on."""
    folder = RunFolder.create(root, name, f"run: {{name: {name}}}\n")
    with Recorder.for_run(folder, strict=True) as recorder:
        for step in range(steps + 1):
            values = {"rollouts/scored": 64, "rollouts/trained": 16, "tokens/sampled": 640, "tokens/trained": 160}
            values |= {"reward": step / steps, "timing_s/step": 2.0, "timing_s/generate": 1.25, "timing_s/update": 0.75}
            values |= {"generator/idle_share": 0.25, "learner/idle_share": 0.5, "weights/bytes": 4096}
            values |= {"completions/mean_length": 100 + step, "sampling/sampling_logp_difference/mean": 0.01}
            if step in (0, 10, 20):
                right = [row < step for row in range(rows)]
                recorder.evaluation(step, [{"version": step, "row": r, "greedy": g} for r, g in enumerate(right)])
                values = (values if step else {}) | {"eval/greedy_accuracy": sum(right) / rows}
            recorder.step(step, values)
        recorder.samples(1, [sample(1)])
        recorder.samples(20, [sample(20)])
    write_summary(folder, status="finished")
    return folder.path


def test_a_runs_folder_gives_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    first, second = make(tmp_path, "one"), make(tmp_path, "two")
    out = tmp_path / "results" / "gsm8k"
    monkeypatch.setattr(sys, "argv", ["gsm8k", str(first), str(second), "--out", str(out), "--machine", "two cards"])
    gsm8k.main()
    result = json.loads(out.with_suffix(".json").read_text())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert result["machine"] == "two cards"
    run = result["runs"][0]
    assert run["gain"]["rows"] == 60
    assert run["gain"]["gained"] == 20
    assert run["gain"]["gain"] == pytest.approx(1 / 3)
    assert run["gain"]["low"] > 0
    assert result["together"]["gain"] == pytest.approx(1 / 3)
    assert run["seconds_per_step"] == {"generate": 1.25, "update": 0.75, "step": 2.0}
    assert run["ratio"] == 4.0
    assert run["idle_shares"] == {"generator": 0.25, "learner": 0.5}
    assert run["mismatch"]["sampling/sampling_logp_difference/mean"]["mean"] == pytest.approx(0.01)
    assert run["weights_bytes"] == 4096
    assert run["lengths"]["completions/mean_length"] == {"first": 101.5, "last": 119.5}
    assert run["curves"]["steps"] == list(range(1, 21))
    assert [point["step"] for point in run["evaluations"]] == [0, 10, 20]
    assert (run["samples"]["first"]["step"], run["samples"]["last"]["step"]) == (1, 20)
    assert run["samples"]["last"]["rollouts"][0]["text"]
    assert run["summary"]["status"] == "finished"
    assert "gain +33.3 points" in capsys.readouterr().out


def test_a_run_without_evaluations_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "bare", "run: {name: bare}\n")
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.step(1, {"reward": 0.5, "timing_s/step": 1.0})
    result = analyse([folder.path])
    assert result["runs"][0]["gain"] is None
    assert result["together"] is None
    assert result["runs"][0]["samples"] == {}
