"""Rewards as a YAML file would give them, and a user's file of rewards that do what the completion says."""

from __future__ import annotations

from typing import Any

from pods_cluster.config import RewardConfig
from pods_cluster.scoring import ScoreRequest


def reward(name: str, **fields: Any) -> RewardConfig:
    return RewardConfig(name=name, **fields)


USER = '''
import math, os, signal, time

def moody(prompts, completions, **kwargs):
    """Does what the completion says."""
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "spin":
            9 ** 9 ** 9 ** 9
        if text == "exit":
            os._exit(3)
        if text == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise KeyError("no such thing")
        if text == "sys.exit":
            raise SystemExit(2)
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
    special = {"none": None, "nan": math.nan, "inf": math.inf, "text": "high", "high": 5.0}
    values = [special.get(text, 1.0) for text in completions]
    return values + [1.0] if "long list" in completions else values

def number(prompts, completions, **kwargs):
    return 1.0

def pid(prompts, completions, **kwargs):
    return [float(os.getpid()) for _ in completions]

def rows_in_call(prompts, completions, **kwargs):
    moody(prompts, completions)
    return [float(len(completions))] * (len(completions) + ("long list" in completions))

def child_pid(prompts, completions, **kwargs):
    import subprocess, sys
    return [float(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid) for _ in completions]

def has_heavy(prompts, completions, **kwargs):
    import sys
    heavy = ("torch", "ray", "transformers", "numpy", "pydantic")
    return [float(any(name in sys.modules for name in heavy)) for _ in completions]

def prints(prompts, completions, **kwargs):
    print("printed by a reward")
    return [1.0 for _ in completions]
'''
"""A user's file."""


def request(completion: str, **kwargs) -> ScoreRequest:
    return ScoreRequest("prompt", completion, **kwargs)
