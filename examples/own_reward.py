"""Train on rows of a list with a reward function of one's own: shorter answers that hold the right number."""

from __future__ import annotations

import re
from typing import Any

import pods_cluster

ROWS = [{"prompt": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(2, 30) for b in range(2, 30)]


def short_and_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """One point for the right last number, less a thousandth for each letter."""
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        numbers = re.findall(r"-?\d+", text.replace(",", ""))
        scores.append(float(bool(numbers) and numbers[-1] == gold) - 0.001 * len(text))
    return scores


def show(step: dict[str, Any]) -> None:
    """Called after each step; one that raises StopIteration ends the run with its state saved."""
    if "reward" in step:
        print(f"step {step['step']}: mean reward {step['reward']:.3f}")


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct", **settings: Any) -> pods_cluster.TrainResult:
    """`settings` are fields of the configuration, nested or dotted."""
    defaults = {
        "run": {"name": "own-reward", "steps": 50},
        "generator": {"rollouts_per_prompt": 32, "max_tokens": 128},
        "selector": {"keep": 8},
        "learner": {"prompts_per_step": 8, "learning_rate": 2e-6},
    }
    result = pods_cluster.train(
        model,
        dataset=ROWS[100:],
        eval_dataset=ROWS[:100],
        reward=[short_and_right, {"name": "math_answer", "weight": 0.0}],
        callbacks=show,
        config=defaults,
        **settings,
    )
    print(result)
    return result


if __name__ == "__main__":
    main()
