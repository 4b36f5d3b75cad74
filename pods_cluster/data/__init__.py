"""Datasets to prompts: rows, their layout, templates, rendering, and the resumable stream. Imports no torch."""

from pods_cluster.data.errors import DataError, RowError
from pods_cluster.data.layout import Layout
from pods_cluster.data.prompts import EvalPrompts, load_eval, load_prompts, reward_columns
from pods_cluster.data.render import PromptRenderer
from pods_cluster.data.resolved import resolved
from pods_cluster.data.source import Source, load_source
from pods_cluster.data.stream import PromptStream
from pods_cluster.data.tokenizer import LightTokenizer, PromptTokenizer, load_tokenizer

__all__ = [
    "DataError",
    "EvalPrompts",
    "Layout",
    "LightTokenizer",
    "PromptRenderer",
    "PromptStream",
    "PromptTokenizer",
    "RowError",
    "Source",
    "load_eval",
    "load_prompts",
    "load_source",
    "load_tokenizer",
    "resolved",
    "reward_columns",
]
