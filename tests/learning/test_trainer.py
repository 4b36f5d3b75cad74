"""One rank, real DeepSpeed: the update equals that of one big batch in plain torch."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pods_cluster.learning.forward import Policy
from pods_cluster.learning.policy_model import ModelError, load_model, parameter_groups
from pods_cluster.learning.step_plan import plan_settings, plan_step
from pods_cluster.learning.token_batch import pack
from pods_cluster.learning.trainer import Trainer, correction_is_on
from tests.learning.support import OneBigBatch, config_for, make_step, true_log_probs

RATES = [1e-2, 3e-3]
REFERENCE = {"kernels": "plain", "packing": "off"}


def run(config, steps=RATES, **made):
    """Train one rank; its parameters by name and the results."""
    trainer = Trainer(config, 0, 1)
    results = []
    for seed, rate in enumerate(steps):
        selections, rollouts = make_step(seed, **made)
        plan = plan_step(selections, plan_settings(config, packed=trainer.packed))
        results.append(trainer.train(plan.ranks[0], rollouts, rate))
    return trainer, results


def weights_of(trainer):
    specs = trainer.model_weights.specs()
    return {
        spec.name: tensor.clone()
        for spec, tensor in zip(specs, trainer.model_weights.gather(0, len(specs)), strict=True)
    }


def big_batch(config, model_folder, steps=RATES, correct=False, **made):
    truth = OneBigBatch(config, AutoModelForCausalLM.from_pretrained(model_folder))
    for seed, rate in enumerate(steps):
        selections, rollouts = make_step(seed, **made)
        truth.step(selections, rollouts, rate, correct)
    return truth


def assert_same_parameters(found, expected, atol=5e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "learner",
    [
        {"zero_stage": 1, "tokens_per_microbatch": 40},
        {"zero_stage": 2, "tokens_per_microbatch": 4096, "loss": "token_mean"},
        {"zero_stage": 3, "tokens_per_microbatch": 64, "loss": "dr_grpo"},
        {"zero_stage": 2, "updates_per_batch": 2, "kl": {"coefficient": 0.1}, "gradient_checkpointing": True},
        {"zero_stage": 3, "correction": {"mode": "on", "cap": 1.5}, "max_grad_norm": 0.0},
        {"zero_stage": 1, "tokens_per_microbatch": 40, "packing": "off"},
        {"zero_stage": 2, "tokens_per_microbatch": 64, "correction": {"mode": "on"}, "kernels": "plain"},
        {"zero_stage": 3, "tokens_per_microbatch": 64, **REFERENCE},
        {"zero_stage": 2, "updates_per_batch": 2, "kl": {"coefficient": 0.1}, **REFERENCE},
        {"zero_stage": 1, "updates_per_batch": 2, "importance": "sequence", "clip_low": 0.005, "clip_high": 0.005},
        {"zero_stage": 1, "updates_per_batch": 2, "objective": "cispo", "clip_high": 0.01},
        {"zero_stage": 1, "entropy_coefficient": 0.5, "loss": "token_mean"},
    ],
    ids=[
        "zero1",
        "zero2-token-mean",
        "zero3-dr-grpo",
        "two-updates-kl",
        "zero3-correction",
        "padded",
        "loss-apart",
        "reference-zero3",
        "reference-two-updates-kl",
        "gspo",
        "cispo",
        "entropy",
    ],
)
def test_update_equals_one_big_batch(one_rank, model_folder, learner):
    config = config_for(model_folder, **learner)
    trainer, results = run(config)
    truth = big_batch(config, model_folder, correct=correction_is_on(config))
    assert trainer.chunked_head
    assert trainer.packed == (config.learner.packing != "off")
    learner = config.learner
    apart = learner.kernels == "plain" or learner.importance == "sequence" or learner.entropy_coefficient > 0
    assert trainer.engine.policy.fused_loss == (not apart)
    assert_same_parameters(weights_of(trainer), truth.parameters())
    norms = [norm for result in results for norm in result.grad_norms]
    assert norms == pytest.approx(truth.norms, rel=1e-3)
    losses = [result.stats.sums["loss"] for result in results]
    updates = config.learner.updates_per_batch
    expected = [sum(truth.losses[i : i + updates]) for i in range(0, len(truth.losses), updates)]
    assert losses == pytest.approx(expected, abs=1e-4)
    assert all(result.largest_microbatch <= config.learner.tokens_per_microbatch for result in results)


@pytest.mark.parametrize(
    "learner",
    [
        {"correction": {"mode": "on", "cap": 1.5}},
        {"correction": {"mode": "on", "cap": 1.5}, "loss": "token_mean", "packing": "off"},
        {"updates_per_batch": 2, "kl": {"coefficient": 0.1}, **REFERENCE},
        {"kernels": "plain", "entropy_coefficient": 0.5, "loss": "dr_grpo"},
        {"updates_per_batch": 2, "importance": "sequence", "clip_low": 0.005, "clip_high": 0.005},
    ],
    ids=["packed-fused", "padded-fused", "padded-plain-two-updates-kl", "packed-plain-entropy", "gspo"],
)
def test_tokens_of_environments_are_read_and_not_trained(one_rank, model_folder, learner):
    config = config_for(model_folder, zero_stage=1, tokens_per_microbatch=64, **learner)
    trainer, results = run(config, environment=True)
    truth = big_batch(config, model_folder, correct=correction_is_on(config), environment=True)
    assert trainer.packed == (config.learner.packing != "off")
    assert_same_parameters(weights_of(trainer), truth.parameters())
    assert [norm for result in results for norm in result.grad_norms] == pytest.approx(truth.norms, rel=1e-3)
    trained = sum(int(selection.lengths.sum()) for selection in make_step(0, environment=True)[0])
    assert results[0].stats.sums["tokens"] == trained
    assert results[0].stats.sums.get("mismatch_tokens", trained) == trained


@pytest.mark.parametrize("stage", [2, 3])
def test_lora_trains_and_sends_adapters_alone_and_exports_both_ways(one_rank, model_folder, tmp_path, stage):
    import peft

    from pods_cluster.learning.model_export import export

    config = config_for(model_folder, lora={"rank": 4, "alpha": 8}, kl={"coefficient": 0.1}, zero_stage=stage)
    trainer, results = run(config)
    base = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    merged = weights_of(trainer)
    assert merged.keys() == base.keys()
    adapted = {name for name in base if "_proj.weight" in name}
    assert {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])} == adapted

    specs = trainer.sent_weights.specs()
    factors = trainer.sent_weights.gather(0, len(specs))
    sent = {(spec.factor.weight, spec.factor.side): tensor for spec, tensor in zip(specs, factors, strict=True)}
    assert all(tuple(t.shape) == spec.shape for spec, t in zip(specs, factors, strict=True))
    assert {weight for weight, _ in sent} == adapted
    for weight in adapted:
        expected = base[weight] + 2.0 * sent[weight, "B"] @ sent[weight, "A"]  # alpha / rank
        torch.testing.assert_close(merged[weight], expected.detach())
    assert sum(spec.nbytes for spec in specs) == sum(4 * 4 * sum(base[name].shape) for name in adapted)
    whole = config_for(model_folder, lora={"rank": 4, "alpha": 8, "send": "merged"}, zero_stage=stage)
    assert (config.sends_adapter, whole.sends_adapter) == (True, False)
    assert trainer.trainable < trainer.parameters / 4
    assert results[0].stats.sums["kl"] == pytest.approx(0.0, abs=1e-4)  # adapters start at nothing …
    assert results[1].stats.sums["kl"] > 1e-3  # … and the reference is the base model

    export(trainer, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    adapter = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "export" / "adapter"
    )
    _, rollouts = make_step(5)
    held = list(rollouts.values())[:5]
    scores = trainer.score([(r.prompt_ids, r.token_ids) for r in held], 0.8)
    for loaded in (exported, adapter):
        for rollout, score in zip(held, scores, strict=True):
            torch.testing.assert_close(torch.tensor(score), true_log_probs(loaded, rollout, 0.8), rtol=1e-4, atol=1e-4)


def test_dropout_on_adapters_stays_out_of_whatever_is_compared(one_rank, model_folder):
    """Scores, the correction and the mismatch are those of the policy; the training passes have the dropout."""
    correction = {"mode": "on", "cap": 1e6}
    settings = {"correction": correction, "kl": {"coefficient": 0.1}}
    dropping = config_for(model_folder, lora={"rank": 4, "alpha": 64, "dropout": 0.4}, **settings)
    trainer, _ = run(dropping)
    assert len(trainer.engine.dropouts) == 14  # seven projections in each of two layers
    _, rollouts = make_step(5)
    pairs = [(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts.values()]
    first = trainer.score(pairs, 0.8)
    assert trainer.score(pairs, 0.8) == first
    for rollout, scores in zip(rollouts.values(), first, strict=True):
        rollout.logprobs = scores  # an engine without any mismatch
    selections, _ = make_step(5)
    plan = plan_step(selections, plan_settings(dropping, packed=trainer.packed))
    before = weights_of(trainer)
    result = trainer.train(plan.ranks[0], rollouts, 1e-2)
    assert result.stats.maxima["mismatch_max"] < 1e-4
    assert result.stats.sums["ratio"] == pytest.approx(result.stats.sums["tokens"])
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(trainer).items())
    # the same step without dropout has another gradient
    plain, _ = run(config_for(model_folder, lora={"rank": 4, "alpha": 64}, **settings))
    assert not plain.engine.dropouts
    differences = [(weights_of(plain)[name] - tensor).abs().max().item() for name, tensor in before.items()]
    assert max(differences) > 1e-3


def test_a_bfloat16_model_is_merged_in_float32_and_then_cast(one_rank, model_folder, tmp_path):
    from pods_cluster.learning.model_export import export

    config = config_for(model_folder, lora={"rank": 4, "alpha": 8}, top={"model": {"dtype": "bfloat16"}})
    trainer, _ = run(config)
    export(trainer, tmp_path / "export")
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    base = dict(load_model(config.model).named_parameters())
    specs = trainer.sent_weights.specs()
    factors = {
        (spec.factor.weight, spec.factor.side): tensor.float()
        for spec, tensor in zip(specs, trainer.sent_weights.gather(0, len(specs)), strict=True)
    }
    for weight in {weight for weight, _ in factors}:
        total = base[weight].detach().float() + 2.0 * factors[weight, "B"] @ factors[weight, "A"]
        assert exported[weight].dtype == torch.bfloat16
        rounded = (exported[weight].float() - total).abs() <= total.abs() * 2**-8  # half a bfloat16 step, and the sum's
        assert rounded.all(), weight
        assert not torch.equal(exported[weight], base[weight])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_keeps_float32_masters_and_gradient_sums(one_rank, model_folder, stage):
    """The gradient is the float32 sum of the micro-batches' bfloat16 gradients (summed in bfloat16 it is 1e-3 off)."""
    selections, rollouts = make_step(0, (3, 3), longest=10)
    config = config_for(
        model_folder,
        zero_stage=stage,
        tokens_per_microbatch=28,
        correction={"mode": "off"},
        top={"model": {"dtype": "bfloat16"}},
    )
    trainer = Trainer(config, 0, 1)
    plan = plan_step(selections, plan_settings(config, packed=trainer.packed)).ranks[0]
    result = trainer.train(plan, rollouts, 1e-6)

    policy = Policy(load_model(config.model), fused_loss=True)
    policy.enable_chunked_head()
    assert policy.enable_packing() is None
    total = {name: torch.zeros(p.shape) for name, p in policy.named_parameters()}
    for microbatch in plan.updates[0]:
        held = [rollouts[s.locator] for s in microbatch.sequences]
        batch = pack([(r.prompt_ids, r.token_ids) for r in held])
        values = torch.tensor([s.advantage * s.token_weight for s in microbatch.sequences])[batch.rows]

        def token_loss(log_probs, tokens, values=values):
            return -values[tokens] * (log_probs - log_probs.detach()).exp()

        policy(batch, 0.8, token_loss)[2].backward()
        for name, parameter in policy.named_parameters():
            total[name] += parameter.grad.float()
            parameter.grad = None
    assert result.microbatches >= 3
    norm = torch.stack([gradient.square().sum() for gradient in total.values()]).sum().sqrt()
    assert result.grad_norms[0] == pytest.approx(norm.item(), rel=2e-5)
    optimizer = trainer.engine.engine.optimizer.optimizer
    assert all(p.dtype == torch.float32 for group in optimizer.param_groups for p in group["params"])
    assert trainer.engine.optimizer_bytes() >= 3 * 4 * trainer.trainable


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bfloat16_step_whose_gradient_is_not_finite_is_skipped(one_rank, model_folder, stage):
    config = config_for(model_folder, zero_stage=stage, top={"model": {"dtype": "bfloat16"}})
    trainer = Trainer(config, 0, 1)
    before = weights_of(trainer)
    selections, rollouts = make_step(0)
    plan = plan_step(selections, plan_settings(config, packed=trainer.packed)).ranks[0]
    broken = replace(plan.updates[0][0].sequences[0], advantage=float("inf"))
    first = replace(plan.updates[0][0], sequences=(broken, *plan.updates[0][0].sequences[1:]))
    result = trainer.train(replace(plan, updates=((first, *plan.updates[0][1:]),)), rollouts, 1e-2)
    assert result.grad_norms == []
    assert [(skip.update, first.sequences[0].locator.group in skip.groups) for skip in result.skipped] == [(0, True)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer).items())
    trainer.train(plan, rollouts, 1e-2)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer).items())


def test_score_is_batched_by_the_budget_and_keeps_the_order(one_rank, model_folder):
    config = config_for(model_folder, tokens_per_microbatch=30)
    trainer = Trainer(config, 0, 1)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    _, rollouts = make_step(7)
    scores = trainer.score([(r.prompt_ids, r.token_ids) for r in rollouts.values()], 1.3)
    for rollout, score in zip(rollouts.values(), scores, strict=True):
        torch.testing.assert_close(torch.tensor(score), true_log_probs(model, rollout, 1.3), rtol=1e-4, atol=1e-4)


def test_a_rollout_that_is_not_what_was_reported_is_refused_before_training(one_rank, model_folder):
    config = config_for(model_folder)
    trainer = Trainer(config, 0, 1)
    selections, rollouts = make_step(0)
    plan = plan_step(selections, plan_settings(config))
    next(iter(rollouts.values())).token_ids.append(5)
    with pytest.raises(ValueError, match="its worker reported"):
        trainer.train(plan.ranks[0], rollouts, 1e-3)


def test_vectors_do_not_decay(model_folder):
    model = load_model(config_for(model_folder).model)
    decay, spared = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("norm" in names[id(p)] or "bias" in names[id(p)] for p in spared["params"])
    assert len(decay["params"]) + len(spared["params"]) == len(names)


def test_errors_name_the_field(model_folder, tmp_path):
    with pytest.raises(ModelError, match=r"model\.path: .*nothing-here"):
        load_model(config_for(tmp_path / "nothing-here").model)
    from pods_cluster.learning.policy_model import prepare_for_training

    config = config_for(model_folder, lora={"target_modules": ["no_such_layer"]})
    with pytest.raises(ModelError, match=r"learner\.lora\.target_modules"):
        prepare_for_training(load_model(config.model), config.learner)
    for tied in ("embed_tokens", "lm_head"):
        config = config_for(model_folder, lora={"target_modules": ["q_proj", tied]})
        with pytest.raises(ModelError, match=rf"{tied} shares its weight with another layer"):
            prepare_for_training(load_model(config.model), config.learner)


def test_correction_is_on_where_numerics_or_versions_can_differ(model_folder):
    assert not correction_is_on(config_for(model_folder))
    assert correction_is_on(config_for(model_folder, top={"staleness": 1}))
    assert correction_is_on(config_for(model_folder, top={"model": {"dtype": "bfloat16"}}))
    assert correction_is_on(config_for(model_folder, top={"generator": {"engine": "vllm"}}))
    assert not correction_is_on(config_for(model_folder, correction={"mode": "off"}, top={"staleness": 1}))
