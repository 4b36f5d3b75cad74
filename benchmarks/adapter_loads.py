"""How long an adapter keeps a vLLM engine from its steps: through vLLM's loaders, and straight into the model's storage.

    python -m benchmarks.adapter_loads [--layers 24] [--out benchmarks/results/adapter_loads_cpu.json]

A random narrow model, so that what is measured is the host's work for each layer and not the merge's arithmetic; vLLM's
CPU build with parameters that stay as they come, as on a GPU. Each way has two engines, in turn with the others'; every
version is checked by fingerprint.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoTokenizer

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.lora import adapted, config_for, publish
from pods_cluster.generation.engines.factory import make_engine
from pods_cluster.generation.engines.vllm import direct_adapter
from pods_cluster.generation.engines.vllm.adapter_layers import VllmAdapter
from pods_cluster.learning.weight_source import AdapterWeights, ModelWeights
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.tiny_model import ModelSize, build_model
from pods_cluster.weights.fingerprint import difference
from pods_cluster.weights.sender import WeightSender

WAYS = {
    "through vLLM's loaders": {"direct": False, "keep": False},
    "direct, base from the files": {"direct": True, "keep": False},
    "direct, base kept": {"direct": True, "keep": True},
}


def make_model(folder: Path, layers: int, width: int) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    model = build_model(ModelSize(width, layers, width // 64, 2 * width, context=512), tokenizer, seed=0)
    model.save_pretrained(folder)
    return model


def measure(folder: Path, model: Any, way: str, rounds: int) -> tuple[list[float], int]:
    """Seconds of each load in a fresh engine, and the number of adapted weights."""
    took: list[float] = []
    load = VllmAdapter.load

    def timed(adapter: VllmAdapter, *given: Any, **named: Any) -> None:
        began = time.perf_counter()
        load(adapter, *given, **(named | {"direct": WAYS[way]["direct"]}))
        took.append(time.perf_counter() - began)

    free = direct_adapter.free_bytes
    learner = adapted(copy.deepcopy(model))
    alone, whole = AdapterWeights(learner, 0, zero_stage=1), ModelWeights(learner, 0, zero_stage=1)
    wanted = WeightSender(alone, 0, computed=whole).fingerprints()
    engine: Any = make_engine(config_for(str(folder), "float32", "vllm"), AutoTokenizer.from_pretrained(folder))
    VllmAdapter.load = timed  # type: ignore[method-assign]
    if not WAYS[way]["keep"]:
        direct_adapter.free_bytes = lambda _: 0
    try:
        for version in range(rounds):
            publish(alone, engine, version)
            if fault := difference(wanted, engine.fingerprints()):
                raise SystemExit(f"{way}, version {version}: {fault}")
    finally:
        VllmAdapter.load, direct_adapter.free_bytes = load, free  # type: ignore[method-assign]
        engine.close()
        gc.collect()
    return took[1:], len(alone.specs()) // 2  # the first one finds out which way there is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, *_: Any, **__: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    weights = 0
    with tempfile.TemporaryDirectory(prefix="adapter-loads-") as folder:
        model = make_model(Path(folder), arguments.layers, arguments.width)
        for way in [*WAYS, *WAYS]:
            took, weights = measure(Path(folder), model, way, arguments.rounds)
            seconds[way] += took
    medians = {way: statistics.median(took) for way, took in seconds.items()}
    first = medians[next(iter(WAYS))]
    for way, took in medians.items():
        print(f"{way}: {1000 * took:.1f} ms, {first / took:.2f} times as quick")
    if arguments.out:
        result = {
            "benchmark": "adapter_loads",
            "machine": machine(),
            "layers": arguments.layers,
            "width": arguments.width,
            "weights": weights,
            "median_ms": {way: round(1000 * took, 1) for way, took in medians.items()},
            "times_the_loaders": {way: round(first / took, 2) for way, took in medians.items()},
            "ms": {way: [round(1000 * each, 1) for each in took] for way, took in seconds.items()},
        }
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
