"""Train on parquet files in verl's form with a reward function of verl's signature, both unchanged.

A whole command line of verl: `pods import verl -o run.yaml -- python3 -m verl.trainer.main_ppo …` (docs/migrate.md).
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pods_cluster


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """GSM8K's: the number behind the last ####."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)


def main(train: str, model: str = "Qwen/Qwen2.5-0.5B-Instruct", **settings: Any) -> pods_cluster.TrainResult:
    """`train` is a parquet file with `prompt`, `reward_model`, `data_source` and `extra_info`."""
    defaults = {
        "run": {"name": "verl-data", "steps": 100},
        "generator": {"rollouts_per_prompt": 32, "max_tokens": 512},
        "selector": {"keep": 8},
    }
    return pods_cluster.train(model, train, compute_score, config=defaults, **settings)


if __name__ == "__main__":
    print(main(sys.argv[1]))
