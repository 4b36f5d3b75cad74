import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.learning.step_plan import PlanError, PlanSettings, plan_step
from pods_cluster.learning.token_batch import pack
from pods_cluster.types import GroupId, Locator, Selection
from tests.law import law


def selection(row, lengths, prompt_tokens=5, rewards=None):
    group = GroupId(0, row)
    count = len(lengths)
    values = np.arange(count, dtype=np.float64) if rewards is None else np.asarray(rewards, dtype=np.float64)
    return Selection(
        group=group,
        locators=[Locator(f"w{i % 2}", group, i) for i in range(count)],
        rewards=values,
        lengths=np.asarray(lengths, dtype=np.int32),
        prompt_tokens=prompt_tokens,
        first_versions=np.zeros(count, np.int32),
        group_mean=0.5,
        group_std=2.0,
        group_valid=count + 1,
    )


steps = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(0, 60), min_size=1, max_size=9)), min_size=1, max_size=9
).map(lambda groups: [selection(row, lengths, prompt) for row, (prompt, lengths) in enumerate(groups)])
plans = st.builds(
    PlanSettings,
    ranks=st.integers(1, 5),
    tokens_per_microbatch=st.integers(90, 400),
    updates_per_batch=st.integers(1, 4),
    loss=st.sampled_from(["sequence_mean", "token_mean", "dr_grpo"]),
    max_tokens=st.just(60),
    floor=st.integers(1, 4),
    packed=st.booleans(),
)


def check(plan, expected):
    config = plan.settings
    assert sorted(s.locator for s in plan.sequences) == sorted(expected)
    updates = {len(rank.updates) for rank in plan.ranks}
    assert len(updates) == 1
    for index in range(updates.pop()):
        parts = [rank.updates[index] for rank in plan.ranks]
        assert len({len(part) for part in parts}) == 1
        assert any(batch.sequences for part in parts for batch in part)
        sequences = [s for part in parts for batch in part for s in batch.sequences]
        assert math.isclose(sum(s.weight for s in sequences), 1.0, rel_tol=1e-9)
        if config.loss == "token_mean":
            assert all(s.token_weight == sequences[0].token_weight for s in sequences)
        groups = {s.locator.group for s in sequences}
        others = {s.locator.group for s in plan.sequences if s not in sequences}
        assert not groups & others or config.updates_per_batch == 1
    for rank in plan.ranks:
        for update in rank.updates:
            for batch in update:
                assert batch.computed_tokens <= config.tokens_per_microbatch


@law(150)
@given(steps, plans)
def test_every_rollout_once_weights_sum_to_one_budget_kept_equal_counts(step, config):
    plan = plan_step(step, config)
    check(plan, [locator for one in step for locator in one.locators])
    assert not plan.lost
    assert plan.trained_tokens == sum(int(one.lengths.sum()) for one in step)


@law(150)
@given(steps, plans, st.data())
def test_without_lost_rollouts_it_is_the_plan_of_what_is_left(step, config, data):
    plan = plan_step(step, config)
    everyone = [locator for one in step for locator in one.locators]
    lost = set(data.draw(st.lists(st.sampled_from(everyone), unique=True)))
    after = plan.without(lost)
    left = {one.group: [x for x in one.locators if x not in lost] for one in step}
    whole = {one.group for one in step if len(left[one.group]) == len(one)}
    given_up = {group for group, rest in left.items() if group not in whole and len(rest) < max(config.floor, 1)}
    assert set(after.lost) == given_up
    assert set(after.groups) == set(left) - given_up
    check(after, [x for group, rest in left.items() if group not in given_up for x in rest])
    before = {s.locator: rank for rank, part in enumerate(plan.ranks) for s in part.sequences}
    assert all(before[s.locator] == rank for rank, part in enumerate(after.ranks) for s in part.sequences)


def test_advantages_and_weights_are_made_anew_after_a_loss():
    step = [selection(0, [3, 4, 5], rewards=[0, 1, 5]), selection(1, [3, 3], rewards=[1, 0])]
    plan = plan_step(step, PlanSettings(ranks=1, tokens_per_microbatch=64, floor=2))
    after = {s.locator.index: s for s in plan.without({step[0].locators[2]}).sequences if s.locator.group.row == 0}
    scale = math.sqrt(0.5) + 1e-4
    assert after[0].advantage == pytest.approx(-0.5 / scale)
    assert after[1].advantage == pytest.approx(0.5 / scale)
    assert after[0].weight == pytest.approx(1 / 4)


def computed(rank):
    return sum(batch.computed_tokens for update in rank.updates for batch in update)


@law(80)
@given(steps, st.integers(1, 4), st.booleans())
def test_ranks_get_near_equal_tokens(step, ranks, packed):
    # In one micro-batch, so that no prompt is counted twice on a rank.
    plan = plan_step(step, PlanSettings(ranks=ranks, tokens_per_microbatch=10_000, packed=packed))
    tokens = [computed(rank) if packed else rank.tokens for rank in plan.ranks]
    assert max(tokens) - min(tokens) <= max(s.total_tokens for s in plan.sequences) * (2 if packed else 1)


@law(80)
@given(steps, st.integers(1, 4), st.integers(90, 400))
def test_packs_hold_a_groups_prompt_once_and_few_groups_are_divided(step, ranks, budget):
    plan = plan_step(step, PlanSettings(ranks=ranks, tokens_per_microbatch=budget, packed=True))
    packs = [batch for rank in plan.ranks for batch in rank.updates[0] if batch.sequences]
    fed = sum(max(s.completion_tokens - 1, 0) for s in plan.sequences)
    prompts = {s.locator.group: s.prompt_tokens for s in plan.sequences}
    for batch in packs:
        groups = {s.locator.group for s in batch.sequences}
        own = sum(max(s.completion_tokens - 1, 0) for s in batch.sequences)
        assert batch.computed_tokens == own + sum(prompts[group] for group in groups)
    divisions = sum(len({s.locator.group for s in batch.sequences}) for batch in packs) - len(prompts)
    assert divisions < len(packs)
    assert sum(batch.computed_tokens for batch in packs) - fed >= sum(prompts.values())


def test_packs_of_a_rank_are_of_near_equal_size():
    """17 groups of 16 in packs of 32,768: three of about 24,000 tokens, not two full ones and a rest."""
    rng = np.random.default_rng(0)
    step = [selection(row, rng.integers(20, 512, 16), 128) for row in range(17)]
    plan = plan_step(step, PlanSettings(ranks=1, tokens_per_microbatch=32_768, packed=True))
    sizes = [batch.computed_tokens for batch in plan.ranks[0].updates[0]]
    assert len(sizes) == -(-sum(sizes) // 32_768)
    assert max(sizes) - min(sizes) <= 512 + 128


def test_a_packs_count_is_what_is_computed():
    """The plan's tokens are those of the tensors, and never more than the padded ones."""
    step = [selection(0, [3, 1, 7, 5], 6), selection(1, [4], 3), selection(2, [1, 1, 9], 4)]
    settings = PlanSettings(ranks=1, tokens_per_microbatch=400, packed=True)
    (batch,) = plan_step(step, settings).ranks[0].updates[0]
    pairs = [([s.locator.group.row] * s.prompt_tokens, list(range(s.completion_tokens))) for s in batch.sequences]
    assert pack(pairs).input_ids.shape == (1, batch.computed_tokens) == (1, 6 + 2 + 6 + 4 + 3 + 3 + 4 + 8)
    padded = plan_step(step, replace(settings, packed=False)).ranks[0].updates[0]
    assert sum(one.computed_tokens for one in padded) > batch.computed_tokens


def test_peak_grows_with_the_budget_and_not_with_the_number_of_rollouts():
    def largest(groups, budget):
        step = [selection(row, [20, 30, 40, 25] * 4) for row in range(groups)]
        return plan_step(step, PlanSettings(ranks=1, tokens_per_microbatch=budget)).largest_microbatch

    assert largest(4, 256) == largest(8, 256) == largest(64, 256) <= 256
    assert 256 < largest(64, 1024) <= 1024


@pytest.mark.parametrize("packed", [True, False])
def test_a_rank_with_nothing_takes_dummy_passes(packed):
    plan = plan_step([selection(0, [40, 1])], PlanSettings(ranks=3, tokens_per_microbatch=45, packed=packed))
    assert sorted(len(rank.sequences) for rank in plan.ranks) == [0, 1, 1]
    assert all(len(rank.updates[0]) == 1 and rank.updates[0][0].packed is packed for rank in plan.ranks)
    (idle,) = (rank for rank in plan.ranks if not rank.sequences)
    assert idle.updates[0][0].computed_tokens == 0


def test_impossible_steps_are_refused():
    with pytest.raises(PlanError, match=r"tokens_per_microbatch: 40 cannot hold a rollout of 45 tokens"):
        plan_step([selection(0, [40])], PlanSettings(ranks=1, tokens_per_microbatch=40))
    with pytest.raises(PlanError, match=r"0\.0\.0 stands twice"):
        plan_step([selection(0, [4]), selection(0, [4])], PlanSettings(ranks=1, tokens_per_microbatch=40))
    assert plan_step([], PlanSettings(ranks=2, tokens_per_microbatch=40)).ranks[0].updates == ()


@pytest.mark.parametrize("loss", ["sequence_mean", "dr_grpo"])
def test_weights_of_a_rule_multiply_what_a_rollout_counts(loss):
    settings = PlanSettings(ranks=2, tokens_per_microbatch=400, loss=loss, max_tokens=60, scope="group")
    plain, own = selection(0, [4, 8, 6, 2]), np.array([0.5, 2.0, 1.0, 3.0])
    weighted = replace(plain, weights=own)
    equal = {s.locator: s for s in plan_step([plain], settings).sequences}
    plan = plan_step([weighted], settings)
    for sequence in plan.sequences:
        factor = own[sequence.locator.index]
        assert sequence.weight == pytest.approx(factor * equal[sequence.locator].weight)
        assert sequence.token_weight == pytest.approx(factor * equal[sequence.locator].token_weight)
        assert sequence.advantage == equal[sequence.locator].advantage
    rest = plan.without([weighted.locators[1]])
    for sequence in rest.sequences:
        assert sequence.weight == pytest.approx(own[sequence.locator.index] / 3)


@pytest.mark.parametrize("loss", ["sequence_mean", "token_mean", "dr_grpo"])
def test_rollouts_that_count_nothing_change_no_weight_but_their_own(loss):
    """As with `learner.mask_truncated`: the tokens of others count as if these had none."""
    settings = PlanSettings(ranks=1, tokens_per_microbatch=500, loss=loss, max_tokens=60)
    masked = replace(selection(0, [10, 60, 20]), weights=np.array([1.0, 0.0, 1.0]))
    found = {s.locator.index: s for s in plan_step([masked], settings).sequences}
    assert found[1].token_weight == 0.0
    expected = {"sequence_mean": (1 / 30, 1 / 60), "token_mean": (1 / 30, 1 / 30), "dr_grpo": (1 / 180, 1 / 180)}[loss]
    assert (found[0].token_weight, found[2].token_weight) == pytest.approx(expected)
    whole = plan_step([selection(0, [10, 60, 20])], settings).sequences
    assert [s.advantage for s in whole] == [found[s.locator.index].advantage for s in whole], "rewards still count"
