"""A tiny model with its tokenizer and data, as the quickstart makes them but untrained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.task import make_splits, write_jsonl
from pods_cluster.quickstart.tiny_model import ModelSize, build_model


@dataclass(frozen=True)
class Made:
    model: Path
    train: Path
    test: Path

    def overrides(self, runs: Path) -> list[str]:
        return [
            f"model.path={self.model}",
            f"data.path={self.train}",
            f"data.eval.path={self.test}",
            f"run.dir={runs}",
        ]


def made_in(folder: Path) -> Made:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = build_model(ModelSize(), tokenizer, seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    splits = make_splits(seed=0)
    write_jsonl(splits.train[:256], folder / "train.jsonl")
    write_jsonl(splits.test[:32], folder / "test.jsonl")
    return Made(folder / "model", folder / "train.jsonl", folder / "test.jsonl")
