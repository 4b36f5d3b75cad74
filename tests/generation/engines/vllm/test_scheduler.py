"""Our scheduler's fast path against vLLM's own scheduler: the same steps, the same blocks, the same results.

Both get the same requests, the same aborts and the same tokens; no model runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pods_cluster.generation.engines.vllm.admission import PORTION
from tests.law import law

if TYPE_CHECKING:
    from tests.generation.engines.vllm.scheduler_driver import Hidden

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Hidden:
    from tests.generation.engines.vllm.scheduler_driver import make_config

    return make_config(tmp_path_factory.mktemp("model"))


PROMPTS = st.tuples(st.integers(1, 30), st.integers(1, 16), st.integers(0, 2))
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("reset"), st.none()),
)


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@law(250, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=4, max_size=24), blocks=st.sampled_from([14, 20, 90]))
def test_the_same_steps_and_results_as_vllms_scheduler(
    engine_config: Hidden, asynchronous: bool, second_runner: bool, actions: list[tuple[str, Any]], blocks: int
) -> None:
    from tests.generation.engines.vllm.scheduler_driver import OURS, THEIRS, Driver

    kinds = (THEIRS[asynchronous], OURS[asynchronous])
    theirs, ours = (Driver(kind, engine_config, blocks, 1 + asynchronous, second_runner) for kind in kinds)
    for action, value in [*actions, ("steps", 400)]:
        if action == "add":
            length, max_tokens, family = value
            name = f"request{len(ours.requests)}"
            for driver in (theirs, ours):
                driver.add(name, [(family + 3 * place) % 31 for place in range(length)], max_tokens)
        elif action == "abort" and value < len(ours.requests):
            for driver in (theirs, ours):
                driver.abort(f"request{value}")
        elif action == "reset":
            for driver in (theirs, ours):
                driver.reset()
        elif action == "steps":
            for _ in range(value):
                expected = theirs.step()
                assert ours.step() == expected
                if expected == (None, None):
                    break
        assert ours.state() == theirs.state()
    assert not ours.scheduler.has_requests()
    assert not ours.scheduler._steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decoding_steps_take_the_fast_path(
    engine_config: Hidden, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only steps with a prefill chunk or too little room take vLLM's loops; admission goes along with decoding."""
    from tests.generation.engines.vllm.scheduler_driver import OURS, Driver

    driver = Driver(OURS[asynchronous], engine_config, 90, 1 + asynchronous, asynchronous)
    shared: list[int] = []
    take = driver.scheduler._take

    def counted(step: Any, result: Any) -> Any:
        found = take(step, result)
        shared.append(len(found.request_ids))
        return found

    monkeypatch.setattr(driver.scheduler, "_take", counted)
    for index in range(3):
        driver.add(f"early{index}", [1 + index] * 5, 12)
    for _ in range(4):
        driver.step()
    driver.add("late", [9] * 6, 8)
    while driver.scheduler.has_requests():
        driver.step()
    while driver._queue:
        driver.result()
    tokens = sum(len(request.output_token_ids) for request in driver.requests.values())
    assert sum(shared) == tokens - 4  # all but each one's first token


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_engine_admits_in_portions(
    engine_config: Hidden, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that end one by one: with a portion of 3 places the same work is admitted in fewer of the steps."""
    from tests.generation.engines.vllm.scheduler_driver import OURS, SEQUENCES, Driver

    def admitting(portion: int) -> tuple[list[int], list[int]]:
        """How many were admitted in each step that admits, and the tokens of each request."""
        monkeypatch.setattr(engine_config.value, "additional_config", {PORTION: portion})
        driver = Driver(OURS[asynchronous], engine_config, 90, 1 + asynchronous, asynchronous)
        for index in range(24):
            driver.add(f"request{index}", [1 + index] * 3, 4 + index % SEQUENCES)
        admitted = []
        while driver.scheduler.has_requests():
            shown, _ = driver.step()
            admitted.append(len(shown["new"]) if shown else 0)
        return [count for count in admitted if count], [r.num_output_tokens for r in driver.requests.values()]

    singly, _ = admitting(1)
    together, made = admitting(3)
    assert sum(singly) == sum(together) == 24
    assert len(together) < len(singly)
    assert all(count >= 3 for count in together[:-1])
    assert all(made)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rollouts_that_start_again_are_not_cut_off_by_the_portion(
    engine_config: Hidden, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After new weights all that ran enter again, over as many steps as their tokens take."""
    from tests.generation.engines.vllm.scheduler_driver import OURS, SEQUENCES, Driver

    monkeypatch.setattr(engine_config.value, "additional_config", {PORTION: 4})
    driver = Driver(OURS[asynchronous], engine_config, 90, 1 + asynchronous, asynchronous)
    for index in range(SEQUENCES):
        driver.add(f"request{index}", [1 + index] * 8, 20)
    for _ in range(6):
        driver.step()
    driver.reset()
    waiting = [len(driver.scheduler.waiting)]
    assert waiting[0] > 4
    while waiting[-1] and len(waiting) < 9:
        driver.step()
        waiting.append(len(driver.scheduler.waiting))
    assert waiting[-1] == 0
    assert sorted(set(waiting), reverse=True) == waiting  # someone entered in each step
    assert len(waiting) > 2


def test_requests_that_need_more_go_vllms_way(engine_config: Hidden) -> None:
    from tests.generation.engines.vllm.scheduler_driver import OURS, Driver, scheduler

    driver = Driver(OURS[False], engine_config, 90, 1, False)
    driver.add("plain", [1, 2, 3], 6)
    driver.add("least", [4, 5, 6], 6)
    request = driver.requests["least"]
    assert request.sampling_params is not None
    request.sampling_params.min_tokens = 3
    request.fast_end_tokens = scheduler._end_tokens(request)  # type: ignore[attr-defined]
    assert request.fast_end_tokens is None  # type: ignore[attr-defined]
    while driver.scheduler.has_requests():
        driver.step()
        assert not driver.scheduler._steps
