"""Balance: seconds by stage, idle shares, splits, the n that keeps both pools busy, and n that is chosen by itself."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import ConfigError
from pods_cluster.run.cluster import nccl_can_reach
from pods_cluster.sizing.balance import (
    Balancer,
    Rates,
    StepShape,
    balance_metrics,
    forecast,
    measured_rates,
    next_rollouts,
)
from pods_cluster.sizing.card_splits import cards_needed, splits
from pods_cluster.sizing.step_measurement import METRIC_NAMES, StepMeasurement
from pods_cluster.telemetry.catalog import registry
from tests.run.parts import loop_config

RATES = Rates(generate=1000.0, update=500.0, sync_seconds=0.5, length=100.0, kept_length=100.0)
SHAPE = StepShape(prompts=4, rollouts=20, keep=5, staleness=1, generators=2, ranks=1)

rates = st.builds(
    Rates,
    generate=st.floats(10, 1e5),
    update=st.floats(10, 1e5),
    sync_seconds=st.floats(0, 10),
    length=st.floats(1, 1e4),
    kept_length=st.floats(1, 1e4),
    drain=st.floats(0, 100),
)
shapes = st.builds(
    StepShape,
    prompts=st.integers(1, 64),
    rollouts=st.integers(8, 256),
    keep=st.integers(2, 8),
    staleness=st.integers(0, 3),
    generators=st.integers(1, 16),
    ranks=st.integers(1, 16),
    gpus_per_worker=st.sampled_from([0.25, 0.33, 0.5, 1.0, 2.0, 4.0]),
    gpus_per_rank=st.sampled_from([0.4, 0.55, 1.0]),
)


def test_a_step_by_hand() -> None:
    found = forecast(RATES, SHAPE)  # 8,000 tokens at 2,000 a second; 2,000 tokens at 500 a second
    assert (found.generate, found.update, found.step) == (4.0, 4.0, 4.5)
    assert found.generator_idle == found.learner_idle == pytest.approx(0.5 / 4.5)
    assert found.balanced_rollouts == 20
    assert found.balanced_generators == 2.0
    in_turns = forecast(RATES, replace(SHAPE, staleness=0))
    assert in_turns.step == 8.5
    assert in_turns.bound == "turns"
    assert forecast(RATES, replace(SHAPE, rollouts=40)).bound == "generators"
    assert forecast(RATES, replace(SHAPE, generators=4)).balanced_rollouts == 40


def test_a_batch_that_drains_by_hand() -> None:
    # About a 0.5B model on two H200s: 6.7 s of tokens, 5.7 s in which the longest rollouts end, 2 s of update.
    slow = Rates(generate=45_000, update=31_500, sync_seconds=0.0, length=262, kept_length=246, drain=5.7)
    shape = StepShape(prompts=16, rollouts=72, keep=16, staleness=0, generators=1, ranks=1)
    steps = [forecast(slow, replace(shape, staleness=k)) for k in range(4)]
    assert [round(found.step, 1) for found in steps] == [14.4, 7.2, 6.7, 6.7]
    assert [found.bound for found in steps] == ["turns", "staleness", "generators", "generators"]
    assert {found.enough_staleness for found in steps} == {2}


@given(rates, shapes)
def test_enough_staleness_is_the_least_that_hides_the_drain(rates: Rates, shape: StepShape) -> None:
    enough = forecast(rates, shape).enough_staleness
    pace = forecast(replace(rates, drain=0.0), replace(shape, staleness=1)).step
    assert forecast(rates, replace(shape, staleness=enough)).step == pytest.approx(pace)
    if enough > 1:
        assert forecast(rates, replace(shape, staleness=enough - 1)).step > pace


@given(rates, shapes)
def test_balance_holds_what_it_says(rates: Rates, shape: StepShape) -> None:
    found = forecast(rates, shape)
    assert 0 <= found.generator_idle < 1
    assert 0 <= found.learner_idle < 1
    n = found.balanced_rollouts
    assert n >= shape.keep
    at_n = forecast(rates, replace(shape, rollouts=n))
    one_more = shape.prompts * rates.length / (shape.generators * rates.generate)
    if n > shape.keep:
        assert abs(at_n.generate - at_n.update) <= one_more


@given(rates, shapes, st.integers(5, 40))
def test_splits_use_the_cards_and_the_first_is_the_fastest(rates: Rates, shape: StepShape, cards: int) -> None:
    found = splits(rates, shape, cards)
    assert all(cards_needed(split.shape) <= cards for split in found)
    assert all(split.shape.generators >= 1 and split.shape.ranks >= 1 for split in found)
    assert all(split.shape.ranks <= shape.prompts * shape.keep for split in found)
    assert found[0].step == min(split.step for split in found)


def test_engines_that_share_cards_fill_them() -> None:
    found = splits(RATES, replace(SHAPE, gpus_per_worker=0.33), 2)
    assert sorted((split.shape.generators, split.shape.ranks) for split in found) == [(1, 1), (2, 1), (3, 1)]
    assert {cards_needed(split.shape) for split in found} == {2}
    halves = splits(RATES, replace(SHAPE, gpus_per_worker=0.5), 3)
    assert sorted((s.shape.generators, s.shape.ranks) for s in halves) == [(1, 2), (2, 2), (3, 1), (4, 1)]


def test_generators_have_the_rest_of_a_ranks_card() -> None:
    shape = replace(SHAPE, gpus_per_worker=0.45, gpus_per_rank=0.55)
    assert cards_needed(replace(shape, generators=2, ranks=2)) == 2
    assert cards_needed(replace(shape, generators=5, ranks=2)) == 4
    found = splits(RATES, shape, 2)
    assert sorted((s.shape.generators, s.shape.ranks) for s in found) == [(1, 2), (2, 2), (3, 1)]
    assert [(s.shape.generators, s.shape.ranks) for s in splits(RATES, shape, 1)] == [(1, 1)]
    thirds = replace(SHAPE, gpus_per_worker=0.33, gpus_per_rank=0.34, generators=2, ranks=1)
    assert cards_needed(thirds) == 1


@pytest.mark.parametrize(
    ("overrides", "reached"),
    [
        ([], True),
        (["weights.relay=off"], True),
        (["weights.relay=node"], False),
        (["generator.gpus_per_worker=0.5"], True),
        (["generator.gpus_per_worker=0.5", "weights.relay=off"], False),
        (["generator.gpus_per_worker=0.5", "weights.relay=node"], False),
        (["learner.gpus_per_worker=0.5"], True),
        (["generator.gpus_per_worker=0"], False),
    ],
)
def test_where_nccl_is_the_way_of_the_weights(overrides: list[str], reached: bool) -> None:
    config = loop_config("generator.gpus_per_worker=1", "learner.gpus_per_worker=1", *overrides)
    assert nccl_can_reach(config, 2.0) is reached


def test_too_few_cards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--gpus: 4 cannot hold a generator of 4 GPU\(s\) and a learner rank; give 5"):
        splits(RATES, replace(SHAPE, gpus_per_worker=4), 4)
    with pytest.raises(ValueError, match="--update-rate: 0 must be"):
        replace(RATES, update=0.0)


MEASURED = StepMeasurement(
    sampled_tokens=8800,
    aborted_tokens=800,
    generated_rollouts=80,
    trained_tokens=2000,
    trained_rollouts=20,
    update_seconds=3.5,
    fetch_seconds=0.5,
    publish_seconds=0.5,
    best_generator_rate=2000,
    generators=2,
    ranks=1,
)


def test_rates_of_a_run_leave_out_its_start() -> None:
    found = measured_rates([replace(MEASURED, update_seconds=99.0), MEASURED, MEASURED])
    assert found == RATES
    with pytest.raises(ValueError, match="no step that trained"):
        measured_rates([StepMeasurement.from_record({"step": 0, "eval/reward": 1.0})])
    with pytest.raises(ValueError, match="busy for a whole second"):
        measured_rates([replace(MEASURED, best_generator_rate=0.0)])


def test_the_drain_is_read_where_batches_take_turns() -> None:
    # 8,800 tokens at 2,000 a second: 4.4 s
    in_turns = replace(MEASURED, generate_seconds=6.0, groups_in_flight=0)
    assert measured_rates([in_turns] * 3).drain == pytest.approx(1.6)
    assert measured_rates([replace(in_turns, groups_in_flight=8)] * 3).drain == 0.0
    assert measured_rates([replace(in_turns, groups_in_flight=None)] * 3).drain == 0.0
    assert measured_rates([replace(in_turns, generate_seconds=1.0)] * 3).drain == 0.0


def test_the_run_says_the_same_live() -> None:
    values = balance_metrics(MEASURED, SHAPE)
    assert values == {
        "balance/generate_seconds": 4.0,
        "balance/update_seconds": 4.0,
        "balance/rollouts_per_prompt": 20.0,
        "balance/generators": 2.0,
    }
    assert balance_metrics(StepMeasurement(), SHAPE) == {}


def test_a_measurement_is_read_from_the_metrics_of_the_catalogue() -> None:
    assert set(METRIC_NAMES) == {field.name for field in fields(StepMeasurement)}
    registry.check(dict.fromkeys(METRIC_NAMES.values()))
    record = {name: float(number) for number, name in enumerate(METRIC_NAMES.values(), start=1)}
    read = StepMeasurement.from_record(record | {"step": 3})
    assert {METRIC_NAMES[field.name]: getattr(read, field.name) for field in fields(read)} == record
    assert StepMeasurement.from_record({"timing_s/update": None, "learner/workers": 0}) == StepMeasurement()


@given(st.integers(8, 64), st.floats(0, 1), st.booleans())
def test_n_stays_within_its_bounds(n: int, waited: float, idle: bool) -> None:
    following = next_rollouts(n, 8, 64, waited=waited, idle=idle)
    assert 8 <= following <= 64
    if waited > 0.05:
        assert following < n or n == 8
    elif idle:
        assert following > n or n == 64
    else:
        assert following == n


@given(st.floats(0.2, 5.0), st.integers(8, 128))
def test_n_settles_where_generating_takes_as_long_as_the_rest(speed: float, start: int) -> None:
    """A pool that makes `speed` x 32 rollouts a prompt while the learner trains a step."""
    n = start
    for _ in range(60):
        generate, update = n / (32 * speed), 1.0
        step = max(generate, update)
        n = next_rollouts(n, 8, 128, waited=(step - update) / step, idle=generate < update)
    best = min(128.0, max(8.0, 32 * speed))
    assert 0.85 * best - 1 <= n <= 1.2 * best + 1


def test_a_run_chooses_n_and_goes_on_with_it() -> None:
    config = loop_config("staleness=1", "generator.rollouts_per_prompt=auto", "generator.rollouts_range=[4, 16]")
    balancer = Balancer(config)
    assert balancer.rollouts == 8
    step = StepMeasurement(seconds=2.0, generate_seconds=0.4)
    chosen = balancer.after_step(step, in_flight=4, ready=4, waited=0.0)
    assert chosen["generator/rollouts_per_prompt"] == 8
    assert balancer.rollouts == 9
    waited = balancer.after_step(step, in_flight=4, ready=0, waited=1.0)
    assert waited["timing_s/wait"] == 1.0
    assert balancer.rollouts == 7
    balancer.after_step(replace(step, occupied_seconds=1.98), in_flight=8, ready=5, waited=0.0)
    assert balancer.rollouts == 7, "the groups were there: what it took to take them is no reason for fewer rollouts"
    idle = replace(step, occupied_seconds=1.5)
    balancer.after_step(idle, in_flight=8, ready=5, waited=0.05)
    assert balancer.rollouts == 8, "the generators had nothing to do for a quarter of the step"
    balancer.after_step(idle, in_flight=8, ready=3, waited=0.3)
    assert balancer.rollouts == 7, "but not while the learner waits for them"
    balancer.restore(40)
    assert balancer.rollouts == 16
    fixed = Balancer(loop_config("staleness=1"))
    fixed.after_step(step, in_flight=4, ready=4, waited=0.0)
    fixed.restore(40)
    assert fixed.rollouts == 8


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["generator.rollouts_per_prompt=auto"], r"auto needs bounds.*rollouts_range.*\[fewest, most\]"),
        (["generator.rollouts_range=[4, 16]"], r"rollouts_range: \[4, 16\] needs staleness: 1 or more"),
        (["generator.rollouts_range=[2, 16]", "staleness=1"], r"begins below selector\.keep: 4"),
        (["generator.rollouts_range=[10, 16]", "staleness=1"], r"8 lies outside rollouts_range: \[10, 16\]"),
        (["generator.rollouts_range=[16, 4]", "staleness=1"], r"rollouts_range: \[16, 4\] must be two numbers"),
    ],
)
def test_bounds_that_cannot_hold_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loop_config(*overrides)
