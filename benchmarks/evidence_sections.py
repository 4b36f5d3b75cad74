"""Sections of docs/evidence.md: the arms on GPUs (`evidence_h200.json`), and their gradients (`gradient_noise.json`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._result_file import records


def gpu_intro(result: Mapping[str, Any] | None) -> Iterator[str]:
    """What stands above the table of the arms on GPUs; `result` None: not run."""
    yield "## Three arms on GPUs"
    yield ""
    yield (
        "Qwen2.5-Coder-0.5B on GSM8K, learner and engines on one card, n = 64 and m = 16, staleness 1, "
        "greedy accuracy on all 1,319 "
        "test rows. The accuracy to reach was written into the sweep before the runs."
    )
    yield ""
    if result is None:
        yield "**Not run yet.** `pods sweep configs/sweeps/gsm8k-1gpu.yaml`, then `python -m benchmarks.evidence_gpu`"
        yield ""
        return
    yield f"- **Runs**: {result['command']}"
    yield f"- **Machine**: {', '.join(result['machine']['gpus'])}, {result['machine']['cpu']}."
    yield f"- **Sooner**: to {result['target']:.0%}, with the interval over two seeds, which is too narrow."
    yield (
        "- **What bounds it**: an update on all 64 takes four times one on 16, but the engines need "
        "more than half of a step for 64 "
        "answers, whoever is trained. And where 16 answers are made in less than half the time of 64, "
        "plain GRPO with 16 takes twice "
        "the steps in the same minutes: it was ahead at this size. The selection pays where updates are "
        "dear beside answers: larger "
        "models (the columns `3b` above), generators of their own."
    )
    yield ""


def gradient_lines(result: Mapping[str, Any] | None) -> Iterator[str]:
    """The section on gradients; `result` None: not run."""
    yield "## What one update is worth"
    yield ""
    yield (
        "The same batches for every arm, at fixed weights: how much of its gradient is signal. Signal-to-noise is "
        "|G|² / E|g − G|², with g the gradient of a batch and G its expectation; the cosine is between "
        "the expectations of the arm "
        "and of all n rollouts (grpo-ga); progress is what a step of the same length gains in that direction."
    )
    yield ""
    if result is None:
        yield "**Not run yet.** `python -m benchmarks.gradient_noise`"
        yield ""
        return
    yield (
        f"`python -m benchmarks.gradient_noise`, {result['batches']} batches of {result['prompts']} prompts; intervals are 95 % "
        "bootstrap ones over batches."
    )
    yield ""
    for model in result["models"]:
        yield f"{model['about']}:"
        yield ""
        yield "| arm | trained a batch | signal-to-noise | cosine with all | progress | groups without signal |"
        yield "|---|---|---|---|---|---|"
        for row in records(model["arms"]):
            yield (
                f"| {row['arm']} | {row['trained']:.0f} | {_band(row, 'snr', '.3f')} | {_band(row, 'cosine', '.2f')} | "
                f"{_band(row, 'progress', '.2f')} | {row['groups_without_signal']:.0%} |"
            )
        yield ""


def _band(row: Mapping[str, Any], name: str, form: str) -> str:
    value, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return "not told"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]" if low is not None and low < high else f"{value:{form}}"
