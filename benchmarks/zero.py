"""The learner by ZeRO stage, ranks and options: the same training, peak memory of a rank, and what m of n saves.

    python -m benchmarks.zero MODEL [--gpus 2] [--arms one,zero1,…] [--out benchmarks/results/zero_x.json]
    python -m benchmarks.zero MODEL --repeats 0 --at-once 4                        (numbers and memory alone, four arms at a time)
    python -m benchmarks.zero MODEL --gpus 4 --at-once 2 --arms one,zero2,zero2-four     (timed: no card is used by two arms)
    python -m benchmarks.zero MODEL --gpus 0 --arms zero2,zero3 --groups 2 --longest 32 --budget 512     (two CPU processes)

Each arm starts its ranks anew, one process a card. All train the same made-up groups of 64, binary rewards, `bfloat16` with
float32 master weights (float32 on a CPU): `--steps` steps on the m = 16 kept, whose gradient norms and entropies are compared
with those of the first arm (one update a batch: the loss itself is 0, as the advantages of a group add up to 0); then the
update on the kept and on all 64 in turn (`--repeats` times). Arms that run at once take the cards that are used least; where
they are timed, they wait until theirs are free. `peak_gb` is the most that a rank's allocator held in those steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ARMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"zero_stage": 2}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (2, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "zero2-fused": (2, {"zero_stage": 2, "optimizer": "adamw_fused"}),
    "zero2-checkpointing": (2, {"zero_stage": 2, "gradient_checkpointing": True}),
    "zero2-offload": (2, {"zero_stage": 2, "offload_optimizer": True}),
    "zero3-offload": (2, {"zero_stage": 3, "offload_optimizer": True}),
    "zero2-lora": (2, {"zero_stage": 2, "lora": {"rank": 64, "alpha": 64}}),
    "zero2-8bit": (2, {"zero_stage": 2, "optimizer": "adamw_8bit"}),
    "zero2-four": (4, {"zero_stage": 2}),
    "zero3-four": (4, {"zero_stage": 3}),
}


class Cards:
    """The machine's cards, the least used first; `alone`: no two arms on one."""

    def __init__(self, count: int, alone: bool) -> None:
        self._users = [0] * count
        self._alone = alone
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[list[int]]:
        if count > len(self._users):
            raise ValueError(f"needs {count} cards, --gpus is {len(self._users)}")
        with self._changed:
            while True:
                chosen = sorted(range(len(self._users)), key=lambda card: (self._users[card], card))[:count]
                if not (self._alone and any(self._users[card] for card in chosen)):
                    break
                self._changed.wait()
            for card in chosen:
                self._users[card] += 1
        try:
            yield chosen
        finally:
            with self._changed:
                for card in chosen:
                    self._users[card] -= 1
                self._changed.notify_all()


def rank_main(arm: str, rank: int, port: int, arguments: argparse.Namespace) -> None:
    """One rank of an arm; rank 0 prints the result as its last line."""
    import numpy as np
    import torch

    from benchmarks._groups import M, N, make_groups
    from pods_cluster.config import build_config
    from pods_cluster.learning import process_group
    from pods_cluster.learning.step_plan import plan_settings, plan_step
    from pods_cluster.learning.trainer import Trainer

    ranks, learner = ARMS[arm]
    gpu = torch.cuda.is_available()
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    process_group.join(rank, ranks, "127.0.0.1", port, store=None, timeout=120, collective_timeout=300)
    config = build_config(
        {
            "model": {"path": str(arguments.model), "dtype": "bfloat16" if gpu else "float32"},
            "data": {"path": "rows.jsonl", "max_prompt_tokens": arguments.prompt},
            "reward": [{"name": "math_answer"}],
            "generator": {"engine": "transformers", "rollouts_per_prompt": N, "max_tokens": arguments.longest},
            "selector": {"keep": M},
            "learner": {
                "prompts_per_step": arguments.groups,
                "tokens_per_microbatch": arguments.budget,
                "workers": ranks,
                "correction": {"mode": "off"},
                **learner,
            },
            "run": {"name": "benchmark", "steps": 1000},
        }
    )
    trainer = Trainer(config, rank, ranks)
    everyone, kept, rollouts = make_groups(
        arguments.groups,
        np.random.default_rng(0),
        vocabulary=vocabulary,
        prompt_tokens=arguments.prompt,
        longest=arguments.longest,
    )
    settings = plan_settings(config, packed=trainer.packed)
    plans = {"all": plan_step(everyone, settings), "kept": plan_step(kept, settings)}
    norms: list[float] = []
    entropies: list[float] = []
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments.steps):
        result = trainer.train(plans["kept"].ranks[rank], rollouts, arguments.rate)
        norms.append(result.grad_norms[-1])
        entropies.append(result.stats.sums["entropy"])
    peak = torch.cuda.max_memory_allocated() / 1e9 if gpu else None
    seconds: dict[str, list[float]] = {"all": [], "kept": []}
    for _ in range(arguments.repeats):
        for name, plan in plans.items():
            if gpu:
                torch.cuda.synchronize()
            torch.distributed.barrier()
            began = time.monotonic()
            trainer.train(plan.ranks[rank], rollouts, arguments.rate)
            if gpu:
                torch.cuda.synchronize()
            seconds[name].append(time.monotonic() - began)
    total = torch.tensor(entropies, dtype=torch.float64, device="cuda" if gpu else "cpu")
    torch.distributed.all_reduce(total)  # the ranks' sums are shares of the step's
    found = {
        "ranks": ranks,
        "learner": learner,
        "grad_norms": norms,
        "entropies": (total / plans["kept"].trained_tokens).tolist(),
        "peak_gb": peak,
        "optimizer_gb": trainer.engine.optimizer_bytes() / 1e9,
        "token_ratio": plans["kept"].trained_tokens / plans["all"].trained_tokens,
        "tokens": sum(part.tokens for part in plans["all"].ranks),
    }
    if arguments.repeats:
        found["seconds"] = {name: round(statistics.median(times), 4) for name, times in seconds.items()}
        found["ratio"] = statistics.median(k / a for k, a in zip(seconds["kept"], seconds["all"], strict=True))
    if rank == 0:
        print(json.dumps(found))
    process_group.leave()


def run_arm(arm: str, arguments: argparse.Namespace, cards: Cards) -> dict[str, Any]:
    ranks, _ = ARMS[arm]
    if not arguments.gpus:
        return run_ranks(arm, arguments, [{"DS_ACCELERATOR": "cpu"}] * ranks)
    try:
        with cards.take(ranks) as chosen:
            places = [{"CUDA_VISIBLE_DEVICES": str(card), "DS_ACCELERATOR": "cuda"} for card in chosen]
            return run_ranks(arm, arguments, places)
    except ValueError as error:
        return {"ranks": ranks, "error": str(error)}


def run_ranks(arm: str, arguments: argparse.Namespace, places: list[dict[str, str]]) -> dict[str, Any]:
    """`places`: a rank's environment."""
    from pods_cluster.learning import process_group

    ranks = len(places)
    store = process_group.open_store("127.0.0.1", ranks, 120)
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder) / f"{rank}.log").open("w+") for rank in range(ranks)]
        calls = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.zero", *sys.argv[1:], "--rank", f"{arm}:{rank}:{store.port}"],
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                env={**os.environ, **place},
            )
            for rank, place in enumerate(places)
        ]
        try:
            codes = [call.wait(arguments.timeout) for call in calls]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for call in calls:
                call.kill()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    if any(codes):
        return {"ranks": ranks, "error": "\n".join(text[-600:] for text in texts)}
    return json.loads(texts[0].strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--arms", default="one,zero1,zero2,zero3,zero2-fused,zero2-checkpointing,zero2-lora,zero2-offload"
    )
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, default=1e-6, help="learning rate; a high one makes noise of rounding chaos"
    )
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [arm for arm in arguments.arms.split(",") if arm not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)}: unknown; there are {', '.join(ARMS)}")
    if arguments.at_once > 1 and arguments.repeats and not arguments.gpus:
        parser.error("--at-once: arms that share processors cannot be timed; add --repeats 0")
    if arguments.rank:
        arm, rank, port = arguments.rank.split(":")
        rank_main(arm, int(rank), int(port), arguments)
        return
    from benchmarks._machine import machine
    from benchmarks._result_file import write_result

    shape = {
        name: getattr(arguments, name) for name in ("groups", "prompt", "longest", "budget", "steps", "rate", "at_once")
    }
    result: dict[str, Any] = {
        "benchmark": "zero",
        "machine": machine(),
        "model": arguments.model.name,
        **shape,
        "arms": {},
    }
    first: dict[str, Any] = {}
    arms = arguments.arms.split(",")
    cards = Cards(arguments.gpus, alone=arguments.repeats > 0)
    with ThreadPoolExecutor(arguments.at_once) as threads:
        for arm, found in zip(arms, threads.map(lambda arm: run_arm(arm, arguments, cards), arms), strict=True):
            if "error" not in found:
                first = first or found
                for name in ("grad_norms", "entropies"):
                    pairs = zip(found[name], first[name], strict=True)
                    found[f"{name}_differ_by"] = max(abs(a - b) / abs(b) for a, b in pairs)
            result["arms"][arm] = found
            shown = {key: value for key, value in found.items() if not isinstance(value, list)}
            print(arm, json.dumps(shown), flush=True)
            if arguments.out:
                write_result(arguments.out, result)


if __name__ == "__main__":
    main()
