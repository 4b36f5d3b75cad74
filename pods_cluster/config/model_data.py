"""The model and the data: what is trained, on which prompts, against which rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pods_cluster.config.base import Section

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = Field(min_length=1)
    """Folder or Hugging Face hub name of a causal language model with its tokenizer."""
    dtype: Dtype = "bfloat16"
    """Number format of the weights that compute (master weights and gradient sums are float32). On a CPU float32 is
    the faster."""
    chat_template: str | None = None
    """A Jinja chat template, or a path to one, in place of the tokenizer's own."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of the learner."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder ships."""


class EvalDataConfig(Section):
    """Held-out rows for evaluation."""

    path: str | None = None
    """Dataset to evaluate on; left out: the training dataset's `split` below."""
    name: str | None = None
    """Subset (configuration) of a hub dataset."""
    split: str = "test"
    """Split to evaluate on."""
    rows: int | None = Field(default=None, ge=1)
    """How many rows, from the first; left out: all."""


class DataConfig(Section):
    """Where prompts come from and how they are rendered."""

    path: str = Field(min_length=1)
    """A JSONL, JSON or parquet file, a folder of them or of a saved dataset, or a Hugging Face hub name."""
    name: str | None = None
    """Subset (configuration) of a hub dataset; several are joined by `+`, as in `algebra+geometry`."""
    split: str = "train"
    """Split to train on; ignored where `path` is one file."""
    prompt: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    answer: str | None = "answer"
    """Column with the reference answer, or null. In verl's layout `reward_model.ground_truth` is found by itself."""
    system: str | None = None
    """System message put before a text prompt."""
    template: str = "none"
    """How a text prompt is wrapped: `none`, `think_answer`, `boxed`, a text with `{prompt}`, or a path to such a
    text."""
    chat: bool = True
    """Render prompts through the chat template; false: the text goes to the model as it is."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longer prompts are left out and counted, and so are rows that cannot be rendered."""
    shuffle: bool = True
    """A new seeded order each epoch; false: the file's order."""
    rows: int | None = Field(default=None, ge=1)
    """Train on the first so many rows only; left out: all."""
    changed: Literal["refuse", "new_epoch"] = "refuse"
    """What `--resume` does when the rows are not those that the run was started with: refuse, or begin a new epoch
    with them."""
    eval: EvalDataConfig | None = None
    """Held-out rows; left out: no evaluation."""

    @field_validator("template")
    @classmethod
    def _template_takes_a_prompt(cls, value: str) -> str:
        if ("\n" in value or "{" in value) and "{prompt}" not in value:
            raise ValueError(f"{value!r} has no place `{{prompt}}`; add it where the row's prompt goes")
        return value


class RewardConfig(Section):
    """One reward; the rollout's reward is the weighted sum of all."""

    name: str = Field(min_length=1)
    """A built-in reward (`pods rewards` lists them), `package.module:function` or `path/to/file.py:function`."""
    label: str | None = Field(default=None, min_length=1)
    """Name in metrics and samples; left out: the reward's (a user function's) own."""
    weight: float = 1.0
    """Factor of this reward in the sum; 0 reports it without training on it."""
    style: Literal["auto", "trl", "verl"] = "auto"
    """Calling convention of a user function: TRL's `f(prompts, completions, **columns)` or verl's
    `compute_score(...)`."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds after which a scorer process that has not answered is killed, and the reward counted as missing."""
    range: tuple[float, float] | None = None
    """Lowest and highest value of a user function; built-in rewards declare theirs."""
    none: Literal["missing", "skip"] = "missing"
    """What a None from the function means: the reward is missing (the rollout is excluded), or it does not apply
    (0)."""
    batch: int = Field(default=1, ge=1)
    """Most completions in one call of a user function; 1 scores each as soon as it ends."""
    completions: Literal["auto", "text", "messages"] = "auto"
    """What a TRL function gets: texts, chat messages, or messages where the prompt is a chat."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments handed to the reward."""

    @model_validator(mode="after")
    def _range_is_ordered(self) -> RewardConfig:
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range: {list(self.range)} is not [lowest, highest]; swap or widen it")
        return self


class ScoringConfig(Section):
    """The scorer processes beside each generator."""

    workers: int = Field(default=1, ge=1)
    """Scorer processes for each generator worker."""
