"""No job server, however silent, keeps `pods submit` waiting without end."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from pods_cluster.client import jobs
from pods_cluster.client.bundle import Bundle
from pods_cluster.client.deadline import call_within
from pods_cluster.client.jobs import JobError


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("CALL", 0.3), ("SILENT", 0.05), ("POLL", 0.01), ("FINAL", 0.3)):
        monkeypatch.setattr(jobs, f"{name}_SECONDS", seconds)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_is_given_up(silent_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(JobError, match=rf"{silent_server}: no job server can be reached \(no answer in 0\.3 s\)"):
        jobs.connect(silent_server)


def test_a_call_that_raises_or_hangs() -> None:
    assert call_within(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        call_within(0.05, lambda: time.sleep(30))


class Server:
    """A job server's answers: `logs` are what each connection to the log brings, `details` what it says of the job."""

    def __init__(self, logs: list[list[str | Exception | None]], details: Callable[[], Any]) -> None:
        self.logs = logs
        self.get_job_info = lambda submission: details()

    async def tail_job_logs(self, submission: str) -> AsyncIterator[str]:
        for text in self.logs.pop(0) if len(self.logs) > 1 else self.logs[0]:
            if text is None:
                await asyncio.sleep(3600)  # silent, but open
            elif isinstance(text, Exception):
                raise text
            else:
                yield text


def details(status: JobStatus, code: int | None = None) -> Callable[[], Any]:
    return lambda: SimpleNamespace(status=status, driver_exit_code=code)


def follow(server: Server) -> tuple[int, str]:
    said: list[str] = []
    return jobs.follow(server, "job", said.append), "".join(said)


def test_a_log_goes_on_where_its_connection_broke() -> None:
    logs: list[list[str | Exception | None]] = [["one\n", "tw", RuntimeError("closed")], ["one\ntwo\n", "three\n"]]
    assert follow(Server(logs, details(JobStatus.SUCCEEDED))) == (0, "one\ntwo\nthree\n")


def test_a_silent_log_of_a_job_that_has_ended_is_no_longer_waited_for() -> None:
    assert follow(Server([["last\n", None]], details(JobStatus.FAILED, 3))) == (3, "last\n")


def test_a_silent_log_of_a_server_that_is_gone() -> None:
    def gone() -> Any:
        raise ConnectionError("refused")

    with pytest.raises(JobError, match=r"job: the job server is gone \(silent for 0\.05 s.*the job may go on"):
        follow(Server([["first\n", None]], gone))


def test_a_server_that_hangs_in_the_middle() -> None:
    with pytest.raises(JobError, match=r"the job server is gone"):
        follow(Server([[None]], lambda: time.sleep(30)))


def test_a_log_that_always_breaks_off_is_given_up() -> None:
    server = Server([[RuntimeError("404")]], details(JobStatus.RUNNING))
    with pytest.raises(JobError, match=r"its log cannot be followed \(404\); the job goes on, see `ray job logs job`"):
        follow(server)


def test_a_job_that_never_reports_its_end() -> None:
    with pytest.raises(JobError, match="does not say how it ended"):
        follow(Server([["log\n"]], details(JobStatus.RUNNING)))


class NotReady:
    """A job server whose cluster has no agent yet, for the first `times` submissions."""

    def __init__(self, times: float, text: str = "No available agent to submit job, please try again later.") -> None:
        self.times, self.text, self.asked = times, text, 0

    def submit_job(self, *, submission_id: str, **_: Any) -> str:
        self.asked += 1
        if self.asked <= self.times:
            raise RuntimeError(f"Request failed with status code 500: {self.text}")
        return submission_id


@pytest.fixture
def job(tmp_path: Path) -> jobs.Job:
    return jobs.Job("run", Bundle(tmp_path, (), 0), "true", str(tmp_path))


def test_a_cluster_that_has_just_started_is_asked_again(job: jobs.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NotReady(2)
    monkeypatch.setattr(jobs, "connect", lambda address: server)
    assert jobs.submit(job)[1].startswith("run-")
    assert server.asked == 3


def test_other_refusals_and_a_cluster_that_stays_without_agents(job: jobs.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AGENT_SECONDS", 0.05)
    for server, text in ((NotReady(math.inf), "No available agent"), (NotReady(1, "no such file"), "no such file")):
        monkeypatch.setattr(jobs, "connect", lambda address, server=server: server)
        with pytest.raises(JobError, match=f"the job was not taken: .*{text}"):
            jobs.submit(job)
    assert server.asked == 1
