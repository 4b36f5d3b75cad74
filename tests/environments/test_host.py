"""Environments in their processes: each fails alone, is ended with what it started, and tells why."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.config import EnvironmentConfig
from pods_cluster.environments.host import EnvironmentFailed, EnvironmentHost, EnvironmentStartError
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_output import ScorerOutput

PLAYED = Path(__file__).parent / "played.py"


@pytest.fixture(scope="module")
def output() -> ScorerOutput:
    return ScorerOutput(["reward", "environment"])


@pytest.fixture(scope="module")
def host(output: ScorerOutput) -> Iterator[EnvironmentHost]:
    options = {"memory": 200 << 20}
    config = EnvironmentConfig(name=f"{PLAYED}:Faulty", options=options, timeout=4.0, memory_limit=0.1)
    host = EnvironmentHost(config, 120.0, output, speaker=1)
    yield host
    host.close()


async def play(host: EnvironmentHost, way: str) -> Any:
    environment = await host.begin()
    try:
        await environment.call("reset", {"answer": None})
        found = await environment.call("step", way), await environment.call("reward")
    except EnvironmentFailed as failure:
        environment.kill()
        return failure.kind, failure.message
    await environment.close()
    return found


def test_one_that_raises_hangs_dies_or_eats_memory_fails_alone(host: EnvironmentHost, output: ScorerOutput) -> None:
    ways = ["go on", "raise", "hang", "die", "eat", "number", "leave", "print", "fork", "fork and exit", "end"]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(play(host, way) for way in ways))

    found = dict(zip(ways, host.run(all_at_once()).result(60), strict=True))
    assert found["go on"] == ([{"role": "user", "content": "and?"}], 0.5)
    assert found["end"] == found["print"] == found["leave"] == ([], 0.5)
    assert found["fork"] == found["fork and exit"] == ([], 0.5), "the fork does not answer in its place"
    kinds = {way: found[way][0] for way in ("raise", "hang", "die", "eat", "number")}
    assert kinds == {
        "raise": FailureKind.ERROR,
        "hang": FailureKind.TIMEOUT,
        "die": FailureKind.DIED,
        "eat": FailureKind.MEMORY,
        "number": FailureKind.ERROR,
    }
    assert found["raise"][1].startswith("step(): ValueError: no answer to this (played.py:")
    assert "environment.timeout" in found["hang"][1]
    assert "exit code 3" in found["die"][1]
    assert "environment.memory_limit: 0.1" in found["eat"][1]
    assert "returned a int, expected a text, messages or None" in found["number"][1]
    deadline = time.monotonic() + 20
    while ended("sleep 86397") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not ended("sleep 86397"), "what it had started ends with it"
    assert [(line.reward, line.text) for line in output.read().lines] == [("environment", "here I am")]


def ended(command: str) -> bool:
    return subprocess.run(["pgrep", "-f", command], capture_output=True, check=False).returncode == 0


def test_a_host_that_died_is_started_again_with_the_next_environment(host: EnvironmentHost) -> None:
    first = host.run(host.begin()).result(60)
    process = host._process
    assert process is not None
    os.kill(process.pid, 9)
    process.wait(10)
    deadline, failure = time.monotonic() + 20, None
    while failure is None and time.monotonic() < deadline:  # it ends with the host, in a moment
        try:
            host.run(first.call("step", "end")).result(60)
        except EnvironmentFailed as error:
            failure = error.kind
    assert failure is FailureKind.DIED
    assert host.run(play(host, "end")).result(60) == ([], 0.5)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        (f"{PLAYED}:os", {}, "derives from pods_cluster.environments.Environment"),
        (f"{PLAYED}:Faulty", {"speed": 3}, "unexpected keyword argument 'speed'"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(EnvironmentStartError, match=r"^environment\.name") as error:
        EnvironmentHost(EnvironmentConfig(name=name, options=options), 120.0)
    assert problem in str(error.value)
