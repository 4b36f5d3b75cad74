"""The parts of idle time add up to it."""

from __future__ import annotations

import pytest

from benchmarks.idle_parts import OUTSIDE, generator_parts, learner_parts


def step(tokens_per_second: float, busy: float, **seconds: float) -> dict[str, float]:
    outside = {f"generator/{part}_seconds": seconds.get(part, 0.0) for part in OUTSIDE}
    return {
        "generator/tokens_per_second": tokens_per_second,
        "generator/saturated_tokens_per_second": 100.0,
        "generator/busy_seconds": busy,
        "timing_s/step": 2.0,
        "timing_s/generate": 0.5,
        "timing_s/publish": 0.25,
        "tokens/trained": 600.0,
        "learner/saturated_tokens_per_second": 1000.0,
        **outside,
    }


def test_the_parts_of_the_generators_idle_time_add_up_to_it() -> None:
    found = generator_parts([step(80.0, 1.8, weights=0.2), step(50.0, 0.5, empty=1.0, between=0.3, verifying=0.2)])
    assert found["idle"] == pytest.approx(0.35)
    assert found["idle"] == pytest.approx(sum(found[part] for part in OUTSIDE) + found["slower_steps"])
    assert found["weights"] == pytest.approx(0.05)
    assert found["empty"] == pytest.approx(0.25)
    assert found["slower_steps"] == pytest.approx(2.3 / 4 - 0.65)


def test_a_generator_that_is_never_idle_has_no_parts() -> None:
    found = generator_parts([step(100.0, 2.0)])
    assert [found[part] for part in ("idle", "slower_steps", *OUTSIDE)] == pytest.approx([0.0] * 6)


def test_the_learner_waits_in_stages() -> None:
    found = learner_parts([step(100.0, 2.0)] * 3)
    assert found["idle"] == pytest.approx(0.7)
    assert found["slower_updates"] == pytest.approx(0.7 - 0.25 - 0.125)
