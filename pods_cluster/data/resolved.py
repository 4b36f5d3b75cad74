"""Settings that depend on the model's tokenizer or on the number of rows, as the numbers that they come to."""

from __future__ import annotations

import math

from pods_cluster.config import Config
from pods_cluster.data.errors import DataError
from pods_cluster.data.tokenizer import PromptTokenizer


def resolved(config: Config, tokenizer: PromptTokenizer, rows: int | None) -> Config:
    """Return the configuration with `generator.stop_tokens` as ids and, where `rows` of training are known, `run.epochs`
    as `run.steps`. Raises DataError naming the field.
    """
    generator, run = config.generator, config.run
    ids = [
        token if isinstance(token, int) else _id_of(token, tokenizer, config.model.path)
        for token in generator.stop_tokens
    ]
    generator = generator.model_copy(update={"stop_tokens": ids})
    if run.epochs is not None and rows is not None:
        steps = max(1, math.ceil(run.epochs * rows / config.learner.prompts_per_step))
        if config.learner.warmup_steps > steps:
            raise DataError(
                f"learner.warmup_steps: {config.learner.warmup_steps} is more than the {steps} steps of run.epochs: "
                f"{run.epochs:g}; lower it, or use learner.warmup_ratio"
            )
        run = run.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"generator": generator, "run": run})


def _id_of(text: str, tokenizer: PromptTokenizer, model: str) -> int:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if len(ids) != 1:
        raise DataError(
            f"generator.stop_tokens: {text!r} is {len(ids)} tokens of {model!r} ({ids}), and a completion ends with one; name "
            f"a text that is one token, or the id of one; generator.stop_strings takes any text"
        )
    return ids[0]
