"""Why a generator that is the bound is not full: batches drain. A simulation of the loop, step by step of the engine.

    python -m benchmarks.drain [--base 0.008 --per-sequence 14e-6 --update 2 …]

An engine of `slots` sequences makes one token of each in base + per-sequence x running seconds; a group is complete when
its longest rollout is; the learner takes the oldest P groups together, and P new ones are issued when it is done. With
staleness k, P x (k + 1) groups are out. Lengths are log-normal up to a limit; some groups have no signal and are
replaced. The defaults are near what Qwen2.5-Coder-0.5B did on GSM8K on H200s (docs/gsm8k-gpu.md), where 14.9 s a step were
measured at k = 0 and 10.3 to 11.0 at k = 1. Writes `benchmarks/results/drain.json`.
"""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._result_file import write_result

RESULT = Path(__file__).parent / "results" / "drain.json"
SKIP = 4
"""First steps that are left out: the queue fills."""


def simulate(k: int, options: argparse.Namespace) -> dict[str, float]:
    """Seconds a step and tokens a second at staleness k."""
    rng = np.random.default_rng(options.seed)
    waiting: deque[tuple[int, int]] = deque()
    left: dict[int, int] = {}  # unfinished rollouts of the groups that are out, in the order of issue
    remaining, group = np.zeros(0, np.int64), np.zeros(0, np.int64)
    issued, now, tokens = 0, 0.0, 0
    done_at: float | None = None
    ends: list[float] = []
    made: list[int] = []

    def issue(groups: int) -> None:
        nonlocal issued
        for _ in range(groups):
            lengths = rng.lognormal(np.log(options.length), options.sigma, options.rollouts)
            waiting.extend((int(length), issued) for length in np.clip(lengths, 1, options.longest))
            left[issued] = options.rollouts
            issued += 1

    issue(options.prompts * (k + 1))
    while len(ends) < options.steps:
        free = options.slots - len(remaining)
        if free and waiting:
            taken = np.array([waiting.popleft() for _ in range(min(free, len(waiting)))])
            remaining, group = np.concatenate([remaining, taken[:, 0]]), np.concatenate([group, taken[:, 1]])
        if len(remaining):
            now += options.base + options.per_sequence * len(remaining)
            tokens += len(remaining)
            remaining -= 1
            for finished in group[remaining == 0].tolist():
                left[finished] -= 1
                if not left[finished] and rng.random() < options.no_signal:
                    del left[finished]
                    issue(1)
            remaining, group = remaining[(alive := remaining > 0)], group[alive]
        elif done_at is not None:
            now = done_at
        if done_at is not None and now >= done_at:
            done_at = None
            ends.append(now)
            made.append(tokens)
            issue(options.prompts * (k + 1) - len(left))
        if done_at is None:
            oldest = list(left)[: options.prompts]
            if not any(left[item] for item in oldest):
                for item in oldest:
                    del left[item]
                done_at = now + options.update
    seconds = ends[-1] - ends[SKIP - 1]
    return {
        "staleness": k,
        "seconds_per_step": round(seconds / (len(ends) - SKIP), 2),
        "tokens_per_second": round((made[-1] - made[SKIP - 1]) / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--base", type=float, default=0.008, help="seconds of an engine step without sequences")
    parser.add_argument("--per-sequence", type=float, default=14e-6)
    parser.add_argument("--update", type=float, default=2.0)
    parser.add_argument("--length", type=float, default=257.0, help="median tokens of a rollout")
    parser.add_argument("--sigma", type=float, default=0.35)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--no-signal", type=float, default=0.12, help="share of groups that are replaced")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    full = options.slots / (options.base + options.per_sequence * options.slots)
    rows: list[dict[str, Any]] = [simulate(k, options) for k in range(4)]
    for row in rows:
        row["share_of_full_rate"] = round(row["tokens_per_second"] / full, 3)
        print(row)
    write_result(RESULT, {"settings": vars(options), "full_rate": round(full), "rows": rows})


if __name__ == "__main__":
    main()
