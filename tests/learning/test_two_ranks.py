"""Two DeepSpeed ranks on gloo: the update equals that of one big batch, whatever a rank holds."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from pods_cluster.learning.trainer import Trainer
from tests.learning.support import OneBigBatch, config_for, make_step, true_log_probs
from tests.learning.test_trainer import assert_same_parameters
from tests.learning.two_ranks import RATES, SCENARIOS


@pytest.fixture
def pair(two):
    """What each of the two ranks found, by scenario."""
    return [found["two_ranks"] for found in two.found]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_update_equals_one_big_batch(pair, model_folder, scenario):
    learner, kept = SCENARIOS[scenario]
    config = config_for(model_folder, workers=2, **learner)
    truth = OneBigBatch(config, AutoModelForCausalLM.from_pretrained(model_folder))
    tokens = []
    for seed, rate in enumerate(RATES):
        selections, rollouts = make_step(seed, kept)
        truth.step(selections, rollouts, rate)
        tokens.append(sum(rollout.total_tokens for rollout in rollouts.values()))
    first, second = (ranks[scenario] for ranks in pair)
    assert_same_parameters(first["weights"], truth.parameters())
    assert first["norms"] == second["norms"] == pytest.approx(truth.norms, rel=1e-4)
    assert [a + b for a, b in zip(first["tokens"], second["tokens"], strict=True)] == tokens
    assert first["microbatches"] == second["microbatches"]
    updates = config.learner.updates_per_batch
    losses = [sum(truth.losses[i : i + updates]) for i in range(0, len(truth.losses), updates)]
    found = [a["loss"] + b["loss"] for a, b in zip(first["sums"], second["sums"], strict=True)]
    assert found == pytest.approx(losses, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("scenario", ["zero1", "zero3"])
def test_both_ranks_hold_the_same_policy(pair, model_folder, scenario):
    first, second = (ranks[scenario] for ranks in pair)
    assert first["score"] == second["score"]
    assert second["weights"] == {}  # rank 0 alone is handed the gathered tensors
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.load_state_dict(first["weights"], strict=False)
    model.tie_weights()
    _, rollouts = make_step(0)
    rollout = next(iter(rollouts.values()))
    rollout.prompt_ids, rollout.token_ids = (4, 5, 6), [7, 8, 9]
    expected = true_log_probs(model, rollout, 0.8)
    torch.testing.assert_close(torch.tensor(first["score"][0]), expected, rtol=1e-4, atol=1e-4)


def test_shapes_are_whole_under_zero_3(pair):
    assert pair[1]["zero3"]["shapes"] == pair[0]["zero1"]["shapes"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_bytes_fall_with_the_world_size(pair, one_rank, model_folder, stage):
    alone = Trainer(config_for(model_folder, zero_stage=stage), 0, 1)
    from pods_cluster.learning.step_plan import plan_settings, plan_step

    selections, rollouts = make_step(0)
    alone.train(plan_step(selections, plan_settings(alone.config, packed=alone.packed)).ranks[0], rollouts, 1e-3)
    whole = alone.engine.optimizer_bytes()
    assert whole >= 3 * 4 * alone.trainable  # two moments and the weights, float32
    for rank in pair:
        assert rank[f"zero{stage}"]["optimizer_bytes"] == pytest.approx(whole / 2, rel=0.02)
