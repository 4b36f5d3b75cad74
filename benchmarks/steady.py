"""What one vLLM engine makes while it never drains, in a worker with its real scorers, and what each habit of a step is worth.

    python -m benchmarks.steady --model MODEL --data GSM8K --out benchmarks/results/steady_x.json
    python -m benchmarks.steady … --phases portion-1,portion-64 --set generator.engine_options.process=true

One engine is started; prompts of the dataset are sent, n rollouts each, whenever it has room for more than its places.
The phases change one thing while it works: how many places new rollouts wait for (`admit`), which steps replay a
captured graph, how soon a thread gives up the interpreter, whether completions are scored, whether new weights come.
Each phase is left alone for `--settle` seconds and then measured for `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.config import load_config
from pods_cluster.data import load_prompts, load_tokenizer
from pods_cluster.generation.engines.vllm.admission import AdmissionGate
from pods_cluster.generation.messages import GroupRequest
from pods_cluster.generation.worker import GeneratorWorker
from pods_cluster.types import GroupId, Rollout, SamplingParams

CONFIG = Path("configs/gsm8k-1gpu.yaml")
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    portion: int = 64
    mixed_graphs: bool = False
    """Steps with prompts replay piecewise graphs, where some were captured that are large enough."""
    switch_ms: float = 5.0
    """Python's switch interval; 5 ms is its default."""
    scored: bool = True
    collect: bool = True
    """Python's garbage collection is on."""
    update_seconds: float = 0.0
    """Time between two pauses as for new weights (the weights stay); 0: none."""
    spied: bool = False
    """py-spy writes beside the result who holds the interpreter's lock."""


PHASES: dict[str, Phase] = {
    "portion-1": Phase(portion=1),
    "portion-1-graphs": Phase(portion=1, mixed_graphs=True),
    "portion-32": Phase(portion=32),
    "portion-64": Phase(),
    "portion-64-graphs": Phase(mixed_graphs=True),
    "portion-128": Phase(portion=128),
    "portion-256": Phase(portion=256),
    "switch-0.5ms": Phase(switch_ms=0.5),
    "switch-0.1ms": Phase(switch_ms=0.1),
    "unscored": Phase(scored=False),
    "no-gc": Phase(collect=False),
    "updates": Phase(update_seconds=2.5),
    "spied": Phase(spied=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder with train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before the first phase")
    parser.add_argument("--settle", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="more of the configuration")
    options = parser.parse_args()
    if unknown := [name for name in options.phases.split(",") if name not in PHASES]:
        parser.error(f"--phases: {', '.join(unknown)}: unknown; there are {', '.join(PHASES)}")
    overrides = [f"model.path={options.model}", f"data.path={options.data}", "data.name=null", *options.set]
    config = load_config(options.config, overrides)
    result: dict[str, Any] = {"benchmark": "steady", "machine": machine(), "set": options.set, "phases": {}}
    began = time.monotonic()
    worker = GeneratorWorker(config, "steady/generator/0")
    engine: Any = worker._engine.ready(config.generator.start_timeout)
    worker.adopt_version(0)
    result["start_seconds"] = round(time.monotonic() - began, 1)
    bench = Bench(config, worker, engine)
    try:
        time.sleep(options.warm)
        for name in options.phases.split(","):
            spy = _spy(options.out.with_suffix(".spy.txt"), options) if PHASES[name].spied else contextlib.nullcontext()
            with spy:
                found = bench.measure(PHASES[name], options.settle, options.seconds)
            result["phases"][name] = found
            print(name, found, flush=True)
            write_result(options.out, result)
    finally:
        bench.close()


def _spy(out: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Samples of the threads that hold the lock, for the length of a phase."""
    seconds = str(math.floor(options.settle + options.seconds))
    command = ["record", "--gil", "--threads", "--nonblocking", "--rate", "100", "--format", "raw"]
    return subprocess.Popen(
        ["py-spy", *command, "--duration", seconds, "--output", str(out), "--pid", str(os.getpid())]
    )


class Bench:
    """Feeds a worker so that it never drains, and measures it in phases."""

    def __init__(self, config: Any, worker: GeneratorWorker, engine: Any) -> None:
        self.config, self.worker, self.engine = config, worker, engine
        self.places = config.generator.places_per_worker(1)
        self.error: BaseException | None = None
        self._stream = load_prompts(config, load_tokenizer(config.model, light=True))
        self._sampling = SamplingParams(max_tokens=config.generator.max_tokens, seed=config.run.seed)
        self._groups: list[GroupId] = []
        self._stop = threading.Event()
        self._take = worker._engine._finished
        self.steps = StepLog(engine)
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()

    def measure(self, phase: Phase, settle: float, seconds: float) -> dict[str, Any]:
        """Tokens a second and what the steps were like."""
        self._apply(phase)
        self._updates(phase, time.monotonic() + settle)
        self.steps.clear()
        before, began, cpu = self.engine.stats(), time.monotonic(), time.process_time()
        pauses = self._updates(phase, began + seconds)
        took = time.monotonic() - began
        after = self.engine.stats()
        if self.error is not None:
            raise self.error
        found = {
            "tokens_per_second": round((after.generated_tokens - before.generated_tokens) / took),
            "rollouts_per_second": round((after.finished - before.finished) / took, 1),
            "process_cpu": round((time.process_time() - cpu) / took, 2),
            "scoring": self.worker.stats().scoring,
        }
        if pauses:
            found["pauses"] = len(pauses)
        return found | self.steps.numbers()

    def close(self) -> None:
        self._stop.set()
        self._feeder.join(5.0)
        self.worker.shutdown()

    def _apply(self, phase: Phase) -> None:
        sys.setswitchinterval(phase.switch_ms / 1000)
        (gc.enable if phase.collect else gc.disable)()
        self.worker._engine._finished = self._take if phase.scored else self._discard
        if (scheduler := self.steps.scheduler) is not None:
            gate = AdmissionGate(phase.portion)
            self.worker._call("gate", lambda _: setattr(scheduler, "_gate", gate))
            self.worker._call("graphs", lambda _: self.steps.use_mixed_graphs(phase.mixed_graphs))

    def _updates(self, phase: Phase, end: float) -> list[float]:
        """Wait until `end`, with pauses as for new weights."""
        pauses: list[float] = []
        while (left := end - time.monotonic()) > 0:
            if not phase.update_seconds:
                time.sleep(left)
                continue
            time.sleep(min(left, phase.update_seconds))
            if time.monotonic() < end:
                pauses.append(time.monotonic())
                self.worker._call("pause", _pause)
        return pauses

    def _discard(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            self.worker._store.finish(rollout)

    def _feed(self) -> None:
        n = self.config.generator.rollouts_per_prompt
        try:
            while not self._stop.is_set():
                room = self.places - self.worker.wait_for_room(self.places, POLL_SECONDS)
                if room > 0:
                    prompts = self._stream.next(math.ceil(room / n))
                    groups = [
                        GroupRequest(GroupId(p.epoch, p.row), p, tuple(range(n)), n, self._sampling) for p in prompts
                    ]
                    self._groups += [group.group for group in groups]
                    self.worker.submit(groups)
                ended = [group for group in self._groups if not self.worker._store.expects(group)]
                self.worker.drop(ended)
                self._groups = [group for group in self._groups if group not in ended]
        except BaseException as error:
            self.error = error


def _pause(engine: Any) -> None:
    """What `receive` does around a transfer: all that runs starts again at its first token's keys and values."""
    for outputs, gauges in engine._core.pause():
        engine._take(outputs, gauges)
    for running in engine._by_id.values():
        running.updated(engine.version)
    engine._core.resume()


class StepLog:
    """When each step was planned, and how many sequences and tokens it had; for an engine core in this process."""

    def __init__(self, engine: Any) -> None:
        self.scheduler: Any = None
        self._rows: list[tuple[float, int, int]] = []
        self._hidden: dict[Any, Any] = {}
        if engine._core.process:
            return
        core = engine._core._client.engine_core
        self.scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        schedule = self.scheduler.schedule

        def logged(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._rows.append((time.monotonic(), len(output.num_scheduled_tokens), output.total_num_scheduled_tokens))
            return output

        self.scheduler.schedule = logged

    def clear(self) -> None:
        self._rows = []

    def use_mixed_graphs(self, use: bool) -> None:
        """Hide or show graphs for more tokens than the engine has places."""
        manager = getattr(self._runner, "cudagraph_manager", None)
        candidates = getattr(manager, "_candidates", None)
        if candidates is None:
            return
        if use:
            candidates.update(self._hidden)
            return
        places = self.scheduler.max_num_running_reqs
        self._hidden |= {key: value for key, value in candidates.items() if tokens_of(key) > places}
        for key in self._hidden:
            candidates.pop(key, None)

    def numbers(self) -> dict[str, Any]:
        """`pure_ms`: from step to step where the last two only decoded; `mixed_ms`: the others."""
        rows = self._rows
        pure, mixed = [], []
        for index in range(1, len(rows) - 1):
            decoding = all(sequences == tokens for _, sequences, tokens in rows[index - 1 : index + 1])
            (pure if decoding else mixed).append(1000 * (rows[index + 1][0] - rows[index][0]))
        if not pure and not mixed:
            return {}
        found: dict[str, Any] = {
            "steps": len(rows),
            "sequences": round(statistics.mean(row[1] for row in rows), 1),
            "mixed_share": round(sum(a != b for _, a, b in rows) / len(rows), 4),
        }
        for name, values in (("pure_ms", pure), ("mixed_ms", mixed)):
            if values:
                found[name] = round(statistics.median(values), 2)
                found[name.replace("ms", "mean_ms")] = round(statistics.mean(values), 2)
        return found


def tokens_of(key: Any) -> int:
    """The number of tokens in a key of vLLM's table of graphs: the number itself, or the first of a tuple."""
    return key[0] if isinstance(key, tuple) else key


if __name__ == "__main__":
    main()
