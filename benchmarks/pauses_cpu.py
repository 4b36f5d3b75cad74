"""How long new weights keep an engine from its steps: whole transfer, copy alone, and with the cache kept.

    python -m benchmarks.pauses_cpu [--rollouts 32] [--megabytes-per-second 100] [--versions 4]

The built-in engine in its thread, as a worker has it, makes rollouts of a random model of 26 million parameters in float32
(105 MB) on a CPU, while another process sends versions over gloo on a link of the given speed. `weights.staged: false` stops
it for the transfer, `auto` for the copy alone; then the keys and values of all rollouts in flight are computed anew, unless
`weights.keep_cache` keeps them. `gap` is the longest time between two steps after an update begins, `lost` the tokens that
came less than at the full engine's rate, in seconds of that rate, until six seconds after its end. Medians over the versions
after the first. Writes `benchmarks/results/pauses_cpu.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.config import Config
from pods_cluster.generation.engine_thread import EngineThread
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.generation.worker_weights import WeightCalls
from pods_cluster.types import GroupId, Rollout, RolloutRequest, SamplingParams
from pods_cluster.weights.protocol import Invitation, TensorSpec, WeightUpdate, plan_buckets
from pods_cluster.weights.sender import WeightSender

RESULT = Path(__file__).parent / "results" / "pauses_cpu.json"
TIMEOUT, BUCKET = 120.0, 8 * 2**20
SETTLE = 6.0
"""Seconds after an update that belong to it."""
BEFORE = 3.0
"""Seconds before the first one that the rate is taken over."""
WAYS: dict[str, dict[str, Any]] = {
    "whole transfer": {"staged": False},
    "copy alone": {"staged": "auto"},
    "copy alone, cache kept": {"staged": "auto", "keep_cache": True},
}


def make_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            vocab_size=4096,
            tie_word_embeddings=True,
        )
    ).eval()


class Source:
    """The parameters of a model, behind a link of so many bytes a second."""

    def __init__(self, model: torch.nn.Module, speed: float) -> None:
        self.tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._speed = speed

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, tuple(t.shape), "float32") for name, t in self.tensors.items())

    def gather(self, start: int, stop: int) -> list[torch.Tensor]:
        found = list(self.tensors.values())[start:stop]
        time.sleep(sum(tensor.nbytes for tensor in found) / self._speed)
        return found


def learner(pipe: Connection, speed: float) -> None:
    """Another process: it sends each version that it is told of."""
    torch.set_num_threads(1)
    source = Source(make_model(1), speed)
    sender = WeightSender(source, 0, host="127.0.0.1")
    pipe.send((source.specs(), *sender.open("gloo", "pauses", 1, TIMEOUT)))
    sender.connect(TIMEOUT)
    while (update := pipe.recv()) is not None:
        sender.send(update)
    sender.close()


class Worker(WeightCalls):
    """The calls of a worker around the engine, whose steps are noted: (when, tokens made)."""

    def __init__(self, config: Config, rollouts: int) -> None:
        self.config = config
        self.steps: list[tuple[float, int]] = []
        self._check = lambda: None
        self.rate = 0.0  # before the first update: tokens a second of an engine that is full
        self._rows = 0
        self._rollouts = rollouts
        self._engine = EngineThread(self._make, self._replace)
        self._engine.ready(TIMEOUT)

    def _make(self) -> TransformersEngine:
        engine = TransformersEngine(
            make_model(0), [], max_sequences=self._rollouts, keep_cache=self.config.weights.keep_cache
        )
        step = engine.step

        def noted() -> list[Rollout]:
            finished = step()
            self.steps.append((time.monotonic(), engine.stats().generated_tokens))
            return finished

        engine.step = noted  # type: ignore[method-assign]
        return engine

    def begin(self) -> None:
        """Fill the engine; what ends is replaced by another rollout."""
        self._engine.call("submit", lambda engine: engine.submit(self._next(self._rollouts)), TIMEOUT, "")

    def _replace(self, finished: list[Rollout]) -> None:
        engine = self._engine.engine
        assert engine is not None
        engine.submit(self._next(len(finished)))

    def _next(self, count: int) -> list[RolloutRequest]:
        sampling = SamplingParams(max_tokens=128)
        self._rows += count
        return [
            RolloutRequest(GroupId(0, self._rows - place), 0, tuple(range(5, 21)), sampling) for place in range(count)
        ]

    def version(self, update: WeightUpdate) -> dict[str, float]:
        """Take a version; what it cost."""
        began = time.monotonic()
        self.receive(update)
        ended = time.monotonic()
        time.sleep(SETTLE)
        inside = [at for at, _ in self.steps if began <= at <= ended + SETTLE]
        rate = self.rate = self.rate or (self._made(began) - self._made(began - BEFORE)) / BEFORE
        span = ended + SETTLE - began
        made = self._made(began + span) - self._made(began)
        gaps = [after - before for before, after in zip([began, *inside], inside, strict=False)]
        return {"transfer": ended - began, "gap": max(gaps), "lost": span - made / rate, "rate": rate}

    def _made(self, moment: float) -> int:
        return next((tokens for at, tokens in reversed(self.steps) if at <= moment), 0)


def measure(way: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=learner, args=(theirs, options.megabytes_per_second * 1e6), daemon=True)
    process.start()
    tree: dict[str, Any] = {"model": {"path": "none"}, "data": {"path": "none"}, "reward": [{"name": "exact_match"}]}
    worker = Worker(Config.model_validate({**tree, "run": {"name": "pauses"}, "weights": way}), options.rollouts)
    specs, host, port = mine.recv()
    worker.connect(Invitation("gloo", host, port, 2, 1, "pauses", TIMEOUT))
    worker._engine.call("adopt", lambda engine: engine.adopt_version(0), TIMEOUT, "")
    worker.begin()
    time.sleep(SETTLE + 2)
    rows = []
    for version in range(1, options.versions + 2):
        update = WeightUpdate(version, specs, plan_buckets(specs, BUCKET), TIMEOUT)
        mine.send(update)
        rows.append(worker.version(update))
    mine.send(None)
    worker._engine.stop()
    process.join(TIMEOUT)
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--megabytes-per-second", type=float, default=100.0)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    result: dict[str, Any] = {"machine": machine(), "settings": settings, "seconds": {}}
    for name, way in WAYS.items():
        result["seconds"][name] = measure(way, options)
        print(name, {key: round(value, 3) for key, value in result["seconds"][name].items()}, flush=True)
        write_result(options.out, result)


if __name__ == "__main__":
    main()
