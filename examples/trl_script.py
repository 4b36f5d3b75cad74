"""TRL's GRPO example with two imports changed; sixteen rollouts are made of each prompt and four are trained (PODS)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, load_dataset

from pods_cluster.trl import GRPOConfig, GRPOTrainer
from pods_cluster.trl.rewards import accuracy_reward


def main(
    model: str = "Qwen/Qwen2.5-0.5B-Instruct", dataset: Dataset | None = None, config: dict[str, Any] | None = None
) -> GRPOTrainer:
    """`config` are fields of the configuration that go before those of `args`."""
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=accuracy_reward,
        args=GRPOConfig(num_generations=16, per_device_train_batch_size=128, max_steps=100, max_completion_length=512),
        train_dataset=dataset or load_dataset("trl-lib/DeepMath-103K", split="train"),
        config={"selector.keep": 4, **(config or {})},
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
