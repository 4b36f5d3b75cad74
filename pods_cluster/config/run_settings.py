"""The `run` and `cluster` sections: length, folder, evaluation and checkpoints of a run, and where it runs."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from pods_cluster.config.base import LONGEST_WAIT, Section, usable_path

LONGEST_RUN_NAME = 200
"""Characters of a run's name, which is a folder's, with room for what is written beside it."""


class EvalConfig(Section):
    """Evaluation on held-out rows."""

    every: int = Field(default=10, ge=0)
    """Steps between evaluations (also before the first and after the last step); 0: none by steps."""
    minutes: float = Field(default=0.0, ge=0)
    """An evaluation is also due after the step with which so many minutes of steps are over, and after twice as many, and so
    on; what evaluations and checkpoints take does not count. Runs of other speed are so compared at the same times.
    0: none by time."""
    samples: int = Field(default=1, ge=0)
    """Sampled completions for each row, in addition to the greedy one; 0: greedy only."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Temperature of the sampled completions."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus (top-p) of the sampled completions; for evaluation only."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; left out: `generator.max_tokens`."""

    @property
    def on(self) -> bool:
        """Whether there are evaluations."""
        return bool(self.every or self.minutes)

    def is_due(self, step: int, seconds: float, before: float) -> bool:
        """Whether one is due after `step`, with which the steps have taken `seconds` in all, and `before` without it."""
        period = 60.0 * self.minutes
        by_time = bool(period) and int(seconds / period) > int(before / period)
        return by_time or bool(self.every and step % self.every == 0)


class CheckpointConfig(Section):
    """Checkpoints, from which `--resume` continues."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints; another one is saved at the end. 0: none by steps."""
    minutes: float = Field(default=10.0, ge=0)
    """A checkpoint is also due once so many minutes have passed since the last one, or since the start. 0: none by time."""
    copy_every: int = Field(default=5, ge=0)
    """Steps between light copies of the learner's state in the run's folder, which the ranks write while they train; what
    fails is started again from the newest of copy and checkpoint. A copy waits while the one before it is written, or where
    copies would take more than 2 % of the ranks' time. A node with room for its ranks' copies and three more keeps their memory
    for the next ones. 0: none."""
    keep: int = Field(default=3, ge=1)
    """How many of the newest checkpoints are kept."""
    best: str | None = Field(default=None, pattern=r"^eval/\S+$")
    """A metric of the evaluations, as `eval/greedy_accuracy`: the model of the evaluation where it was highest is kept in the
    run's folder as `best/`. Left out: none."""


class RunConfig(Section):
    """The name, length and output of the run."""

    name: str = Field(min_length=1)
    """Name of the run, also of its folder and its Ray actors."""
    dir: str = Field(default="runs", min_length=1)
    """Folder in which the run's folder is made."""
    steps: int = Field(default=100, ge=1)
    """Steps, each on one batch of prompts."""
    epochs: float | None = Field(default=None, gt=0)
    """The length as passes over the rows, in place of `steps`: epochs x rows / `learner.prompts_per_step`, rounded up. The
    run's config.yaml has the steps that it came to."""
    max_seconds: float | None = Field(default=None, gt=0, le=LONGEST_WAIT)
    """Seconds of work after which the run ends as it does after its last step (how the paper's runs stop). Evaluations
    and checkpoints do not count; a resumed run goes on counting. Left out: only `steps` counts."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the prompt order, of sampling and of ties in selection."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    samples_every: int = Field(default=5, ge=0)
    """Steps between samples of whole groups of rollouts, saved for people to read; 0: none."""
    samples_groups: int = Field(default=2, ge=1)
    """Groups saved each time, and as many of those that were dropped (no signal, too few valid rewards, too old)."""
    restarts: int = Field(default=3, ge=0)
    """How often in a row what failed of a run (learner ranks, selector, controller) is started again from the newest
    saved state. Ten steps without a failure begin the count anew; then the run ends with the first cause. 0: never."""
    step_timeout: float = Field(default=3600.0, gt=0, le=LONGEST_WAIT)
    """Seconds that the rollouts of one step may take; after that the run stops and says what it was waiting for."""
    export: bool = True
    """Write the final model in Hugging Face format."""
    push_to_hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository (`owner/name`) on the Hugging Face hub that gets the final model, with the token of HF_TOKEN or of `hf auth
    login` on the controller's node. It is made, for its owner alone (`hub_private`), where it is not there."""
    hub_private: bool = True
    """Whether a repository that is made is private."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too (extra `tensorboard`)."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too (extra `wandb`). Without an API key, or with WANDB_MODE=offline, they stay
    in the run's folder; an event says so."""
    mlflow: bool = False
    """Send the metrics to MLflow too (extra `mlflow`): to MLFLOW_TRACKING_URI, else they stay in the run's folder."""
    trackio: bool = False
    """Keep the metrics with trackio too (extra `trackio`): in TRACKIO_DIR, or in the Space of TRACKIO_SPACE_ID."""

    _paths = field_validator("dir")(usable_path)

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, value: str) -> str:
        if len(value) > LONGEST_RUN_NAME:
            raise ValueError(f"{value[:60] + '…'!r} has {len(value)} characters; give at most {LONGEST_RUN_NAME}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError(f"{value!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
        return value


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str = Field(default="auto", min_length=1)
    """`auto`: the cluster of RAY_ADDRESS (set in a Ray job), else a new local one; `local`: always a new local one; or
    host:port."""
    placement_timeout: float = Field(default=120.0, gt=0, le=LONGEST_WAIT)
    """Seconds that the cluster may take to place the pools; after that the run stops and says what is missing."""
    scale_timeout: float = Field(default=600.0, gt=0, le=LONGEST_WAIT)
    """Seconds that a change of the pools' sizes may wait for room in the cluster; after that the run goes on with what
    it has."""
    drain_timeout: float = Field(default=600.0, gt=0, le=LONGEST_WAIT)
    """Seconds that a generator which leaves may take to finish its rollouts; after that their prompts go to others."""
