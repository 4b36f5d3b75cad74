"""The quickstart's warm start: supervised training that stops half-way and makes the model that RL starts from.

The model learns sums from the `warm` split, on answer tokens only, and stops when it first solves the share `target`
of a fixed sample of the RL split, which it has not seen. The test split has no influence on when it stops. The result
is often wrong when decoded greedily but gives most right answers a fair probability, so that RL can improve it. The
same settings give the same model on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from pods_cluster.quickstart.answer_batch import IGNORED, Accuracy, Batch, accuracy, encode
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.task import Splits, make_splits, write_jsonl
from pods_cluster.quickstart.tiny_model import ModelSize, build_model

# Part of the cache folder's name. Raise it whenever a change of the code changes what the same settings produce.
RECIPE = 1
REPORT = "report.json"

Progress = Callable[[int, float, Accuracy], None]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the warm start: all that its result depends on."""

    seed: int = 0
    size: ModelSize = field(default_factory=ModelSize)
    test_problems: int = 512
    warm_problems: int = 2048
    batch: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    target: float = 0.40
    check_every: int = 10
    check_rows: int = 512
    max_steps: int = 600

    def digest(self) -> str:
        """Return a short hash of the settings and the recipe."""
        text = json.dumps({"recipe": RECIPE, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a warm start. `greedy` and `sampled` are accuracies on the test split; `seconds` is training time."""

    parameters: int
    steps: int
    seconds: float
    greedy: float
    sampled: float
    rows: dict[str, int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder with `model/` (weights and tokenizer), `data/{warm,train,test}.jsonl` and the report."""

    folder: Path
    report: Report
    reused: bool

    @property
    def model(self) -> Path:
        """Folder of the weights and the tokenizer."""
        return self.folder / "model"

    @property
    def data(self) -> Path:
        """Folder of the three splits."""
        return self.folder / "data"


def prepare(root: Path, settings: WarmStart, threads: int = 1, progress: Progress | None = None) -> Prepared:
    """Return the folder for these settings under `root`; make it where it does not exist.

    `threads` are CPU threads. The folder is made under another name and then renamed, so that it exists whole or not at
    all. When two processes make the same one, the first to finish wins and the other uses its folder.
    """
    folder = root / f"quickstart-{settings.digest()}"
    if (folder / REPORT).exists():
        return Prepared(folder, _read_report(folder), reused=True)
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=root, prefix=".building-"))
    try:
        _build(building, settings, threads, progress)
        with suppress(OSError):
            os.replace(building, folder)
        return Prepared(folder, _read_report(folder), reused=False)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(folder: Path, settings: WarmStart, threads: int, progress: Progress | None) -> None:
    tokenizer = build_tokenizer()
    splits = make_splits(settings.seed, test=settings.test_problems, warm=settings.warm_problems)
    model = build_model(settings.size, tokenizer, settings.seed)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        started = time.perf_counter()
        steps = train(model, tokenizer, splits, settings, progress)
        seconds = time.perf_counter() - started
        result = accuracy(model, encode(tokenizer, splits.test))
    finally:
        torch.set_num_threads(threads_before)
    report = Report(
        parameters=sum(weight.numel() for weight in model.parameters()),
        steps=steps,
        seconds=seconds,
        greedy=result.greedy,
        sampled=result.sampled,
        rows={name: len(rows) for name, rows in splits.as_dict().items()},
    )
    with _quiet_libraries():
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, rows in splits.as_dict().items():
        write_jsonl(rows, folder / "data" / f"{name}.jsonl")
    (folder / REPORT).write_text(json.dumps({"settings": asdict(settings), **asdict(report)}, indent=2) + "\n")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Saving a model imports DeepSpeed, which warns that this machine has no GPU, and draws a progress bar."""
    deepspeed, bars = logging.getLogger("DeepSpeed"), transformers_logging.is_progress_bar_enabled()

    def only_errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    deepspeed.addFilter(only_errors)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        deepspeed.removeFilter(only_errors)
        if bars:
            transformers_logging.enable_progress_bar()


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    settings: WarmStart,
    progress: Progress | None = None,
) -> int:
    """Train until the check reaches `target` or `max_steps` are done. Returns the number of optimiser steps."""
    corpus = encode(tokenizer, splits.warm)
    check = encode(tokenizer, splits.train[: settings.check_rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    order = torch.Generator().manual_seed(settings.seed)
    waiting = torch.empty(0, dtype=torch.long)
    model.train()
    step = 0
    while step < settings.max_steps:
        if len(waiting) < settings.batch:
            waiting = torch.cat([waiting, torch.randperm(len(corpus), generator=order)])
        rows, waiting = waiting[: settings.batch], waiting[settings.batch :]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
        loss = _learn(model, corpus.take(rows), optimizer)
        step += 1
        if step % settings.check_every == 0:
            result = accuracy(model, check)
            if progress is not None:
                progress(step, loss, result)
            if result.greedy >= settings.target:
                break
    model.eval()
    return step


def _learn(model: Qwen2ForCausalLM, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """Make one optimiser step on the mean cross-entropy of the answer tokens, and return that (nats a token)."""
    logits = model(batch.ids[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _read_report(folder: Path) -> Report:
    values = json.loads((folder / REPORT).read_text())
    values.pop("settings")
    return Report(**values)
