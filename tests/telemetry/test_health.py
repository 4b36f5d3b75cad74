"""Each rule of a run's health speaks beyond its threshold, is silent within it, and names what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.telemetry.health import Health
from pods_cluster.telemetry.health_rules import RULES, Finding
from pods_cluster.telemetry.health_window import WINDOW, fall_of

GOOD: dict[str, float] = {
    "timing_s/step": 4.0,
    "updates": 1,
    "rollouts/generated": 640,
    "rollouts/excluded": 0,
    "rollouts/stale": 0,
    "groups/trained": 16,
    "groups/no_signal": 2,
    "completions/clipped_ratio": 0.05,
    "reward": 0.5,
    "entropy": 0.4,
    "sampling/sampling_logp_difference/mean": 0.01,
    "scoring/seconds_mean": 0.1,
    "generator/replaced": 0,
    "generator/preemptions": 0,
}


def health_of(records: list[dict[str, Any]]) -> Health:
    health = Health()
    for record in records:
        health.add(record)
    return health


def names(health: Health) -> set[str]:
    return {finding.rule for finding in health.findings}


def test_a_good_run_is_healthy() -> None:
    health = health_of([GOOD] * 50)
    assert health.findings == []
    assert health.line == "healthy"
    assert set(health.metrics()) == {f"health/{rule.name}" for rule in RULES}
    assert set(health.metrics().values()) == {0.0}


CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], str]] = [
    ("no-update", [GOOD | {"updates": 0}] * 3, [GOOD | {"updates": 0}] * 2, "no update in the last 3 steps"),
    (
        "updates-skipped",
        [GOOD | {"updates": 0, "updates_skipped": 1}] * 2 + [GOOD] * 6,
        [GOOD | {"updates_skipped": 1}] * 2 + [GOOD] * 10,
        "2 of the last 8 updates were skipped",
    ),
    (
        "checkpoint-failed",
        [GOOD, GOOD | {"checkpoint/failed": 2.0}],
        [GOOD | {"checkpoint/failed": 2.0}, GOOD],
        "the last 2 checkpoint(s) could not be written",
    ),
    (
        "no-signal",
        [GOOD | {"groups/trained": 8, "groups/no_signal": 58}] * 5,
        [GOOD | {"groups/trained": 8, "groups/no_signal": 8}] * 5,
        "88% of the groups have no signal",
    ),
    (
        "truncated",
        [GOOD | {"completions/clipped_ratio": 0.6}] * 5,
        [GOOD | {"completions/clipped_ratio": 0.25}] * 5,
        "60% of the rollouts are cut off",
    ),
    (
        "excluded",
        [GOOD | {"rollouts/excluded": 64, "scoring/failures/timeout/judge": 64, "scoring/failures/error/x": 2}] * 5,
        [GOOD | {"rollouts/excluded": 6}] * 5,
        "reward 'judge' gave no number (timeout) 320 times",
    ),
    (
        "stale",
        [GOOD | {"rollouts/stale": 128}] * 5,
        [GOOD | {"rollouts/stale": 64}] * 5,
        "20% of the rollouts are too old",
    ),
    (
        "reward-falls",
        [GOOD] * 20 + [GOOD | {"reward": 0.2}] * 10,
        [GOOD] * 20 + [GOOD | {"reward": 0.42}] * 10,
        "fell from 0.5 (its best 10 steps) to 0.2",
    ),
    (
        "entropy-collapse",
        [GOOD] * 10 + [GOOD | {"entropy": 0.05}] * 10,
        [GOOD] * 10 + [GOOD | {"entropy": 0.1}] * 10,
        "entropy fell from 0.4 to 0.05 nats",
    ),
    (
        "mismatch",
        [GOOD | {"sampling/sampling_logp_difference/mean": 0.2}] * 3,
        [GOOD | {"sampling/sampling_logp_difference/mean": 0.049}] * 3,
        "differ by 0.200 nats",
    ),
    (
        "workers-replaced",
        [GOOD | {"generator/replaced": 1}] * 3,
        [GOOD | {"generator/replaced": 1}] * 2 + [GOOD] * 10 + [GOOD | {"generator/replaced": 1}] * 2,
        "3 generators were replaced",
    ),
    (
        "preemptions",
        [GOOD | {"generator/preemptions": 64}] * 3,
        [GOOD | {"generator/preemptions": 32}] * 3,
        "pushed 10% of the rollouts",
    ),
    (
        "slow-rewards",
        [GOOD | {"scoring/seconds_mean": 3.0}] * 3,
        [GOOD | {"scoring/seconds_mean": 2.0}] * 3,
        "waits 3.0 s for its reward, 75% of a step",
    ),
    (
        "bottleneck",
        [GOOD | {"balance/generate_seconds": 4.0, "balance/update_seconds": 1.0, "timing_s/wait": 3.0}] * 3,
        [GOOD | {"balance/generate_seconds": 4.0, "balance/update_seconds": 1.0, "timing_s/wait": 1.0}] * 3,
        "the generators set the pace: the learner waits 75% of a step",
    ),
]


@pytest.mark.parametrize(("rule", "bad", "fair", "text"), CASES, ids=[case[0] for case in CASES])
def test_each_rule(rule: str, bad: list[dict[str, Any]], fair: list[dict[str, Any]], text: str) -> None:
    health = health_of(bad)
    assert names(health) == {rule}
    finding = health.findings[0]
    assert text in finding.text
    assert finding.advice
    assert finding.link == f"docs/troubleshooting.md#{rule}"
    assert health.metrics()[f"health/{rule}"] == 1.0
    assert text in health.line
    assert finding.advice in health.line
    assert names(health_of(fair)) == set()


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}


class Told:
    def __init__(self) -> None:
        self.kinds: list[tuple[str, str]] = []

    def event(self, kind: str, text: str, **fields: Any) -> None:
        self.kinds.append((kind, fields["rule"]))


def test_a_hint_is_measured_and_makes_no_event() -> None:
    health, told = Health(), Told()
    waiting = GOOD | {"balance/generate_seconds": 4.0, "balance/update_seconds": 1.0, "timing_s/wait": 3.0}
    assert health.tell(waiting, told)["health/bottleneck"] == 1.0
    assert health.level == "info"
    assert health.line.startswith("healthy; the generators set the pace")
    assert health.tell(waiting | {"completions/clipped_ratio": 0.9}, told)["health/truncated"] == 1.0
    assert health.level == "warning"
    for _ in range(WINDOW):
        health.tell(GOOD, told)
    assert told.kinds == [("health", "truncated"), ("health_over", "truncated")]


@given(st.lists(st.sampled_from([GOOD, *(record for case in CASES for record in case[1][:1])]), max_size=30))
def test_the_health_after_records_is_that_of_one_who_followed(records: list[dict[str, Any]]) -> None:
    assert Health.after(records).findings == health_of(records).findings


def test_a_finding_is_told_once_and_its_end_once() -> None:
    health = Health()
    new: list[Finding] = []
    over: list[str] = []
    for _ in range(3):
        new, over = health.add(GOOD | {"generator/replaced": 1})
    assert [finding.rule for finding in new] == ["workers-replaced"]
    assert over == []
    assert health.add(GOOD) == ([], [])
    ends = [health.add(GOOD)[1] for _ in range(WINDOW)]
    assert ends.count(["workers-replaced"]) == 1


def test_a_record_without_a_step_changes_nothing() -> None:
    health = Health()
    assert health.add({"eval/greedy_accuracy": 0.3}) == ([], [])
    assert not health.window.records


def test_an_error_is_the_line_before_a_warning() -> None:
    bad = GOOD | {"completions/clipped_ratio": 0.9, "updates": 0}
    line = health_of([bad] * 3).line
    assert line.startswith("no update in the last 3 steps")
    assert line.endswith("(+1 more)")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"balance/generate_seconds": 3.0, "balance/update_seconds": 1.0}, "the pools take turns"),
        (
            {
                "balance/generate_seconds": 3.0,
                "balance/update_seconds": 1.0,
                "timing_s/wait": 2.0,
                "balance/generators": 5.2,
            },
            "the generators set the pace: the learner waits 50% of a step; add generators; about 6 would keep up",
        ),
        (
            {
                "balance/generate_seconds": 3.0,
                "balance/update_seconds": 1.0,
                "timing_s/wait": 2.0,
                "tokens/sampled": 290_000.0,
                "tokens/recomputed": 220_000.0,
            },
            "the generators set the pace: the learner waits 50% of a step; add generators, or keep the cache over new weights "
            "(weights.keep_cache: true): beside the tokens that they sample, engines compute 76% as many anew",
        ),
        (
            {
                "balance/generate_seconds": 1.0,
                "balance/update_seconds": 2.0,
                "timing_s/wait": 0.0,
                "balance/generators": 1.0,
                "balance/rollouts_per_prompt": 32.0,
            },
            "the learner sets the pace: generating takes 50% of its time",
        ),
        (
            {
                "balance/generate_seconds": 1.0,
                "balance/update_seconds": 1.0,
                "timing_s/wait": 0.0,
                "balance/generators": 1.0,
            },
            "both pools are busy",
        ),
        ({}, ""),
    ],
)
def test_which_pool_sets_the_pace(values: dict[str, float], text: str) -> None:
    health = health_of([GOOD | values] * 3)
    assert health.pace.startswith(text) if text else health.pace == ""
    assert health.line == (f"healthy; {health.pace}" if text else "healthy")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*GOOD, "balance/generate_seconds", "balance/update_seconds", "timing_s/wait"]),
            st.floats() | st.integers(-5, 10**6),
        ),
        max_size=40,
    )
)
def test_no_record_breaks_it(records: list[dict[str, float]]) -> None:
    health = health_of(records)
    assert isinstance(health.line, str)
    assert all(value in (0.0, 1.0) for value in health.metrics().values())


@pytest.mark.parametrize(
    ("record", "cause", "advice"),
    [
        ({"updates_skipped": 1}, "their loss or gradient was not finite", "lower learner.learning_rate"),
        ({"groups/no_signal": 9, "groups/stale": 2}, "the rewards of each group are equal", "all of them are equal"),
        ({"groups/too_few_valid": 9, "groups/no_signal": 2}, "too few rollouts of each group", "mend the reward"),
        ({"groups/stale": 9}, "the groups were too old", "raise staleness"),
        ({"groups/lost": 9}, "lost with their generators", "see their causes"),
    ],
)
def test_no_update_names_its_cause_and_what_mends_that(record: dict[str, float], cause: str, advice: str) -> None:
    none = {"timing_s/step": 4.0, "updates": 0, "groups/trained": 0}
    (finding,) = [found for found in health_of([none | record] * 3).findings if found.rule == "no-update"]
    assert cause in finding.text
    assert advice in finding.advice


def test_a_distance_over_versions_is_told_as_one() -> None:
    apart = GOOD | {"sampling/sampling_logp_difference/mean": 0.2}
    (here,) = health_of([apart] * 3).findings
    (later,) = health_of([apart | {"staleness/mean": 1.5}] * 3).findings
    assert here.advice.startswith("set weights.verify: true")
    assert later.advice.startswith("try staleness: 0")
    assert "over 1.5 versions" in later.text


def steps_to_fall(rewards: Any) -> int | None:
    """Number of steps after which the rule speaks, as a run would hear it."""
    values = [float(reward) for reward in rewards]
    return next((at for at in range(1, len(values) + 1) if fall_of(values[:at], 0.2) is not None), None)


@pytest.mark.parametrize("groups", [4, 16, 64])
@pytest.mark.parametrize("mean", [0.02, 0.2, 0.5, 0.9])
def test_a_reward_without_a_trend_is_no_fall(mean: float, groups: int) -> None:
    """Prompts are mostly solved or mostly not, so that a step's mean goes up and down by chance."""
    random = np.random.default_rng(groups)
    for _ in range(3):
        chances = random.beta(mean, 1 - mean, (200, groups))
        assert steps_to_fall(random.binomial(16, chances).mean(1) / 16) is None
    assert steps_to_fall(random.normal(0.0, 0.1, 200)) is None


@pytest.mark.parametrize(
    ("before", "after", "noise", "within"),
    [(0.5, 0.0, 0.0, 5), (0.5, 0.0, 0.1, 12), (0.6, 0.3, 0.05, 12), (0.6, 0.45, 0.05, 60), (-0.2, -1.0, 0.05, 10),
     (-10.0, -13.0, 0.1, 15), (1e-3, 0.0, 0.0, 5)],
)  # fmt: skip
def test_a_fall_is_told_within_few_steps(before: float, after: float, noise: float, within: int) -> None:
    random = np.random.default_rng(7)
    series = np.r_[np.full(60, before), np.full(80, after)] + random.normal(0, noise, 140)
    told = steps_to_fall(series)
    assert told is not None
    assert 60 < told <= 60 + within


@pytest.mark.parametrize("share", [0.0, 0.1, 0.19])
def test_a_small_fall_is_no_finding(share: float) -> None:
    assert steps_to_fall([0.5] * 60 + [0.5 * (1 - share)] * 100) is None


@given(st.lists(st.floats(-1e300, 1e300), max_size=80))
def test_any_series_can_be_judged(values: list[float]) -> None:
    fall = fall_of(values, 0.2)
    assert fall is None or fall.now < fall.best
