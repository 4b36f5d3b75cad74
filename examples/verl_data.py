r"""A reward function of verl's signature, for parquet files in verl's form; both are used as they are.

verl's quick start on GSM8K in one command, from verl's own words (its examples/data_preprocess/gsm8k.py has made the files):

    pods import verl --train -- python3 -m verl.trainer.main_ppo \
        data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
        data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512 \
        algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.4 trainer.n_gpus_per_node=1 trainer.total_epochs=15 \
        custom_reward_function.path=examples/verl_data.py

Without the last word the reward is the built-in one of GSM8K, as in verl.
"""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """GSM8K's: the number behind the last ####."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)
