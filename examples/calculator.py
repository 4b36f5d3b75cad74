"""Train a model to work word problems out with a calculator: a tool that it calls, over several turns.

python examples/calculator.py                                   # on the rows below
python examples/calculator.py Qwen/Qwen2.5-1.5B-Instruct gsm8k/train.jsonl   # on GSM8K: a file of question and answer
"""

from __future__ import annotations

import ast
import operator
import sys
from typing import Any

import pods_cluster

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
SYSTEM = "Work the problem out with the calculator. Then give the number that was asked for, after ####."


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / and brackets, as in (3 + 4) * 2.
    """
    return f"{_value(ast.parse(expression, mode='eval').body):.10g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / and brackets are known")


def rows() -> list[dict[str, str]]:
    """Word problems in GSM8K's form: a question, and an answer that ends with #### and the number."""
    problems = []
    for boxes in range(3, 30):
        for each in range(12, 40, 3):
            question = f"A shop has {boxes} boxes with {each} pencils each, and sells {each - 5}. How many are left?"
            answer = f"{boxes} * {each} = {boxes * each}. {boxes * each} - {each - 5} = {boxes * each - each + 5}."
            problems.append({"question": question, "answer": f"{answer}\n#### {boxes * each - each + 5}"})
    return problems


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct", data: Any = None, **settings: Any) -> pods_cluster.TrainResult:
    """`data`: a file or a list of rows; left out: `rows()`. `settings` are fields of the configuration, nested or dotted."""
    defaults = {
        "run": {"name": "calculator", "steps": 100},
        "data": {"prompt": "question", "answer": "answer", "system": SYSTEM, "max_prompt_tokens": 512},
        "environment": {
            "name": "pods_cluster.environments:ToolEnvironment",
            "options": {"tools": [f"{__file__}:calculate"]},
            "max_turns": 4,
        },
        "generator": {"rollouts_per_prompt": 32, "max_tokens": 512},
        "selector": {"keep": 8},
        "learner": {"prompts_per_step": 8, "learning_rate": 2e-6, "tokens_per_microbatch": 8192},
    }
    return pods_cluster.train(model, rows() if data is None else data, "math_answer", config=defaults, **settings)


if __name__ == "__main__":
    print(main(*sys.argv[1:3]))
