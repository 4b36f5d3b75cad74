"""The page of evidence says what its result file says, and what was not run; clocks retell time and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence_page
from benchmarks._result_file import render
from benchmarks.evidence import PARTS, Part, quick_time
from benchmarks.evidence_answers import answer
from benchmarks.evidence_claims import CLAIMS, claim_lines, reach_lines
from benchmarks.evidence_clocks import Clock, as_rows, clocks
from pods_cluster.config.sweep import load_sweep
from pods_cluster.telemetry.curves import RunSeries
from pods_cluster.telemetry.speedup import Target

SIZES = {"grpo": (8, 8), "grpo-ga": (64, 64), "grpo-pods": (64, 8)}


def run(arm: str, seed: int, steps: int = 10) -> RunSeries:
    """Steps of 16 prompts, accuracy 10 % to 60 %; a second for each hundred rollouts made, two for as many trained."""
    n, m = SIZES[arm]
    records: list[dict[str, Any]] = [{"step": 0, "elapsed": 0.0, "eval/greedy_accuracy": 0.1, "eval/rows": 512}]
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step,
                "elapsed": float(step),
                "eval/greedy_accuracy": 0.1 + 0.05 * step + 0.001 * seed,
                "eval/rows": 512,
                "timing_s/step": 16 * (n + 2 * m) / 100,
                "timing_s/generate": 16 * n / 100,
                "timing_s/update": 16 * 2 * m / 100,
                "rollouts/generated": 16 * n,
                "rollouts/trained": 16 * m,
                "grad_norm": 0.5,
            }
        )
    return RunSeries.of(f"{arm}-s{seed}", records, {"run": {"name": arm, "seed": seed}})


def result() -> dict[str, Any]:
    arms = {arm: [run(arm, seed) for seed in range(3)] for arm in SIZES}
    which = clocks()
    return {
        "command": "python -m benchmarks.evidence --quick",
        "machine": {
            "cpu": "CPU",
            "cores": 2,
            "memory_gib": 4.0,
            "load_1min": 0.1,
            "packages": {"torch": "2", "deepspeed": "0"},
        },
        "start": {"greedy": 0.1, "sampled": 0.05, "rows": 512},
        "seconds": 90.0,
        "parallel": "1",
        "target": None,
        "clocks": as_rows(which),
        "parts": {"arms": answer(arms, "grpo-ga", Target(), which, by_steps=True)},
    }


def test_the_page_tells_the_speed_up_of_its_result() -> None:
    text = evidence_page.page(result())
    (row,) = (
        line for line in text.splitlines() if line.startswith("| grpo-pods |") and "sooner" not in line and "%" in line
    )
    # a step of GRPO-GA takes 192 parts of time, one of PODS 80, with the same accuracy at each step
    assert "| 2.40 [2.40, 2.40] | 1.00 [1.00, 1.00] |" in row
    assert "the interval holds 1" not in text
    # n, m, the rules, the prompts, staleness, settling, the clocks' check, the parts on GPUs, the gradients
    assert text.count("**Not run yet.**") == 16
    assert "docs/images" not in text


def test_the_page_tells_how_long_quick_takes_and_how_long_other_parts_runs_are() -> None:
    found = result()
    found["parts"]["prompts"] = found["parts"]["arms"] | {"clocks": {}, "seconds": 40.0}
    quick = result() | {"minutes": 21.4}
    found["quick"] = quick_time(quick)
    assert (found["quick"]["runs"], found["quick"]["rounds"]) == (9, 9)
    text = evidence_page.page(found)
    assert "--quick` took 21 minutes on 2 cores of CPU: 9 runs of 90 s, 1 at a time" in text
    assert text.count("Each run here has 40 s of training.") == 1
    assert (
        "`--quick`, made later (of all 64 20.48 s, of 8 2.56 s) | 99 % of grpo-ga's best | 3 | 2.40 [2.40, 2.40] |"
        in text
    )
    found["quick"] |= {"rounds": 6, "minutes": 14.0}
    assert (
        "6 of 9 rounds took 14 minutes on 2 cores of CPU, until the machine's time was over; at that pace the whole takes 21"
        in (evidence_page.page(found))
    )


def test_of_two_seeds_both_are_shown() -> None:
    found = result()
    pairs = {arm: [run(arm, 0), run(arm, 20)] for arm in SIZES}
    found["parts"] = {"arms": answer(pairs, "grpo-ga", Target())}
    text = evidence_page.page(found)
    assert "| grpo-pods | 2 | 61.0% (60.0% and 62.0%) |" in text


def test_where_one_alone_reached_the_target_the_others_end_bounds_the_speed_up() -> None:
    # Steps of GRPO-GA take 30.72 s, of PODS 12.8 s; at the same step all have the same accuracy, 10 % and 5 points a step.
    runs = {"machine": {"gpus": ["H200"], "cpu": "CPU"}, "command": "pods sweep", "target": 0.5005, "gain": None}

    def bounds(sign: str, pods: int, ga: int) -> list[float]:
        last = {"grpo-pods": pods, "grpo-ga": ga}
        arms = {arm: [run(arm, seed, steps) for seed in range(2)] for arm, steps in last.items()}
        part = answer(arms, "grpo-ga", Target(value=0.5005), by_steps=True)
        text = evidence_page.page(None, {"runs": {"math": runs}, "parts": {"math": part}})
        (row,) = (line for line in text.splitlines() if line.startswith("| grpo-pods | 2"))
        return [float(found) for found in re.findall(rf"\| {sign} (\S+) \|", row.replace("|", "||"))]

    # curves keep three digits
    assert bounds(">", pods=10, ga=4) == pytest.approx([4 * 30.72 / (8 * 12.8), 4 / 8], rel=0.01)
    assert bounds("<", pods=5, ga=10) == pytest.approx([8 * 30.72 / (5 * 12.8), 8 / 5], rel=0.01)


def test_a_page_of_nothing_says_so() -> None:
    text = evidence_page.page(None)
    assert text.count("**Not run yet.**") == 17
    assert "%" not in text.replace("99 %", "")


def test_a_part_on_gpus_says_what_was_to_be_reached_and_what_its_time_is_made_of() -> None:
    runs = {"machine": {"gpus": ["H200"], "cpu": "CPU"}, "command": "pods sweep", "target": None, "gain": 0.03}
    text = evidence_page.page(result(), {"runs": {"math": runs}, "parts": {"math": result()["parts"]["arms"]}})
    assert text.count("**Not run yet.**") == 15
    assert "- **Sooner**: to 3 points above the start; the interval over 3 seeds is too narrow." in text
    assert (
        "- **grpo-pods**: a step takes 0.42 of grpo-ga's time (the whole 12.80 s beside 30.72, update 2.56 s beside 20.48, "
        "wait for rollouts 10.24 s beside 10.24), and it needs 1.00 times as many of them."
    ) in text
    assert (
        "| MATH, one card, H200 | 3 points above the start, named before | 3 | 2.40 [2.40, 2.40] | 1.7 | yes |" in text
    )
    assert "(images/evidence_gpu_math.png)" in text
    assert "MATH, one card;" not in text[text.index("## Not run yet") :]


def test_the_page_is_that_of_the_result_file() -> None:
    import json

    files = (evidence_page.RESULT, evidence_page.GPU_RESULT, evidence_page.GRADIENTS)
    there = (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None for path in files)
    assert evidence_page.PAGE.read_text(encoding="utf-8") == evidence_page.page(*there)


def test_its_figure_has_every_arm(tmp_path: Path) -> None:
    found = result()
    evidence_page.draw(found, tmp_path / "arms.png", "arms")
    assert (tmp_path / "arms.png").stat().st_size > 10_000
    assert len(render(found)) < 12_000  # three arms of twenty: all results together are small


def test_a_clock_tells_time_and_nothing_else() -> None:
    apart = Clock("x", "", made=0.01, trained=0.1, weights=0.5)
    assert apart.step_seconds(100, 10) == pytest.approx(1.0 + 1.0 + 0.5)
    together = Clock("x", "", made=0.01, trained=0.1, weights=0.5, overlap=True)
    assert together.step_seconds(100, 10) == pytest.approx(1.5)
    before = run("grpo-pods", 0)
    told = apart.retell(before)
    assert [record["step"] for record in told.records] == [record["step"] for record in before.records]
    assert (
        told.points("eval/greedy_accuracy", "steps")[1].tolist()
        == before.points("eval/greedy_accuracy", "steps")[1].tolist()
    )
    assert told.points("eval/greedy_accuracy", "training-minutes")[0][-1] == pytest.approx(
        10 * (10.24 + 12.8 + 0.5) / 60
    )


@pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: part.name)
def test_every_part_names_arms_of_its_sweep(part: Part) -> None:
    arms = load_sweep(part.file).arms
    assert {part.baseline, *part.quick, *part.borrowed.values()} <= set(arms)
    claims = [claim for claim in CLAIMS if PARTS[claim.part] is part]
    assert {claim.arm for claim in claims} <= {*arms} - {part.baseline}
    pairs = {(claim.arm, claim.other) for claim in claims if claim.other is not None}
    assert pairs == {*part.beside}
    assert {other for _, other in pairs} <= {*arms}
    told = {clock.name for clock in clocks()} if part.told_by_clocks else set()
    assert {claim.by for claim in claims} <= {"steps", "sooner"} | told
    three = load_sweep(PARTS["arms"].file).arms
    for arm, name in part.borrowed.items():
        one, other = three[arm][0].config, arms[name][0].config
        assert one.generator == other.generator
        assert one.selector.model_copy(update={"min_valid": None}) == other.selector.model_copy(
            update={"min_valid": None}
        )
        assert one.learner == other.learner


def test_what_is_wanted_holds_only_where_the_whole_interval_is_above_it() -> None:
    def told(speed_up: float | None, low: float | None, high: float | None, reaches_at: float | None = 2.0) -> str:
        columns = ["arm", "reaches_at", "speed_up", "speed_up_low", "speed_up_high"]
        row = ["grpo-pods", reaches_at, speed_up, low, high]
        found = {"parts": {"arms": {"rows": {"columns": columns, "rows": [row]}, "clocks": {}}}}
        return list(reach_lines(found, None))[-2].split("|")[-2].strip()

    assert told(2.0, 1.8, 2.2) == "yes"
    assert told(2.0, 1.6, 2.2) == told(1.5, 1.2, 1.9) == told(1.5, 0.5, None) == told(None, None, None) == "not shown"
    assert told(1.4, 1.3, 1.5) == "no"
    assert told(None, None, None, reaches_at=None) == "not shown"
    assert list(reach_lines(None, None)) == []


def test_a_claim_holds_where_its_whole_interval_is_on_its_side() -> None:
    columns = ["arm", "axis", "reaches_at", "speed_up", "speed_up_low", "speed_up_high", "difference", "difference_low"]
    columns.append("difference_high")

    def told(part: str, arm: str, axis: str, *values: float | None) -> str:
        found = {"parts": {part: {"rows": {"columns": columns, "rows": [[arm, axis, 2.0, *values]]}, "clocks": {}}}}
        (row,) = (line for line in claim_lines(found) if line.startswith("| ") and "interval |" not in line)
        return row.split("|")[-2].strip()

    nothing = (None, None, None)
    assert told("rules", "max_variance", "steps", *nothing, 0.1, 0.05, 0.15) == "yes"
    assert told("rules", "max_variance", "steps", *nothing, 0.1, -0.05, 0.25) == "not shown"
    assert told("rules", "max_reward", "steps", *nothing, 0.05, 0.01, 0.09) == "no"
    assert told("arms", "grpo-pods", "steps", *nothing, -0.01, -0.04, 0.01) == "no loss seen"
    assert told("arms", "grpo-pods", "steps", *nothing, -0.01, -0.04, -0.001) == "no"
    assert told("n", "n64", "training-minutes", 1.2, 1.1, None, *nothing) == "yes"
    assert told("n", "n64", "training-minutes", 1.2, None, None, *nothing) == "not shown"
    assert told("n", "n64", "training-minutes", None, 0.0, 0.0, *nothing) == "no"
    assert list(claim_lines(None)) == []

    arms = {
        arm: [run("grpo-pods", seed) for seed in range(3)] for arm in ("random", "max_variance", "max_variance-group")
    }
    found = {"parts": {"rules": answer(arms, "random", Target(), beside=PARTS["rules"].beside)}}
    (row,) = (line for line in claim_lines(found) if "over the group" in line)
    assert row.endswith("| +0.0 points [+0.0, +0.0] | not shown |")
