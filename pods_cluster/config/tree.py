"""The whole configuration, and the rules between its sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from pods_cluster.config.base import Section, problems_of, refuse
from pods_cluster.config.builtin_options import wrong_options
from pods_cluster.config.environment import EnvironmentConfig
from pods_cluster.config.learner import LearnerConfig
from pods_cluster.config.model_data import DataConfig, ModelConfig
from pods_cluster.config.pools import GeneratorConfig, SelectorConfig, WeightsConfig
from pods_cluster.config.reward import RewardConfig, ScoringConfig, check_sum
from pods_cluster.config.run_settings import ClusterConfig, RunConfig
from pods_cluster.config.vllm_options import split_options


class Config(Section):
    """A run's YAML file."""

    model: ModelConfig
    data: DataConfig
    reward: list[RewardConfig] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()
    environment: EnvironmentConfig | None = None
    generator: GeneratorConfig = GeneratorConfig()
    selector: SelectorConfig = SelectorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    staleness: int = Field(default=0, ge=0)
    """k: a rollout is trained on at learner version V only if V - (oldest version of its tokens) <= k; 0 is on-policy."""
    run: RunConfig
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _no_evaluation_without_rows(cls, tree: Any) -> Any:
        """Resolve `run.eval.every` to 0 in runs without held-out rows, for which its default is not meant."""
        if (
            not isinstance(tree, dict)
            or not isinstance(tree.get("run"), dict)
            or not isinstance(tree.get("data"), dict)
        ):
            return tree
        evaluation = tree["run"].get("eval", {})
        if tree["data"].get("eval") is not None or not isinstance(evaluation, dict) or "every" in evaluation:
            return tree
        return tree | {"run": tree["run"] | {"eval": evaluation | {"every": 0}}}

    @model_validator(mode="before")
    @classmethod
    def _environments_give_rewards(cls, tree: Any) -> Any:
        """The reward of a run with an environment is what that gives, where no reward is named."""
        if isinstance(tree, dict) and tree.get("environment") is not None and "reward" not in tree:
            return tree | {"reward": [{"name": "environment"}]}
        return tree

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        refuse(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[str]:
        """Every rule between sections that this configuration breaks, in a sentence each."""
        yield from problems_of(lambda: check_sum(self.reward))
        yield from self._impossible_turns()
        n, m = self.generator.rollouts_per_prompt, self.selector.keep
        if m > n:
            yield (
                f"selector.keep: {m} rollouts cannot be kept of generator.rollouts_per_prompt: {n}; "
                f"lower selector.keep or raise generator.rollouts_per_prompt"
            )
        if self.data.streaming and self.data.mix:
            yield (
                "data.mix: several datasets are mixed as one table, which data.streaming: true does not make; put their files "
                "into one folder, or set streaming: false"
            )
        if self.data.revisit_target is not None and self.data.revisit is None:
            yield (
                f"data.revisit_target: {self.data.revisit_target:g} adapts the chance that data.revisit begins with, and that is "
                f"not given; set data.revisit: 0.5, or leave revisit_target out"
            )
        longest = self.data.max_prompt_tokens + self.generator.max_tokens
        if self.learner.tokens_per_microbatch < longest:
            yield (
                f"learner.tokens_per_microbatch: {self.learner.tokens_per_microbatch} cannot hold one rollout of "
                f"data.max_prompt_tokens + generator.max_tokens = {longest} tokens; raise it to {longest} or more"
            )
        if self.learner.prompts_per_step * m < self.learner.workers * self.learner.updates_per_batch:
            yield (
                f"learner.prompts_per_step x selector.keep = {self.learner.prompts_per_step * m} rollouts a step "
                f"cannot be split over learner.workers x learner.updates_per_batch = "
                f"{self.learner.workers * self.learner.updates_per_batch}; raise prompts_per_step or lower the others"
            )
        if self.learner.updates_per_batch > self.learner.prompts_per_step:
            yield (
                f"learner.updates_per_batch: {self.learner.updates_per_batch} needs a group for each optimiser step, "
                f"but learner.prompts_per_step is {self.learner.prompts_per_step}; lower one or raise the other"
            )
        if self.run.epochs is None and self.learner.warmup_steps > self.run.steps:
            yield (
                f"learner.warmup_steps: {self.learner.warmup_steps} is more than run.steps: {self.run.steps}; "
                f"the learning rate would never reach its peak: lower it"
            )
        for name, wanted in (("every", self.run.eval.every), ("minutes", self.run.eval.minutes)):
            if wanted and self.data.eval is None and name in self.run.eval.model_fields_set:
                yield (
                    f"run.eval.{name}: {wanted:g} needs held-out rows; add data.eval (path or split), "
                    f"or set run.eval.{name}: 0"
                )
        if self.run.checkpoint.best is not None and not self.run.eval.on:
            yield (
                f"run.checkpoint.best: {self.run.checkpoint.best!r} is never measured without evaluations; add data.eval (path "
                f"or split) and run.eval.every, or leave it out"
            )
        if self.run.push_to_hub is not None and not self.run.export:
            yield f"run.push_to_hub: {self.run.push_to_hub!r} needs the final model; set run.export: true, or leave it out"
        if self.learner.kl.coefficient == 0 and self.learner.kl.reference is not None:
            yield (
                f"learner.kl.reference: {self.learner.kl.reference!r} is never read while learner.kl.coefficient is 0; "
                f"set a coefficient or leave the reference out"
            )
        if self.learner.packing == "on" and self.model.attention != "sdpa":
            yield (
                f"learner.packing: on brings its own attention, but model.attention is {self.model.attention}; "
                f"leave model.attention out, or set learner.packing: off"
            )
        lora = self.learner.lora
        if lora is not None and lora.dropout and self.learner.updates_per_batch > 1:
            yield (
                f"learner.lora.dropout: {lora.dropout} changes the log-probabilities of each pass, so the clipped ratio of "
                f"learner.updates_per_batch: {self.learner.updates_per_batch} would be one of noise; set dropout: 0 or "
                f"updates_per_batch: 1"
            )
        if lora is not None and lora.send == "adapter" and not self._engine_takes_adapters:
            yield (
                f"learner.lora.send: adapter is not possible with generator.engine: {self.generator.engine}"
                + (" and engine_options.transfer: native" if self.generator.engine == "vllm" else "")
                + "; use send: merged (or auto)"
            )
        if self.generator.engine == "vllm":
            options, temperature = self.generator.engine_options, self.generator.temperature
            yield from problems_of(lambda: split_options(options, temperature))
        if self.generator.engine == "transformers":
            yield from wrong_options(self.generator.engine_options)
        yield from self._impossible_cuts()
        yield from self._impossible_ranges()
        yield from self._impossible_settling()
        yield from self._impossible_cards()

    def _impossible_cuts(self) -> Iterator[str]:
        """Refuse cuts of the sampled distribution whose probabilities would not reach the learner."""
        generator = self.generator
        for name, value in generator.cuts.items():
            cut = f"generator.{name}: {value:g} cuts the distribution that rollouts are sampled from"
            if self.learner.correction.mode == "off":
                yield f"{cut}, which learner.correction.mode: off would take for the learner's own; use auto or leave it out"
            if generator.engine == "paced":
                yield f"{cut}, and the paced engine has none; leave it out"
            kept = generator.engine_options.get("logprobs", "engine")
            if generator.engine == "vllm" and kept != "engine":
                yield (
                    f"{cut}, and generator.engine_options.logprobs: {kept} does not keep its log-probabilities; use "
                    f"logprobs: engine or leave it out"
                )

    def _impossible_turns(self) -> Iterator[str]:
        environment = self.environment
        if environment is None:
            for index, reward in enumerate(self.reward):
                if reward.name == "environment":
                    yield (
                        f"reward.{index}.name: 'environment' is the reward of an environment, and there is none; add "
                        f"environment.name, or name another reward"
                    )
            return
        if ":" not in environment.name and environment.code is None:
            yield (
                f"environment.name: {environment.name!r} names no class; write file.py:Class or package.module:Class, as in "
                f"pods_cluster.environments:ToolEnvironment"
            )
        if environment.turn_tokens is not None and environment.turn_tokens > self.generator.max_tokens:
            yield (
                f"environment.turn_tokens: {environment.turn_tokens} is more than generator.max_tokens: "
                f"{self.generator.max_tokens}, which bounds all turns together; lower it, or leave it out"
            )

    def _impossible_cards(self) -> Iterator[str]:
        """Refuse divisions of cards that cannot work: NCCL refuses two processes on one card."""
        generator, learner, weights = self.generator, self.learner, self.weights
        part = learner.gpus_per_worker or 0.0
        if 0 < part <= 0.5 and learner.workers > 1:
            yield (
                f"learner.gpus_per_worker: {part:g} lets two of the {learner.workers} ranks lie on one card, where NCCL "
                f"refuses to connect them; use more than half a card (generators can have the rest), or learner.workers: 1"
            )
        for name, cards in (("generator", generator.cards), ("learner", part)):
            if cards > 1 and not cards.is_integer():
                yield (
                    f"{name}.gpus_per_worker: {cards:g} is neither a part of one card nor whole cards, as Ray gives them; "
                    f"use a number up to 1, or a whole one"
                )
        if generator.tensor_parallel > 1 and generator.cards != generator.tensor_parallel:
            yield (
                f"generator.gpus_per_worker: {generator.cards:g} is not the number of cards that tensor_parallel: "
                f"{generator.tensor_parallel} computes on; leave it out or set tensor_parallel: 1"
            )
        shared = generator.cards < 1 or 0 < part < 1
        if shared and generator.engine == "vllm" and generator.engine_options.get("transfer") == "native":
            yield (
                "generator.engine_options.transfer: 'native' cannot bring weights to processes that share a card "
                "(gpus_per_worker below 1), as NCCL refuses two on one; use transfer: pods, or whole cards"
            )
        if shared and weights.transport == "nccl" and weights.relay == "off":
            yield (
                "weights.relay: 'off' leaves NCCL no way to processes that share a card (gpus_per_worker below 1), as "
                "it refuses two on one; use relay: auto, or transport: gloo"
            )
        if weights.relay == "node" and weights.transport == "nccl":
            yield (
                "weights.relay: 'node' is for transport: gloo; with nccl each card gets its weights itself: use relay: "
                "auto, or transport: gloo"
            )

    def _impossible_ranges(self) -> Iterator[str]:
        bounds = self.generator.rollouts_range
        if bounds is None:
            return
        if bounds[0] < self.selector.keep:
            yield (
                f"generator.rollouts_range: {list(bounds)} begins below selector.keep: {self.selector.keep}; "
                f"raise it to {self.selector.keep} or more, or lower selector.keep"
            )
        if not self.staleness:
            yield (
                f"generator.rollouts_range: {list(bounds)} needs staleness: 1 or more: with staleness: 0 the pools take "
                f"turns, and no n keeps both busy; raise staleness or leave rollouts_range out"
            )

    def _impossible_settling(self) -> Iterator[str]:
        if self.selector.settle == "off":
            return
        # A rule of the user's own may state its condition: that is seen where it is imported, when the run starts.
        if self.selector.rule != "max_variance" and ":" not in self.selector.rule:
            yield (
                f"selector.settle: {self.selector.settle} needs a rule with a known settled condition, "
                f"which {self.selector.rule!r} does not state; use rule: max_variance or settle: off"
            )
        if self.learner.advantage.scope == "group":
            yield (
                f"selector.settle: {self.selector.settle} leaves rollouts unfinished, so learner.advantage.scope: "
                f"group has no whole group to average over; use scope: kept or settle: off"
            )
        if self.selector.budget == "step":
            yield (
                f"selector.settle: {self.selector.settle} stops a group that has m rollouts to keep, but selector.budget: step "
                f"says how many only when all groups are there; use budget: group or settle: off"
            )
        waves, n = self.selector.waves, self.generator.rollouts_per_prompt
        if self.selector.settle == "waves" and waves > n:
            yield (
                f"selector.waves: {waves} portions cannot be made of generator.rollouts_per_prompt: {n}; "
                f"lower selector.waves to {n} or less"
            )

    @property
    def _engine_takes_adapters(self) -> bool:
        generator = self.generator
        if generator.engine == "vllm":
            return generator.engine_options.get("transfer") != "native"
        return generator.engine == "transformers"

    @property
    def sends_adapter(self) -> bool:
        """Whether a weight version is sent as an adapter on `model.path` instead of the whole model."""
        lora = self.learner.lora
        return lora is not None and lora.send != "merged" and self._engine_takes_adapters

    @property
    def stages_weights(self) -> bool:
        """Whether generators may take new weights beside their engine's steps (`weights.staged`)."""
        shared = 0 < (self.learner.gpus_per_worker or 0) < 1  # what is free now is not when the learner computes
        return self.weights.staged is True or (self.weights.staged == "auto" and not shared)

    @property
    def copies_every(self) -> int:
        """Steps between light copies of the learner's state; 0: none, also where its state is not kept by parameters."""
        return self.run.checkpoint.copy_every if self.learner.resizable else 0

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts generated for one optimiser step, before replacements."""
        return self.learner.prompts_per_step * self.generator.rollouts_per_prompt

    @property
    def trained_per_step(self) -> int:
        """Rollouts trained in one optimiser step."""
        return self.learner.prompts_per_step * self.selector.keep
