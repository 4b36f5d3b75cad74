"""Laws of the whole loop, over random fates, deaths, joins, settling, waves and publishes: the real selector core and
assembler in a made-up world."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from pods_cluster.run import continuous_issue, instructions
from pods_cluster.run import loop as run_module
from pods_cluster.run.prompt_supply import ALONE
from pods_cluster.types import Fate, GroupId
from tests.law import law
from tests.run.parts import loop_config
from tests.run.world import Chances, Life


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "EMPTY_STEPS", 10_000)
    # Time goes by in ticks here: in a real pause hundreds of them pass, and engines die, without a group being issued.
    monkeypatch.setattr(continuous_issue, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(instructions, "PAUSE_SECONDS", 0.0)


SOME = st.sampled_from([0.0, 0.01, 0.05])


@law(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chances=st.builds(
        Chances,
        finish=st.sampled_from([0.05, 0.3, 0.9]),
        die=SOME,
        scale=SOME,
        refuse_weights=SOME,
        lose_on_the_way=st.sampled_from([0.0, 0.01]),
        no_reward=st.sampled_from([0.0, 0.2]),
        accuracy=st.sampled_from([0.15, 0.5, 0.9]),
    ),
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    staleness=st.integers(0, 3),
    settle=st.sampled_from(["off", "abort", "waves"]),
    no_signal=st.sampled_from(["replace", "drop", "keep"]),
    n=st.sampled_from([4, 7, 12]),
    prompts=st.integers(1, 4),
    in_flight=st.sampled_from(["auto", 1, 9, 30]),
)
# All workers are dead, and none is started yet, when the next portion of a group is due.
@example(
    chances=Chances(0.9, die=0.05, scale=0.0, refuse_weights=0.0, lose_on_the_way=0.0, no_reward=0.2, accuracy=0.9),
    seed=30822,
    workers=3,
    staleness=1,
    settle="waves",
    no_signal="keep",
    n=4,
    prompts=3,
    in_flight=1,
)
def test_every_group_has_one_fate_and_nothing_is_left_behind(
    tmp_path: Path,
    chances: Chances,
    seed: int,
    workers: int,
    staleness: int,
    settle: str,
    no_signal: str,
    n: int,
    prompts: int,
    in_flight: str | int,
) -> None:
    config = loop_config(
        f"generator.in_flight={in_flight}",
        f"staleness={staleness}",
        f"selector.settle={settle}",
        f"selector.no_signal={no_signal}",
        f"generator.rollouts_per_prompt={n}",
        f"generator.workers={workers}",
        f"learner.prompts_per_step={prompts}",
        "selector.waves=3",
        "selector.keep=3",
        "selector.min_valid=2",
        "run.steps=6",
        "generator.max_failures=10000",  # engines die by chance here
    )
    life = Life(config, chances, seed, tmp_path)
    life.main()  # ends: no deadlock; inside: never a rollout older than k trained, never two fates, never too many out
    ledger = life.run.ledger
    assert not ledger.in_flight, "a slot leaked"
    assert not life.run.assembler.prompts_in_flight()
    assert life.fates.keys() >= life.world.issued.keys(), "a group has no fate"
    never_sent = life.fates.keys() - life.world.issued.keys()  # nobody was left when it was to be sent
    assert {life.fates[group] for group in never_sent} <= {Fate.LOST}
    assert ledger.fates == Counter(life.fates.values())
    assert ledger.issued == len(life.fates)
    assert sorted(life.learners.trained) == sorted(g for g, fate in life.fates.items() if fate is Fate.TRAINED)
    assert not life.selector.core.expected(), "the selector still waits for a group"
    # whatever was served and has not had its end will be served again
    served = {(group.epoch, group.row) for group in life.fates}
    ended = {(g.epoch, g.row) for g, fate in life.fates.items() if fate not in (Fate.LOST, Fate.CANCELLED)}
    gone = served - ended - {(0, prompt.row) for prompt in life.stream.returned}
    # except for prompts that were lost with four engines in a row
    assert len(gone) == life.recorder.events.count("prompt_given_up")
    lost = Counter((group.epoch, group.row) for group, fate in life.fates.items() if fate is Fate.LOST)
    assert all(lost[row] > ALONE for row in gone)
    for worker in life.world.members.values():
        assert not worker.running, "a rollout is generated for nobody"
        assert not worker.held, "a rollout is held for nobody"
        assert not worker.groups
    if settle == "waves":
        _portions_are_whole(life.world.issued, n)
    else:
        assert all(len(indices) == n for indices in life.world.issued.values())


@law(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chances=st.builds(
        Chances, finish=st.sampled_from([0.05, 0.3, 0.9]), accuracy=st.sampled_from([0.15, 0.5, 0.9]), no_reward=SOME
    ),
    seed=st.integers(0, 2**32),
    staleness=st.integers(1, 3),
    no_signal=st.sampled_from(["replace", "keep"]),
    prompts=st.integers(1, 4),
    in_flight=st.sampled_from(["auto", 1, 9, 30]),
)
def test_nothing_is_issued_that_would_become_too_stale(
    tmp_path: Path, chances: Chances, seed: int, staleness: int, no_signal: str, prompts: int, in_flight: str | int
) -> None:
    """Law: where nobody dies and the oldest groups are waited for, every group is trained, or has no signal.

    (With `drop`, and where replacements run out, a step gets smaller for a group that is younger than those it leaves.)
    """
    config = loop_config(
        f"staleness={staleness}",
        f"selector.no_signal={no_signal}",
        f"learner.prompts_per_step={prompts}",
        f"generator.in_flight={in_flight}",
        "generator.workers=2",
        "selector.keep=3",
        "selector.min_valid=2",
        "selector.max_replacements=100",
        "run.steps=8",
    )
    life = Life(config, chances, seed, tmp_path)
    life.selector.patience = 1.0
    life.main()
    assert not {Fate.STALE, Fate.LOST} & set(life.fates.values())
    steps = [[kept.group.row for kept in step] for step in life.learners.steps]
    for step, later in itertools.pairwise(steps):
        assert max(step) < min(later), "not in the order of the prompts"


@pytest.mark.parametrize(("in_flight", "die"), [("auto", 0.0), ("auto", 0.02), ("5", 0.02)])
def test_a_run_on_policy_is_what_it_was_before_groups_were_issued_continuously(
    tmp_path: Path, in_flight: str, die: float
) -> None:
    """Requests, selections, fates and their order, with scaling, and with deaths.

    The digests are of the loop since a step trains its groups in the order of issue. But for the order within a step, those
    without deaths are what they were of the loop before (compared where nothing is lost on the way to the learner, too).
    """
    before = ["2f96c932de946dd4", "88d67b26ee0f2463", "72ea80983a6bd871", "9ca9291e9bd26d91", "07742571e5c03204"]
    before += ["837bdeb5d68d832c", "8d690fe87537404d", "fbf8c29fc32cfce3", "3959bd21216c6511"]
    with_deaths = ["43412dae98440e10", "32a0f93d9c46c0ed", "f4703e14732da2e3", "cdb5a97abd0c90f3", "3e61e4a8f72f2cc6"]
    with_deaths += ["ec20d7547151d93a", "789ed5dff22be4f2", "bf52db15238e0b30", "3e1a20112533af4d"]
    for seed, expected in enumerate(with_deaths if die else before):
        config = loop_config(
            "staleness=0",
            f"generator.in_flight={in_flight}",
            "generator.max_failures=10000",
            f"generator.workers={1 + seed % 3}",
            f"selector.settle={['off', 'abort', 'waves'][seed % 3]}",
            f"selector.no_signal={['replace', 'drop', 'keep'][seed // 3 % 3]}",
            "generator.rollouts_per_prompt=7",
            "learner.prompts_per_step=3",
            "selector.waves=3",
            "selector.keep=3",
            "selector.min_valid=2",
            "run.steps=6",
        )
        chances = Chances(die=die, scale=0.02, refuse_weights=die, lose_on_the_way=0.01, no_reward=0.1)
        life = Life(config, chances, seed, tmp_path)
        life.main()
        told = [
            [tuple(group) for group in life.learners.trained],
            [tuple(group) for group in life.world.issued],
            [(tuple(group), fate.value) for group, fate in life.fates.items()],
            life.stream.served,
            [[tuple(place) for kept in step for place in kept.locators] for step in life.learners.steps],
        ]
        assert hashlib.sha256(repr(told).encode()).hexdigest()[:16] == expected


def _portions_are_whole(issued: dict[GroupId, set[int]], n: int) -> None:
    for group, indices in issued.items():
        assert indices == set(range(len(indices))), f"{group}: {sorted(indices)}"
        assert len(indices) in {4: {3, 4}, 7: {3, 5, 7}, 12: {4, 8, 12}}[n]
