"""What the learner could not get is told with its causes, in a text of bounded length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.learning.reports import LostGroup, MissingRollout, StepResult
from pods_cluster.run.weight_updates import (
    CAUSE_LENGTH,
    CAUSES_SHOWN,
    causes_text,
    lost_groups_text,
    partial_groups_text,
)
from pods_cluster.types import GroupId, Locator


def result(lost: list[LostGroup], trained: list[GroupId], missing: list[MissingRollout]) -> StepResult:
    return StepResult(
        metrics={},
        trained=trained,
        lost=lost,
        trained_rollouts=4 * len(trained),
        lost_rollouts=0,
        trained_tokens=0,
        total_tokens=0,
        received_bytes=0,
        updates=1,
        fetch_seconds=0.0,
        update_seconds=0.0,
        missing=missing,
    )


def test_lost_groups_are_told_with_their_causes_and_so_are_rollouts_of_trained_groups() -> None:
    gone, whole, partial = GroupId(0, 1), GroupId(0, 2), GroupId(0, 3)
    missing = [MissingRollout(Locator("a", gone, index), "worker a died") for index in range(3)]
    missing.append(MissingRollout(Locator("b", partial, 0), "worker b did not answer in time"))
    lost = [LostGroup(gone, 4, 3, "worker a died"), LostGroup(GroupId(0, 4), 4, 4, "worker a died")]
    told = result(lost, [whole, partial], missing)
    assert lost_groups_text(told) == (
        "2 groups lost between selection and update: 7 of 8 kept rollouts are missing: worker a died (7)"
    )
    assert partial_groups_text(told) == (
        "1 rollout lost between selection and update, their groups trained without them: "
        "worker b did not answer in time (1)"
    )
    assert partial_groups_text(result([], [whole], [])) is None


def test_causes_are_grouped_and_the_most_frequent_come_first() -> None:
    causes = {
        "worker a died": 2,
        "worker b: aborted": 7,
        "worker c did not answer in time": 1,
        "left out": 1,
        "gone": 1,
    }
    assert causes_text(causes) == (
        "worker b: aborted (7); worker a died (2); worker c did not answer in time (1); 2 other causes (2)"
    )
    assert causes_text({}) == "cause unknown"


@given(st.dictionaries(st.text(max_size=2000), st.integers(1, 10**6), max_size=50))
def test_the_text_of_causes_is_one_line_of_bounded_length(causes: dict[str, int]) -> None:
    text = causes_text(causes)
    assert len(text) <= CAUSES_SHOWN * (CAUSE_LENGTH + 15) + 50
    assert "\n" not in text
