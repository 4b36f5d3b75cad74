"""A tiny model, steps of random rollouts, and one big batch in plain torch to compare with."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pods_cluster.config import Config, build_config
from pods_cluster.types import FinishReason, GroupId, Locator, Rollout, Selection

VOCABULARY = 32
WORKER = "learning-test/generator/0"
Rollouts = dict[Locator, Rollout]


def save_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A random Qwen2 of about 70,000 parameters (head dimension 32), float32, with the quickstart's tokenizer."""
    from pods_cluster.quickstart.character_tokenizer import build_tokenizer

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # far from uniform, so that a wrong place or temperature shows
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def config_for(model: Path, **learner: Any) -> Config:
    """A run's configuration; `top` in `learner` overrides other sections."""
    top = learner.pop("top", {})
    tree: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 12},
        "reward": [{"name": "math_answer"}],
        "generator": {"engine": "transformers", "max_tokens": 16, "rollouts_per_prompt": 8, "temperature": 0.8},
        "selector": {"keep": 4},
        "learner": {
            "prompts_per_step": 4,
            "learning_rate": 1e-2,
            "tokens_per_microbatch": 64,
            "weight_decay": 0.1,
            # Adam divides by the gradient's own size: with the usual 1e-8 the rounding of a vanishing gradient decides
            # the sign of a full step, and no two orders of summation agree.
            "epsilon": 1e-3,
            "max_grad_norm": 0.5,
            "start_timeout": 300,
            "step_timeout": 120,
            "gpus_per_worker": 0,  # on CPUs, whatever the cluster offers
            **learner,
        },
        "run": {"name": "learning-test", "steps": 10},
    }
    for section, values in top.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return build_config(tree)


def make_step(
    seed: int = 0, kept: tuple[int, ...] = (4, 4, 3, 4), longest: int = 14, environment: bool = False
) -> tuple[list[Selection], Rollouts]:
    """Random groups: completions of 1 to `longest` tokens, random rewards and engine log-probabilities.

    With `environment` completions of several tokens have one or two stretches that an environment wrote.
    """
    rng = np.random.default_rng(seed)
    selections, rollouts = [], {}
    for row, count in enumerate(kept):
        group = GroupId(0, row)
        prompt = tuple(rng.integers(4, VOCABULARY, rng.integers(2, 10)).tolist())
        lengths = rng.integers(1, longest + 1, count)
        locators = [Locator(WORKER, group, 2 * index) for index in range(count)]
        rewards = rng.normal(size=count)
        for locator, length in zip(locators, lengths.tolist(), strict=True):
            rollouts[locator] = Rollout(
                group=group,
                index=locator.index,
                prompt_ids=prompt,
                token_ids=rng.integers(2, VOCABULARY, length).tolist(),
                logprobs=(-3.0 + rng.normal(size=length)).tolist(),
                finish_reason=FinishReason.STOP,
                first_version=0,
                last_version=0,
            )
        held = [rollouts[locator] for locator in locators]
        if environment:
            for rollout in held:
                _write_environment(rollout, rng)
        written = np.array([rollout.environment_tokens for rollout in held], np.int32)
        selections.append(
            Selection(
                group=group,
                locators=locators,
                rewards=rewards,
                lengths=lengths.astype(np.int32) - written,
                prompt_tokens=len(prompt),
                first_versions=np.zeros(count, np.int32),
                group_mean=float(rewards.mean()) + 0.1,
                group_std=1.3,
                group_valid=8,
                environment_tokens=written if written.any() else None,
            )
        )
    return selections, rollouts


def _write_environment(rollout: Rollout, rng: np.random.Generator) -> None:
    """Leave the first token to the model, and give parts of the rest to an environment; the last may be either's."""
    cuts = sorted(rng.choice(np.arange(1, len(rollout.token_ids) + 1), min(4, len(rollout.token_ids)), replace=False))
    rollout.environment = tuple((int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
    assert rollout.logprobs is not None
    for start, stop in rollout.environment:
        rollout.logprobs[start:stop] = [float("nan")] * (stop - start)


def true_log_probs(model: torch.nn.Module, rollout: Rollout, temperature: float) -> torch.Tensor:
    """[T] by the definition, one sequence alone, all logits at once."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
    logits = model(input_ids=ids).logits[0].float() / temperature
    start = len(rollout.prompt_ids)
    predicted = torch.log_softmax(logits[start - 1 : -1], dim=-1)
    return predicted.gather(-1, ids[0, start:, None]).squeeze(-1)


def entropies(model: torch.nn.Module, rollout: Rollout, temperature: float) -> torch.Tensor:
    """[T] by the definition."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
    logits = model(input_ids=ids).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits[len(rollout.prompt_ids) - 1 : -1], dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


class OneBigBatch:
    """The same training without DeepSpeed, ranks, micro-batches or padding: sequence by sequence from the formulas."""

    def __init__(self, config: Config, model: torch.nn.Module) -> None:
        self.config = config
        self.model = copy.deepcopy(model)
        self.reference = copy.deepcopy(model)
        learner = config.learner
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        spared = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": learner.weight_decay}, {"params": spared, "weight_decay": 0.0}],
            lr=learner.learning_rate,
            betas=learner.betas,
            eps=learner.epsilon,
        )
        self.norms: list[float] = []
        self.losses: list[float] = []

    def step(self, selections: list[Selection], rollouts: Rollouts, rate: float, correct: bool = False) -> None:
        learner, temperature = self.config.learner, self.config.generator.temperature
        with torch.no_grad():
            old = {
                key: true_log_probs(self.model, rollout, temperature)[torch.from_numpy(rollout.sampled())]
                for key, rollout in rollouts.items()
            }
        parts = learner.updates_per_batch
        bounds = [len(selections) * part // parts for part in range(parts + 1)]
        for start, stop in pairwise(bounds):
            update = selections[start:stop]
            loss = torch.zeros(())
            tokens = sum(int(selection.lengths.sum()) for selection in update)
            for selection in update:
                rewards = torch.tensor(selection.rewards)
                if learner.advantage.scope == "group":
                    values = (rewards - selection.group_mean) / (selection.group_std + 1e-4)
                else:
                    values = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                for locator, advantage in zip(selection.locators, values.float(), strict=True):
                    rollout = rollouts[locator]
                    sampled = torch.from_numpy(rollout.sampled())
                    now = true_log_probs(self.model, rollout, temperature)[sampled]
                    ratio = torch.exp(now - old[locator])
                    if learner.importance == "sequence":
                        ratio = torch.exp((now - old[locator]).mean()).expand(len(now))
                    terms = torch.minimum(
                        ratio * advantage,
                        ratio.clamp(1 - learner.clip_low, 1 + learner.clip_high) * advantage,
                    )
                    if learner.objective == "cispo":
                        terms = ratio.detach().clamp(max=1 + learner.clip_high) * advantage * now
                    if correct:
                        factor = torch.exp(old[locator] - torch.tensor(rollout.logprobs)[sampled])
                        terms = terms * factor.clamp(max=learner.correction.cap)
                    terms = -terms
                    if learner.kl.coefficient:
                        with torch.no_grad():
                            reference = true_log_probs(self.reference, rollout, temperature)[sampled]
                        terms = terms + learner.kl.coefficient * (torch.exp(reference - now) - (reference - now) - 1)
                    if learner.entropy_coefficient:
                        entropy = entropies(self.model, rollout, temperature)[sampled]
                        terms = terms - learner.entropy_coefficient * entropy
                    if learner.loss == "token_mean":
                        loss = loss + terms.sum() / tokens
                    elif learner.loss == "dr_grpo":
                        loss = loss + terms.sum() / self.config.generator.max_tokens / len(selection) / len(update)
                    else:
                        loss = loss + terms.mean() / len(selection) / len(update)
            self.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), learner.max_grad_norm or float("inf"))
            self.norms.append(float(norm))
            self.losses.append(float(loss.detach()))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
