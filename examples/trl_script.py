# pyright: reportPrivateImportUsage=false
"""TRL's quick start (docs/source/grpo_trainer.md there) with one line changed: the import of the trainer.

Start it with `python`, not with `accelerate launch`. PODS is an argument more: with args=GRPOConfig(num_generations=16) and
config={"selector.keep": 4} sixteen rollouts are made of each prompt and four are trained. Without TRL installed the reward
comes from pods_cluster.trl.rewards.
"""

from datasets import load_dataset
from trl.rewards import accuracy_reward

from pods_cluster.trl import GRPOTrainer  # was: from trl import GRPOTrainer

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
