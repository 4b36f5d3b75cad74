"""The `model` and `data` sections: what is trained, and on which prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from pods_cluster.config.base import Section, usable_path

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = Field(min_length=1)
    """Folder or Hugging Face hub name of a causal language model with its tokenizer."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a model on the hub; left out: its main branch."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's config.json in learner and engines, as in
    `{max_position_embeddings: 65536}`, under the names that transformers has for them."""
    dtype: Dtype = "bfloat16"
    """Number format of the weights in computation; master weights and gradient sums are always float32. On a CPU
    float32 is faster."""
    chat_template: str | None = Field(default=None, min_length=1)
    """A Jinja chat template, or a path to one; left out: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template reads, as in `{enable_thinking: false}` for Qwen3."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of the learner. In place of `sdpa` models with capped scores or attention sinks get `eager`,
    which computes these."""
    trust_remote_code: bool = False
    """Allow Python code from the model's folder to run."""

    _paths = field_validator("path", "chat_template")(usable_path)


class EvalDataConfig(Section):
    """Held-out rows for evaluation."""

    path: str | None = Field(default=None, min_length=1)
    """Dataset to evaluate on; left out: the training dataset's `split` below."""
    name: str | None = Field(default=None, min_length=1)
    """Subset (configuration) of a hub dataset."""
    split: str = Field(default="test", min_length=1)
    """Split to evaluate on."""
    rows: int | None = Field(default=None, ge=1)
    """Number of rows to evaluate on, from the first; left out: all."""

    _paths = field_validator("path")(usable_path)


class MixedDataConfig(Section):
    """A further dataset that is trained on, beside that of `data.path`."""

    path: str = Field(min_length=1)
    """Dataset of this part: a file, a folder or a hub name, as in `data.path`."""
    name: str | None = Field(default=None, min_length=1)
    """Subset (configuration) of a hub dataset."""
    split: str = Field(default="train", min_length=1)
    """Split to train on."""
    rows: int | None = Field(default=None, ge=1)
    """Number of rows, from the first; left out: all."""
    prompt: str | None = Field(default=None, min_length=1)
    """Column with the prompt; left out: `data.prompt`."""
    answer: str | None = Field(default=None, min_length=1)
    """Column with the answer; left out: `data.answer`."""
    weight: float = Field(default=1.0, gt=0)
    """How often each row is served in an epoch; 0.5: half of the rows, chosen by `run.seed`."""

    _paths = field_validator("path")(usable_path)


class CurriculumConfig(Section):
    """Curriculum: how often a prompt comes depends on how often it was solved before."""

    target: float = Field(default=0.5, gt=0, lt=1)
    """The pass rate at which a prompt comes in each epoch."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """The chance of an epoch at which prompts come that are always solved, or never."""


class DataConfig(Section):
    """The source of prompts, and how they are rendered."""

    path: str = Field(min_length=1)
    """A JSONL, JSON or parquet file, a folder of them or of a saved dataset, or a Hugging Face hub name."""
    name: str | None = Field(default=None, min_length=1)
    """Subset (configuration) of a hub dataset; several are joined by `+`, as in `algebra+geometry`."""
    split: str = Field(default="train", min_length=1)
    """Split to train on; ignored where `path` is one file."""
    prompt: str = Field(default="prompt", min_length=1)
    """Column with the prompt: a text, or a list of chat messages."""
    answer: str | None = Field(default="answer", min_length=1)
    """Column with the reference answer, or null. In verl's layout `reward_model.ground_truth` is found without it."""
    choices: str | None = Field(default=None, min_length=1)
    """Column with the choices of multiple-choice questions, which are put under a text prompt, a line `A. …` each: a list of
    texts, or texts with their labels as ARC and SciKnowEval have them (`{text: […], label: […]}`)."""
    system: str | None = None
    """System message put before a prompt that has none."""
    template: str = Field(default="none", min_length=1)
    """How a text prompt is wrapped: `none`, `think_answer`, `boxed`, a text with `{prompt}`, or a path to such a
    text."""
    chat: bool = True
    """Render prompts through the chat template; false: the text goes to the model as it is."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longer prompts are left out and counted, and so are rows that cannot be rendered."""
    shuffle: bool = True
    """A new seeded order each epoch; false: the file's order."""
    rows: int | None = Field(default=None, ge=1)
    """Number of rows to train on, from the first; left out: all."""
    streaming: bool = False
    """Read rows from their JSONL or parquet files (here or on the hub) when they are served, in place of making a table of
    all first."""
    shuffle_buffer: int = Field(default=10_000, ge=1)
    """With `streaming`: rows that are read together and shuffled among themselves; twice as many are in memory at most."""
    revisit: float | None = Field(default=None, gt=0, le=1)
    """Skip prompts, before any rollout is made, whose last groups had no signal (GRESO): after z such groups in a row one is
    tried with the chance revisit^z in each epoch, and at the latest in the fifth. null, or 1: none is skipped."""
    revisit_target: float | None = Field(default=None, gt=0, lt=1)
    """Wanted share of groups without signal (GRESO: 0.25), to which the chance adapts from `revisit` on (GRESO: 0.5): after each
    step by 0.01, apart for prompts that were answered right (a third of the share) and wrong. null: the chance stays."""
    curriculum: CurriculumConfig | None = None
    """Skip prompts by their past pass rate, before any rollout is made: the further it is from `target`, the more often, and
    never in more than four epochs in a row. Left out: all prompts come in each epoch."""
    weight: float = Field(default=1.0, gt=0)
    """With `mix`: how often each row is served in an epoch."""
    mix: list[MixedDataConfig] = Field(default_factory=list)
    """Further datasets that are trained on too. An epoch serves the rows of all, as often as their weights say, in one order."""
    changed: Literal["refuse", "new_epoch"] = "refuse"
    """What `--resume` does when the rows are not those that the run was started with: `refuse`, or begin a new epoch with
    them."""
    eval: EvalDataConfig | None = None
    """Held-out rows; left out: no evaluation."""

    _paths = field_validator("path", "template")(usable_path)

    @field_validator("template")
    @classmethod
    def _template_takes_a_prompt(cls, value: str) -> str:
        if ("\n" in value or "{" in value) and "{prompt}" not in value:
            raise ValueError(f"{value!r} has no place `{{prompt}}`; add it where the row's prompt goes")
        return value
