"""How long a light copy keeps a learner rank from its steps: memory asked for by each copy, or made ready and kept.

    python -m benchmarks.state_copy [--rounds 3] [--out benchmarks/results/state_copy_cpu.json]

A trainer with DeepSpeed's state of a random model on a CPU, in a process of its own for each run; the two ways in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np

from benchmarks._groups import make_groups
from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.update import config_for
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.tiny_model import ModelSize, build_model

WAYS = ("asked for by each copy", "made ready and kept")
COPIES = 3


def copy_in_turn(folder: Path, way: str) -> dict[str, Any]:
    """Seconds of each copy between steps of a fresh trainer, and the bytes of its state."""
    from pods_cluster.learning import process_group
    from pods_cluster.learning.state_copy import StateCopier
    from pods_cluster.learning.step_plan import plan_settings, plan_step
    from pods_cluster.learning.trainer import Trainer

    config = config_for(folder, 1)
    store = process_group.open_store("127.0.0.1", 1, 60)
    process_group.join(0, 1, "127.0.0.1", store.port, store=store, timeout=60, collective_timeout=600)
    trainer = Trainer(config, 0, 1)
    _, kept, rollouts = make_groups(1, np.random.default_rng(0), vocabulary=16, prompt_tokens=8, longest=12)
    plan = plan_step(kept, plan_settings(config, packed=trainer.packed))
    copier, seconds = StateCopier(), []
    for number in range(COPIES):
        trainer.train(plan.ranks[0], rollouts, 1e-6)
        if way == WAYS[1]:
            copier.prepare(trainer, 1)
            trainer.train(plan.ranks[0], rollouts, 1e-6)
        report = copier.begin(trainer, folder / f"copy-{number}", 1)
        copier._join()
        if report.fault:
            raise SystemExit(report.fault)
        seconds.append(round(report.seconds, 3))
    nbytes = trainer.engine.optimizer_bytes()
    process_group.leave()
    return {"seconds": seconds, "bytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(copy_in_turn(Path(options.child[0]), options.child[1])))
        return
    on = machine()
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    nbytes = 0
    for _ in range(options.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="state-copy-") as folder:
                tokenizer = build_tokenizer()
                tokenizer.save_pretrained(folder)
                build_model(ModelSize(768, options.layers, 12, 3072), tokenizer, seed=0).save_pretrained(folder)
                command = [sys.executable, "-m", "benchmarks.state_copy", "--child", folder, way]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
                if ended.returncode:
                    raise SystemExit(ended.stderr[-2000:])
                told = json.loads(ended.stdout.splitlines()[-1])
            found[way].append(told["seconds"])
            nbytes = told["bytes"]
            print(way, told["seconds"], flush=True)
    result: dict[str, Any] = {"benchmark": "state_copy", "machine": on, "state_bytes": nbytes, "seconds": found}
    for name, part in (("first", slice(0, 1)), ("later", slice(1, None))):
        medians = [statistics.median(s for run in found[way] for s in run[part]) for way in WAYS]
        result[name] = {
            "median_seconds": dict(zip(WAYS, medians, strict=True)),
            "times": round(medians[0] / medians[1], 2),
        }
        print(f"{name} copies: {medians[0]:.2f} s and {medians[1]:.2f} s, {medians[0] / medians[1]:.2f} times as quick")
    if options.out:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
