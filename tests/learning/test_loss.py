import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.generation.engines.sampling import restrict
from pods_cluster.learning.loss import GrpoLoss, LossSettings
from pods_cluster.learning.step_metrics import TokenStats, step_metrics
from tests.law import law

numbers = st.floats(-3, 3, width=32)
tokens = st.lists(
    st.tuples(numbers, numbers, numbers, numbers, st.floats(-2, 2, width=32), st.floats(0, 1, width=32)),
    min_size=1,
    max_size=12,
)


def grpo_loss(log_probs, *args):
    """Loss with its gradient, sums and maxima."""
    loss = GrpoLoss(*args)
    return loss.token_losses(log_probs).sum(), *loss.statistics(log_probs.detach())


def columns(rows):
    return (torch.tensor(values, dtype=torch.float32) for values in zip(*rows, strict=True))


def by_hand(rows, config):
    """Token by token, in plain Python."""
    total = 0.0
    for now, old, engine, reference, advantage, weight in rows:
        ratio = math.exp(now - old)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        term = min(ratio * advantage, clipped * advantage)
        if config.correction:
            factor = math.exp(old - engine)
            used = min(factor, config.correction_cap)
            if config.correction_mask and not config.correction_mask[0] <= factor <= config.correction_mask[1]:
                used = 0.0
            term *= used
        gap = reference - now
        total += weight * (-term + config.kl_coefficient * (math.exp(gap) - gap - 1))
    return total


@law(100)
@given(
    tokens,
    st.builds(
        LossSettings,
        clip_low=st.sampled_from([0.1, 0.2]),
        clip_high=st.sampled_from([0.2, 0.28]),
        correction=st.booleans(),
        correction_cap=st.sampled_from([1.0, 2.0]),
        correction_mask=st.sampled_from([None, (0.5, 3.0)]),
        kl_coefficient=st.sampled_from([0.0, 0.3]),
    ),
)
def test_equals_the_formula(rows, config):
    now, old, engine, reference, advantage, weight = columns(rows)
    loss, sums, _ = grpo_loss(now, old, engine, reference, advantage, weight, config)
    assert loss.item() == pytest.approx(by_hand(rows, config), rel=1e-3, abs=1e-3)
    assert sums["tokens"].item() == len(rows)


@law(50)
@given(st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_a_ratio_of_the_whole_rollout_is_that_of_gspo(rollouts, data):
    """Rollout by rollout, in plain Python: eqs. 5 and 7 of arXiv 2507.18071, tokens weighted 1 / |o|."""
    advantages = [data.draw(st.sampled_from([-1.0, 0.5, 2.0])) for _ in rollouts]
    expected = 0.0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        ratio = math.exp(sum(now - old for now, old in rollout) / len(rollout))
        expected -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    rows = torch.tensor([row for row, rollout in enumerate(rollouts) for _ in rollout])
    now, old = columns([token for rollout in rollouts for token in rollout])
    weight = torch.tensor([1 / len(rollouts[row]) for row in rows])
    loss = GrpoLoss(
        old, None, None, torch.tensor(advantages)[rows], weight, LossSettings(importance="sequence"), rows=rows
    )
    assert loss.token_losses(now).sum().item() == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert loss.statistics(now)[0]["loss"].item() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_the_gradient_of_a_rollouts_ratio_is_shared_by_its_tokens():
    now = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    rows, advantage = torch.tensor([0, 0, 1]), torch.tensor([1.0, 1.0, -2.0])
    weight = torch.tensor([0.5, 0.5, 1.0])
    settings = LossSettings(importance="sequence", clip_low=0.9, clip_high=9.0)
    old = torch.tensor([-1.2, -1.8, -0.5])
    GrpoLoss(old, None, None, advantage, weight, settings, rows=rows).token_losses(now).sum().backward()
    torch.testing.assert_close(now.grad, torch.tensor([-0.5, -0.5, 2.0]))
    with pytest.raises(ValueError, match="needs all 3 tokens, not 2"):
        GrpoLoss(old, None, None, advantage, weight, settings, rows=rows).token_losses(now[:2], slice(0, 2))


@law(50)
@given(tokens, st.sampled_from([0.2, 4.0]))
def test_cispo_bounds_the_weight_and_keeps_every_gradient(rows, clip_high):
    """Eq. 4 of arXiv 2506.13585: the gradient of a token is its bounded ratio times its advantage, never 0 by a clip."""
    now, old, _, _, advantage, weight = columns(rows)
    now.requires_grad_()
    loss = GrpoLoss(old, None, None, advantage, weight, LossSettings(objective="cispo", clip_high=clip_high))
    loss.token_losses(now).sum().backward()
    bounded = torch.exp(now.detach() - old).clamp(max=1 + clip_high)
    torch.testing.assert_close(now.grad, -weight * bounded * advantage, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [LossSettings(objective="cispo"), LossSettings(importance="sequence")])
def test_with_one_update_a_batch_all_objectives_have_one_gradient(settings):
    rows, weight = torch.tensor([0, 0, 1]), torch.tensor([0.25, 0.25, 0.5])
    advantage = torch.tensor([1.0, 1.0, -2.0])
    now = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    GrpoLoss(None, None, None, advantage, weight, settings, rows=rows).token_losses(now).sum().backward()
    torch.testing.assert_close(now.grad, -advantage * weight)


def test_the_first_update_has_ratio_one_and_the_policy_gradient():
    now = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage, weight = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.2, 0.3, 0.5])
    loss, sums, _ = grpo_loss(now, None, None, None, advantage, weight, LossSettings())
    loss.backward()
    torch.testing.assert_close(now.grad, -advantage * weight)
    assert sums["ratio"].item() == 3.0
    assert sums["clipped_low"].item() == sums["clipped_high"].item() == 0


def test_a_clipped_token_has_no_gradient_and_is_counted():
    old = torch.zeros(4)
    now = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    loss, sums, maxima = grpo_loss(now, old, None, None, advantage, torch.ones(4), LossSettings())
    loss.backward()
    assert now.grad[:2].tolist() == [0.0, 0.0]
    assert now.grad[2:].tolist() == pytest.approx([math.exp(0.5), -math.exp(-0.5)])
    metrics = step_metrics(TokenStats(*parts(sums, maxima)))
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == 0.25
    assert metrics["clip_ratio/region_mean"] == 0.5


def parts(sums, maxima):
    return {k: float(v) for k, v in sums.items()}, {k: float(v) for k, v in maxima.items()}


def test_equal_numerics_make_the_correction_nothing():
    now = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage, weight = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5])
    plain = grpo_loss(now, None, None, None, advantage, weight, LossSettings())[0]
    corrected, sums, maxima = grpo_loss(now, None, now.detach(), None, advantage, weight, LossSettings(correction=True))
    assert torch.equal(plain, corrected)
    metrics = step_metrics(TokenStats(*parts(sums, maxima)))
    assert metrics["sampling/effective_sample_size"] == 1.0
    assert metrics["mismatch_kl"] == metrics["sampling/sampling_logp_difference/max"] == 0.0


def test_a_known_mismatch_gives_the_known_factor():
    """pi_old / mu = 2 and 8, cap 4: factors 2 and 4, detached."""
    now = torch.tensor([-1.0, -1.0], requires_grad=True)
    engine = now.detach() - torch.tensor([2.0, 8.0]).log()
    config = LossSettings(correction=True, correction_cap=4.0)
    loss, sums, maxima = grpo_loss(now, None, engine, None, torch.ones(2), torch.ones(2), config)
    loss.backward()
    torch.testing.assert_close(now.grad, torch.tensor([-2.0, -4.0]))
    metrics = step_metrics(TokenStats(*parts(sums, maxima)))
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(8.0, rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(2.0, rel=1e-5)
    assert metrics["sampling/capped_ratio"] == 0.5
    assert metrics["sampling/effective_sample_size"] == pytest.approx(36 / (2 * 20))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(math.log(16) / 2)


def test_masked_tokens_leave_the_loss():
    now = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine = now.detach() - torch.tensor([1.0, 9.0, 0.1]).log()
    config = LossSettings(correction=True, correction_mask=(0.5, 5.0))
    loss, sums, maxima = grpo_loss(now, None, engine, None, torch.ones(3), torch.ones(3), config)
    loss.backward()
    assert now.grad.tolist() == [-1.0, 0.0, 0.0]
    assert step_metrics(TokenStats(*parts(sums, maxima)))["sampling/masked_ratio"] == pytest.approx(2 / 3)


def test_tokens_without_engine_log_probabilities_have_factor_one():
    now = torch.tensor([-1.0, -1.0], requires_grad=True)
    engine = torch.tensor([float("nan"), -3.0])
    loss, sums, maxima = grpo_loss(now, None, engine, None, torch.ones(2), torch.ones(2), LossSettings(correction=True))
    loss.backward()
    assert now.grad.tolist() == [-1.0, -2.0]
    metrics = step_metrics(TokenStats(*parts(sums, maxima)))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(2.0)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(2), rel=1e-5)


def test_far_apart_log_probabilities_stay_finite():
    now = torch.tensor([-1.0, -800.0], requires_grad=True)
    loss, sums, _ = grpo_loss(
        now, torch.tensor([-900.0, -1.0]), torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, 0.0]),
        torch.tensor([-1.0, 1.0]), torch.ones(2), LossSettings(correction=True, kl_coefficient=0.1),
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(now.grad).all()
    assert all(torch.isfinite(value) for value in sums.values())


def test_parts_of_a_batch_add_up_to_the_whole():
    torch.manual_seed(0)
    now, old, engine, reference, advantage = torch.randn(5, 30)
    weight, config = torch.rand(30), LossSettings(correction=True, kl_coefficient=0.1)
    args = (now, old, engine, reference, advantage, weight)
    whole = step_metrics(TokenStats(*parts(*grpo_loss(*args, config)[1:])))
    total = TokenStats()
    for rows in (slice(0, 4), slice(4, 19), slice(19, 19), slice(19, 30)):
        total.add(TokenStats(*parts(*grpo_loss(*(x[rows] for x in args), config)[1:])))
    pieces = step_metrics(total)
    assert pieces.keys() == whole.keys()
    per_batch = {"clip_ratio/low_min", "clip_ratio/high_max"}  # of micro-batches, by definition
    for name in whole.keys() - per_batch:
        assert pieces[name] == pytest.approx(whole[name], rel=1e-5), name


@law(50)
@given(
    st.lists(numbers, min_size=2, max_size=9),
    st.floats(0.05, 1.0),
    st.integers(1, 9),
    st.floats(0.0, 0.9),
    st.integers(0, 10**6),
)
def test_what_is_sampled_from_a_cut_distribution_teaches_the_policy_itself(scores, top_p, top_k, min_p, seed):
    """Expected over the cut distribution q, the gradient is that of sum_v pi(v) A(v) over the tokens v that the cut leaves:
    the correction pi / q is their probability together, whatever was cut."""
    logits = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    rows = (torch.tensor([[value]]) for value in (top_p, top_k, min_p))
    engine = torch.log_softmax(restrict(logits.detach()[None], *rows), -1)[0]
    kept = torch.isfinite(engine)
    advantages = torch.randn(len(scores), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_probs = torch.log_softmax(logits, -1)
    loss = GrpoLoss(
        None,
        engine[kept],
        None,
        advantages[kept],
        engine[kept].exp(),
        LossSettings(correction=True, correction_cap=2.0),
    )
    (found,) = torch.autograd.grad(loss.token_losses(log_probs[kept]).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(log_probs.exp() * advantages)[kept].sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
