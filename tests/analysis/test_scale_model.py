"""Laws of the model behind `benchmarks/scale.py`: limits in which the answer is known without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._result_file import records
from benchmarks.scale_inputs import EngineSpeed, Parts, Workload, lognormal, uniform
from benchmarks.scale_model import simulate

ENGINE = EngineSpeed(0.0, 1 / 1000, 32)
"""1,000 tokens a second, shared."""
NOTHING = Parts(update=lambda rollouts, tokens: 0.0)


def work(**changes: Any) -> Workload:
    base: dict[str, Any] = {"generators": 1, "prompts": 8, "n": 8, "m": 2, "staleness": 1, "steps": 12}
    return Workload(**{**base, "lengths": uniform(10, 30), **changes})


def test_with_a_learner_that_takes_no_time_a_generator_makes_its_own_rate() -> None:
    outcome = simulate(work(), ENGINE, NOTHING)
    assert outcome.tokens_per_second == pytest.approx(1000, rel=0.03)
    assert outcome.seconds_per_step == pytest.approx(8 * 8 * 20 / 1000, rel=0.1)


@pytest.mark.parametrize("generators", [2, 5])
def test_generators_that_are_the_bound_add_up(generators: int) -> None:
    alone = simulate(work(), ENGINE, NOTHING)
    together = simulate(work(generators=generators, prompts=8 * generators), ENGINE, NOTHING)
    assert together.tokens_per_second == pytest.approx(generators * alone.tokens_per_second, rel=0.05)


def test_a_slow_learner_sets_the_pace() -> None:
    outcome = simulate(work(), ENGINE, Parts(update=lambda rollouts, tokens: 10.0, publish=0.5))
    assert outcome.seconds_per_step == pytest.approx(10.5, rel=0.02)
    assert outcome.busy["update"] == pytest.approx(10 / 10.5, rel=0.02)


def test_without_staleness_the_stages_add_up_and_with_it_they_overlap() -> None:
    generate = 8 * 8 * 20 / 1000
    parts = Parts(update=lambda rollouts, tokens: generate)
    apart, beside = simulate(work(staleness=0), ENGINE, parts), simulate(work(staleness=2), ENGINE, parts)
    assert apart.seconds_per_step == pytest.approx(2 * generate, rel=0.1)
    assert beside.seconds_per_step == pytest.approx(generate, rel=0.1)


def test_a_selector_that_is_the_bound_sets_the_pace_and_a_second_one_halves_it() -> None:
    slow = Parts(update=lambda rollouts, tokens: 0.0, selector_group=1.0)
    two = Parts(update=lambda rollouts, tokens: 0.0, selector_group=1.0, selectors=2)
    one_seconds = simulate(work(generators=8, steps=60), ENGINE, slow).seconds_per_step
    assert one_seconds == pytest.approx(8.0, rel=0.05)
    assert simulate(work(generators=8, steps=60), ENGINE, two).seconds_per_step == pytest.approx(4.0, rel=0.1)


def test_a_cost_never_makes_a_run_faster() -> None:
    free = simulate(work(generators=4), ENGINE, NOTHING).seconds_per_step
    for cost in ("publish", "pause", "selector_message", "controller_group", "fetch_rollout", "plan_rollout"):
        dear = Parts(update=lambda rollouts, tokens: 0.0, **{cost: 0.05})
        assert simulate(work(generators=4), ENGINE, dear).seconds_per_step >= free * 0.99, cost


def test_an_engine_computes_the_tokens_of_its_rollouts_in_flight_anew_under_each_version() -> None:
    context = 32 * (1000 + 10)  # 32 rollouts, each with its prompt and half of its own tokens
    free, dear = (
        simulate(work(prompt_tokens=1000, steps=30), ENGINE, Parts(update=lambda rollouts, tokens: 0.0, recompute=rate))
        for rate in (float("inf"), context / 2.0)
    )
    assert dear.seconds_per_step - free.seconds_per_step == pytest.approx(2.0, rel=0.1)


def test_an_engine_that_shares_the_learners_card_is_slower_by_what_the_update_takes_of_it() -> None:
    generate = 8 * 8 * 20 / 1000
    parts = Parts(update=lambda rollouts, tokens: generate, share=0.0001)
    assert simulate(work(staleness=2), ENGINE, parts).seconds_per_step == pytest.approx(2 * generate, rel=0.1)


def test_batches_overlap_the_update_too_but_their_replaced_groups_wait_for_it() -> None:
    parts = Parts(update=lambda rollouts, tokens: 8 * 8 * 20 / 1000)
    room, batches = (
        simulate(work(staleness=2, batches=each), ENGINE, parts).seconds_per_step for each in (False, True)
    )
    assert batches == pytest.approx(room, rel=0.15)
    seconds = [
        simulate(work(no_signal=0.4, batches=each, steps=30), ENGINE, parts).seconds_per_step for each in (False, True)
    ]
    assert seconds[1] > seconds[0]


def test_bundles_change_little() -> None:
    fine = simulate(work(generators=4, n=64, prompts=8, lengths=lognormal(100, 0.4, 200)), ENGINE, NOTHING)
    coarse = simulate(work(generators=4, n=64, prompts=8, lengths=lognormal(100, 0.4, 200), bundle=8), ENGINE, NOTHING)
    assert coarse.seconds_per_step == pytest.approx(fine.seconds_per_step, rel=0.1)


def test_the_recorded_check_says_what_is_within_its_bound_and_most_is() -> None:
    result = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "scale.json").read_text())
    rows = records(result["check"])
    assert all(row["within"] == (abs(row["modelled"] / row["measured"] - 1) <= 0.15) for row in rows)
    assert sum(row["within"] for row in rows) >= 25
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    for row in rows:
        assert f"{row['measured']:.2f}" in page, f"docs/scale.md does not show {row['run']}"
