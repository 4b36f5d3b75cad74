"""The gradient of each way to choose m of n: signal, noise, and direction, at fixed weights.

    python -m benchmarks.gradient_noise --model .cache/hard-addition/model --train .cache/hard-addition/data/train.jsonl

The same batches of 16 prompts x 64 rollouts are given to every arm; each takes its rollouts, its advantages and the loss of the
learner, and its gradient is compared over batches. With g the gradient of a batch and G its expectation:

- signal |G|^2, without bias from the products of different batches' gradients; noise E|g - G|^2;
- `snr` = signal / noise, and `batches` = noise / signal: how many batches' mean has as much signal as noise (the noise
  scale of McCandlish et al., arXiv 1812.06162, in batches);
- `cosine`: between the expectations of this arm and of all n rollouts (grpo-ga), also from products of different batches;
- `progress`: what a step of the same length in the arm's direction gains of the true one: cosine x sqrt(signal / E|g|^2).

Intervals are a percentile bootstrap over batches (95 %). Writes `benchmarks/results/gradient_noise.json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from pods_cluster.config import Config, load_config
from pods_cluster.data import load_prompts
from pods_cluster.data import load_tokenizer as load_prompt_tokenizer
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.generation.engines.builtin.hf_model import end_token_ids
from pods_cluster.learning.advantage import Scope
from pods_cluster.learning.forward import Policy
from pods_cluster.learning.loss import GrpoLoss
from pods_cluster.learning.loss_inputs import loss_inputs
from pods_cluster.learning.policy_model import load_model, load_tokenizer
from pods_cluster.learning.step_plan import plan_settings, plan_step
from pods_cluster.learning.trainer import loss_settings
from pods_cluster.scoring.builtin import exact_match
from pods_cluster.selection.select import select
from pods_cluster.types import GroupId, Locator, Prompt, Rollout, RolloutRequest, SamplingParams, Selection

ROOT = Path(__file__).parents[1]
COLUMNS = ("arm", "trained", "norm", "snr", "snr_low", "snr_high", "batches", "cosine", "cosine_low", "cosine_high",
           "progress", "progress_low", "progress_high", "groups_without_signal", "seconds")  # fmt: skip
GA = "grpo-ga"


@dataclass(frozen=True, slots=True)
class Arm:
    """Which rollouts of a group are trained: `m` by `rule` of the first `n`, advantages over the kept or the group."""

    n: int
    m: int
    rule: str = "max_variance"
    scope: Scope = "kept"


ARMS = {
    GA: Arm(64, 64),
    "grpo": Arm(8, 8),
    "grpo-pods": Arm(64, 8),
    "grpo-pods, group advantages": Arm(64, 8, scope="group"),
    "random": Arm(64, 8, "random"),
    "max_reward": Arm(64, 8, "max_reward"),
    "balanced": Arm(64, 8, "balanced"),
    "cost_aware": Arm(64, 8, "cost_aware", "group"),
}


@dataclass(slots=True)
class Batch:
    """Rollouts of some prompts with their rewards, by group."""

    groups: dict[GroupId, list[Rollout]]
    rewards: dict[GroupId, Float64[np.ndarray, " n"]]


class Sampler:
    """Batches of one model, each of prompts of its own."""

    def __init__(self, config: Config, prompts: int, n: int) -> None:
        self.config, self.prompts, self.n = config, prompts, n
        self.tokenizer = load_tokenizer(config.model)
        self.stream = load_prompts(config, load_prompt_tokenizer(config.model))
        model = load_model(config.model).eval().requires_grad_(False)
        self.engine = TransformersEngine(model, end_token_ids(model, self.tokenizer), max_sequences=prompts * n)
        self.engine.version = 0

    def next(self) -> Batch:
        prompts = {GroupId(prompt.epoch, prompt.row): prompt for prompt in self.stream.next(self.prompts)}
        sampling = SamplingParams(1.0, self.config.generator.max_tokens, seed=self.config.run.seed)
        self.engine.submit(
            [RolloutRequest(group, index, prompt.token_ids, sampling) for group, prompt in prompts.items()
             for index in range(self.n)]
        )  # fmt: skip
        groups: dict[GroupId, list[Rollout]] = {group: [] for group in prompts}
        while self.engine.in_flight:
            for rollout in self.engine.step():
                groups[rollout.group].append(rollout)
        for rollouts in groups.values():
            rollouts.sort(key=lambda rollout: rollout.index)
        return Batch(groups, {group: self._rewards(prompts[group], rollouts) for group, rollouts in groups.items()})

    def _rewards(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Float64[np.ndarray, " n"]:
        texts = self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
        return np.array([exact_match(text, prompt.answer) for text in texts], np.float64)


def selections(batch: Batch, arm: Arm, seed: int) -> list[Selection]:
    """What the arm trains of a batch: groups without a signal are left out, as with `selector.no_signal: drop`."""
    found = []
    for group, rollouts in batch.groups.items():
        rewards = batch.rewards[group][: arm.n]
        lengths = np.array([len(rollout.token_ids) for rollout in rollouts[: arm.n]], np.int32)
        outcome = select(
            rewards, arm.m, arm.rule, seed, group, no_signal_scope=arm.scope, lengths=lengths,
            truncated=np.zeros(len(lengths), bool), prompt_tokens=len(rollouts[0].prompt_ids),
        )  # fmt: skip
        if outcome.fate is not None:
            continue
        kept = np.sort(outcome.kept)
        weights = None if outcome.weights is None else outcome.weights[np.argsort(outcome.kept)]
        found.append(
            Selection(
                group=group,
                locators=[Locator("benchmark", group, int(index)) for index in kept],
                rewards=rewards[kept],
                lengths=lengths[kept],
                prompt_tokens=len(rollouts[0].prompt_ids),
                first_versions=np.zeros(len(kept), np.int32),
                group_mean=outcome.group_mean,
                group_std=outcome.group_std,
                group_valid=outcome.n_valid,
                weights=weights,
            )
        )
    return found


class Gradients:
    """Gradients of the learner's loss under fixed weights."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy = Policy(load_model(config.model))
        self.policy.enable_chunked_head()

    def of(self, chosen: Sequence[Selection], batch: Batch, scope: Scope) -> Tensor:
        """The gradient of one update on these groups, shape (parameters,)."""
        rollouts: Mapping[Locator, Rollout] = {
            locator: batch.groups[selection.group][locator.index]
            for selection in chosen
            for locator in selection.locators
        }
        advantage = self.config.learner.advantage.model_copy(update={"scope": scope})
        learner = self.config.learner.model_copy(update={"advantage": advantage})
        plan = plan_step(chosen, plan_settings(self.config.model_copy(update={"learner": learner}), 1))
        self.policy.zero_grad()
        if not chosen:  # no group had a signal: nothing is learned from this batch
            return torch.zeros(sum(p.numel() for p in self.policy.parameters()))
        for update in plan.ranks[0].updates:
            for microbatch in update:
                inputs = loss_inputs(microbatch, rollouts)
                loss = GrpoLoss(
                    None, inputs.engine_log_probs, None, inputs.advantages, inputs.token_weights,
                    loss_settings(self.config), None, inputs.batch.rows,
                )  # fmt: skip
                _, _, total = self.policy(inputs.batch, 1.0, loss.token_losses)
                total.backward()
        return torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])


def statistics(own: Float64[np.ndarray, "b b"], cross: Float64[np.ndarray, "b b"], ga: Float64[np.ndarray, "b b"],
               drawn: np.ndarray) -> dict[str, float]:  # fmt: skip
    """Signal and noise from the products of the batches' gradients: with each other, with grpo-ga's, and of those.

    Products of a batch with itself, also drawn twice, hold its noise and are left out of the means that stand for |G|^2.
    """
    apart = drawn[:, None] != drawn[None, :]
    squares = own[drawn, drawn].mean()
    signal, along, true = (m[np.ix_(drawn, drawn)][apart].mean() for m in (own, cross, ga))
    noise = squares - signal
    length = np.sqrt(true) if true > 0 else np.nan  # so few batches that not even all rollouts show a direction
    return {
        "snr": signal / noise,
        "batches": noise / signal if signal > 0 else np.inf,
        "cosine": along / (np.sqrt(signal) * length) if signal > 0 else np.nan,
        "progress": along / (np.sqrt(squares) * length),
    }


def measure(config: Config, batches: int, prompts: int, arms: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """A row for each arm."""
    sampler, gradients = Sampler(config, prompts, max(arm.n for arm in arms.values())), Gradients(config)
    held = [sampler.next() for _ in range(batches)]
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, batches, batches) for _ in range(500)]
    rows: list[dict[str, Any]] = []
    baseline: Tensor | None = None
    for name, arm in arms.items():
        started, found, trained, without = time.perf_counter(), [], 0, 0
        for batch in held:
            chosen = selections(batch, arm, config.run.seed)
            trained += sum(len(selection) for selection in chosen)
            without += len(batch.groups) - len(chosen)
            found.append(gradients.of(chosen, batch, arm.scope))
        seconds = time.perf_counter() - started
        stacked = torch.stack(found)
        baseline = stacked if baseline is None else baseline
        own, cross, ga = (
            (a @ b.T).double().numpy() for a, b in ((stacked, stacked), (stacked, baseline), (baseline, baseline))
        )
        value = statistics(own, cross, ga, np.arange(batches))
        sampled = [statistics(own, cross, ga, drawn) for drawn in draws]
        row: dict[str, Any] = {"arm": name, "trained": trained / batches, "norm": float(np.sqrt(own.diagonal()).mean())}
        row |= {key: float(found) for key, found in value.items()}
        for key in ("snr", "cosine", "progress"):
            low, high = np.nanpercentile([each[key] for each in sampled], [2.5, 97.5])
            row |= {f"{key}_low": float(low), f"{key}_high": float(high)}
        row |= {"groups_without_signal": without / (batches * prompts), "seconds": seconds / batches}
        rows.append({key: row[key] if isinstance(row[key], str) else float(f"{row[key]:.4g}") for key in COLUMNS})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", default=[str(ROOT / ".cache/hard-addition/model")], help="one or more models"
    )
    parser.add_argument("--about", nargs="+", help="what each model is; left out: its path")
    parser.add_argument("--train", default=str(ROOT / ".cache/hard-addition/data/train.jsonl"), help="rows to train on")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gradient_noise.json")
    arguments = parser.parse_args()
    if arguments.batches < 2:
        parser.error("--batches: the noise needs two or more")
    torch.set_num_threads(arguments.threads)
    began, models = machine(), []
    for model, about in zip(arguments.model, arguments.about or arguments.model, strict=True):
        config = load_config(
            ROOT / "configs" / "hard-addition.yaml",
            [f"model.path={model}", f"data.path={arguments.train}", "data.eval=null", "run.eval.every=0"],
        )
        print(model, flush=True)
        rows = measure(config, arguments.batches, arguments.prompts, ARMS)
        models.append({"about": about, "arms": table(rows, COLUMNS)})
        result = {"benchmark": "gradient_noise", "machine": began, "batches": arguments.batches}
        write_result(arguments.out, {**result, "prompts": arguments.prompts, "models": models})


if __name__ == "__main__":
    main()
