"""Environments for the tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from pods_cluster.environments import Environment


class Counting(Environment):
    """Answers with the number of the turn and a plus, ends after `turns` of them, and rewards each digit that it was told."""

    def __init__(self, turns: int = 3, says: str | None = None) -> None:
        self.turns, self.says, self.digits, self.number = turns, says, 0, 0

    def reset(self, row: Mapping[str, Any]) -> None:
        self.answer = row["answer"]

    def step(self, completion: str) -> str | None:
        self.number += 1
        self.digits += sum(letter.isdigit() for letter in completion)
        return (self.says or f"{self.number}+") if self.number < self.turns else None

    async def reward(self) -> float:
        return float(self.digits)


class Faulty(Environment):
    """Fails in the way that it is told to, in the first turn or by its row."""

    def __init__(self, way: str | None = None, memory: int = 0) -> None:
        self.way, self.memory = way, memory

    def first_prompt(self, row: Mapping[str, Any]) -> str | None:
        return row.get("asks")

    def reset(self, row: Mapping[str, Any]) -> None:
        self.way = row.get("way", self.way)

    def step(self, completion: str) -> Any:
        way = self.way or completion
        if way == "raise":
            raise ValueError("no answer to this")
        if way == "hang":
            time.sleep(600)
        if way == "die":
            os._exit(3)
        if way == "eat":
            self.held = b"a" * self.memory
            time.sleep(600)
        if way == "leave":
            subprocess.Popen(["sleep", "86397"], start_new_session=True)
        if way == "number":
            return 5
        if way == "fork":
            os.fork()
        if way == "fork and exit" and os.fork() == 0:
            raise SystemExit(0)
        if way == "print":
            print("here I am")
        return "and?" if way == "go on" else None

    def reward(self) -> float:
        return float("nan") if self.way == "nan" else 0.5
