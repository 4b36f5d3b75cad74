"""The `generator`, `selector` and `weights` sections: the pool that generates, and what connects it with the learner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pods_cluster.config.base import LONGEST_WAIT, MOST_WORKERS, Section, refuse
from pods_cluster.config.labels import Labels


class GeneratorConfig(Section):
    """The pool that makes rollouts."""

    engine: Literal["transformers", "vllm", "paced"] = "vllm"
    """`vllm` for GPUs (or its CPU build); `transformers` is the small built-in engine; `paced` sleeps instead of
    computing and is for tests of the service itself."""
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Generator workers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one engine (vLLM)."""
    rollouts_per_prompt: int = Field(default=64, ge=2)
    """n: rollouts generated for each prompt; `auto`: as many as keep both pools busy, within `rollouts_range`."""
    rollouts_range: tuple[int, int] | None = None
    """Lowest and highest n for `rollouts_per_prompt: auto`, which needs `staleness` above 0: n grows while complete
    groups queue up, and shrinks while the learner waits. It starts in the middle of the range, or at
    `rollouts_per_prompt` where that is a number."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature; the learner divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens that have this probability together. Below 1 (and with the two below) engine
    and learner have different distributions, so the importance correction is on: docs/algorithms.md."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from so many of the most probable tokens; -1: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this share of the most probable one's probability."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest completion, in tokens; longer ones are cut and finish with `length`."""
    stop_tokens: list[str | int] = Field(default_factory=list)
    """Tokens that end a completion beside the model's own end tokens (its generation_config.json may name several): the
    text of a token, as `</answer>` where the model has it as one, or its id. The token belongs to the completion."""
    stop_strings: list[str] = Field(default_factory=list)
    """Texts that end a completion, of any number of tokens. The tokens up to the one that completes such a text are
    trained, as they were sampled."""
    include_stop_str_in_output: bool = False
    """Whether the text that rewards get ends with the stop string (vLLM's option of this name), or before it."""
    max_sequences: int = Field(default=256, ge=1)
    """Rollouts in flight in one engine."""
    in_flight: int | Literal["auto"] = "auto"
    """With `staleness` above 0: rollouts that all engines together are to have, running or waiting to run. New groups are
    issued as places come free, within the bound of `staleness`; `auto`: `max_sequences` of each worker and an eighth more.
    With staleness 0 a step's groups are all issued at its start."""
    spread: bool = True
    """Divide the rollouts of a group among workers where that lets all workers finish together; false: one worker makes
    the whole group, and its engine reads the prompt once."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """Ray CPUs of one worker."""
    gpus_per_worker: float | None = Field(default=None, ge=0)
    """Ray GPUs of one worker (a fraction shares a card); left out: `tensor_parallel` for vLLM where the cluster has
    GPUs, else 0."""
    place: Labels = Field(default_factory=dict)
    """Labels of the Ray nodes that workers may run on, as in `{pool: cheap}` (`ray start --labels pool=cheap`; KubeRay:
    `labels` of a worker group). A value may be `!value`, `in(a, b)` or `!in(a, b)`. Empty: any node."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of one worker on a CPU; left out: `cpus_per_worker` rounded down, at least 1."""
    start_timeout: float = Field(default=600.0, gt=0, le=LONGEST_WAIT)
    """Seconds until a worker that has not started is reported with its cause."""
    request_timeout: float = Field(default=900.0, gt=0, le=LONGEST_WAIT)
    """Seconds without a finished rollout after which a busy worker counts as hung and is replaced."""
    max_failures: int = Field(default=5, ge=1)
    """Times in a row that generators may fail without one group finished in between; the run then ends with their cause.
    A prompt whose engine failed four times in a row is left out before that. Engines that raise one and the same error
    before any group was ever finished end it after three."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine under its own names (for vLLM: `gpu_memory_utilization`, `max_model_len`, …)."""

    def gpus(self, gpus_in_cluster: float) -> float:
        """Return the Ray GPUs of one worker: `gpus_per_worker`, else by the engine and whether the cluster has GPUs."""
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return float(self.tensor_parallel) if self.engine == "vllm" and gpus_in_cluster else 0.0

    def places_per_worker(self, workers: int) -> int:
        """Return how many rollouts each of so many workers is to have in its engine (see `in_flight`)."""
        if self.in_flight == "auto":
            return self.max_sequences + math.ceil(self.max_sequences / 8)
        return max(1, math.ceil(self.in_flight / max(1, workers)))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_tokens` as ids. Raises ValueError where texts have not been looked up (`data.resolved`)."""
        texts = [token for token in self.stop_tokens if isinstance(token, str)]
        if texts:
            raise ValueError(f"generator.stop_tokens: {texts} are not ids yet; a run looks them up when it is opened")
        return tuple(int(token) for token in self.stop_tokens)

    @property
    def cuts(self) -> dict[str, float]:
        """The settings among top_p, top_k and min_p that leave tokens out of the sampled distribution."""
        everything = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return {name: getattr(self, name) for name, value in everything.items() if getattr(self, name) != value}

    @property
    def cards(self) -> float:
        """GPUs of one worker on a cluster that has GPUs; below 1 the worker shares its card."""
        return self.gpus_per_worker or float(self.tensor_parallel)

    @model_validator(mode="before")
    @classmethod
    def _auto_starts_in_the_middle(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("rollouts_per_prompt") != "auto":
            return values
        bounds = values.get("rollouts_range")
        if not isinstance(bounds, (list, tuple)) or len(bounds) != 2 or not all(isinstance(b, int) for b in bounds):
            raise ValueError(
                f"rollouts_per_prompt: auto needs bounds, and rollouts_range is {bounds}; "
                f"set it to [fewest, most], as in [32, 128]"
            )
        return values | {"rollouts_per_prompt": round((max(bounds[0], 1) * max(bounds[1], 1)) ** 0.5)}

    @field_validator("in_flight")
    @classmethod
    def _something_is_in_flight(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} rollouts in flight make nothing; give 1 or more, or auto")
        return value

    @model_validator(mode="after")
    def _can_sample(self) -> GeneratorConfig:
        refuse([*self._wrong_ranges(), *self._wrong_sampling()])
        return self

    def _wrong_ranges(self) -> Iterator[str]:
        if self.rollouts_range is None:
            return
        low, high = self.rollouts_range
        if not 2 <= low < high:
            yield f"rollouts_range: [{low}, {high}] must be two numbers from 2 on, the lower one first"
        elif not low <= self.rollouts_per_prompt <= high:
            yield (
                f"rollouts_per_prompt: {self.rollouts_per_prompt} lies outside rollouts_range: [{low}, {high}]; "
                f"widen the range or set rollouts_per_prompt: auto"
            )

    def _wrong_sampling(self) -> Iterator[str]:
        if self.top_k == 0:
            yield "top_k: 0 leaves no token to sample; give 1 or more, or -1 for all"
        if "" in self.stop_strings:
            yield f"stop_strings: {self.stop_strings} holds an empty text, which every completion has; leave it out"
        if self.engine != "vllm" and self.tensor_parallel != 1:
            yield f"tensor_parallel: {self.tensor_parallel} needs engine: vllm; the {self.engine} engine takes 1"


class SelectorConfig(Section):
    """The choice of the m rollouts of each prompt's n that are trained on."""

    rule: str = Field(default="max_variance", min_length=1)
    """`max_variance` (PODS), `max_reward`, `min_reward`, `random`, `percentile`, `abs_advantage`, `balanced`, `shortest`,
    `reward_per_token`, `cost_aware` (docs/algorithms.md), or `package.module:function`."""
    keep: int = Field(default=16, ge=2)
    """m: rollouts kept of each group; with m = n the run is plain GRPO."""
    budget: Literal["group", "step"] = "group"
    """`group`: m rollouts of each group; `step`: the groups of a step keep m each on average, more where rewards spread
    more."""
    min_valid: int | None = Field(default=None, ge=2)
    """Fewest valid rewards that a group is trained with; left out: m."""
    no_signal: Literal["replace", "drop", "keep"] = "replace"
    """What happens to a kept set whose rewards are all equal: another prompt is tried (`replace`), the step gets smaller
    (`drop`), or it is trained on with zero advantages, as in the paper's runs (`keep`): the gradient is then that of the KL
    term alone."""
    max_replacements: int = Field(default=2, ge=0)
    """With `no_signal: replace`: most other prompts that one step tries, as a multiple of `learner.prompts_per_step`;
    after that the step gets smaller."""
    settle: Literal["off", "abort", "waves"] = "off"
    """Stop generating a group once its selection can gain nothing more (as with binary rewards). `abort` ends unfinished
    rollouts, which favours short ones; `waves` stops between portions, which does not."""
    waves: int = Field(default=4, ge=2)
    """With `settle: waves`: in how many portions the n rollouts are issued."""
    tolerance: float = Field(default=0.0, ge=0)
    """With `settle`: how far from an end of the reward range still counts as that end."""
    straggler_timeout: float = Field(default=60.0, ge=0, le=LONGEST_WAIT)
    """With `staleness` above 0: seconds that a step waits for the oldest groups when newer ones could fill it, so that
    long rollouts are not overtaken and dropped as stale."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the rule."""

    @model_validator(mode="after")
    def _floor_fits(self) -> SelectorConfig:
        if self.min_valid is not None and self.min_valid > self.keep:
            raise ValueError(f"min_valid: {self.min_valid} is more than keep: {self.keep}; lower it or leave it out")
        return self


class WeightsConfig(Section):
    """The transfer of new weights to the generators."""

    transport: Literal["auto", "nccl", "gloo"] = "auto"
    """`auto`: NCCL where learner and generators have GPUs, else gloo over the host's network."""
    relay: Literal["auto", "node", "off"] = "auto"
    """Which generators get the weights from a neighbour instead of from the learner. `auto`: with NCCL, which allows one
    process a card, those that share a card (through CUDA IPC); `node`: with gloo, those that share a node, so that the
    bytes cross the network once a node; `off`: none."""
    rendezvous_timeout: float = Field(default=60.0, gt=0, le=LONGEST_WAIT)
    """Seconds that the members of a broadcast group have to connect to one another."""
    transfer_timeout: float = Field(default=120.0, gt=0, le=LONGEST_WAIT)
    """Seconds that one transfer may take; after that it has failed, and the broadcast group is built anew."""
    bucket_megabytes: float = Field(default=256.0, gt=0)
    """Weights travel in buckets of this size (and ZeRO-3 parameters are gathered in them)."""
    staged: Literal["auto"] | bool = "auto"
    """Whether a generator takes new weights beside its engine's steps and stops for the copy alone, which needs room for
    a second set of weights. `auto`: where twice their size is free at that moment, on a card that no learner rank shares;
    `true`: wherever the room can be had; `false`: the engine stops for the whole transfer. It does so anyway at its first
    update in vLLM, in a process of its own (`tensor_parallel` above 1), and with `transfer: native`; `weights/staged`
    counts the generators that did."""
    keep_cache: bool = False
    """Whether rollouts in flight go on with the keys and values that older weights computed. `false`: they are computed
    anew at every update, so that each token is sampled as a fresh load of the new weights would; with many rollouts in
    flight that takes longer than the transfer. `true`: no rollout is computed again, and its next tokens come from the
    new weights over an older cache. Their log-probabilities are those that they were sampled with, and the importance
    correction works on these. Rollouts that begin after the update share nothing with those before."""
    verify: bool = False
    """Compare fingerprints of the parameters on both ends after every update."""
