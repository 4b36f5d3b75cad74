"""`pods submit`: a run sent to a cluster's job server, and the log and exit code that come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pods_cluster
from pods_cluster.client.bundle import Bundle, bundle_of
from pods_cluster.client.deadline import call_within
from pods_cluster.config import load_config
from pods_cluster.run.ray_access import token_hint, use_ray_token
from pods_cluster.telemetry.number_format import first_line

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
POLL_SECONDS = 1.0
CALL_SECONDS = 30.0
"""A question to the job server has no deadline of its own."""
UPLOAD_SECONDS = 600.0
AGENT_SECONDS = 60.0
"""A cluster that has just started takes no jobs until an agent has come up on one of its nodes."""
SILENT_SECONDS = 30.0
"""After so long without output the job server is asked whether it is still there."""
BROKEN_LOGS = 10
"""The log of a job that breaks off so often without a word between is given up."""
FINAL_SECONDS = 30.0
"""After its log has ended a job has this long to report how it ended."""


class JobError(Exception):
    """A job that cannot be submitted or followed; the text says why and what to do."""


@dataclass(slots=True)
class Job:
    """A job before it is sent: its files, its command, and its environment (whose values are never shown)."""

    name: str
    bundle: Bundle
    entrypoint: str
    run_dir: str
    env: dict[str, str] = field(default_factory=dict, repr=False)
    pip: list[str] = field(default_factory=list)

    def runtime_env(self, folder: Path) -> dict[str, Any]:
        """Ray's runtime environment, for files laid out in `folder`. This package always travels with its job, so that
        both sides have one version; what it depends on must be on the cluster, or in `pip`.
        """
        env: dict[str, Any] = {
            "working_dir": str(folder),
            "py_modules": [str(Path(pods_cluster.__file__).parent)],
            "env_vars": {"PYTHONUNBUFFERED": "1", **self.env},
        }
        if self.pip:
            env["pip"] = self.pip
        return env


def prepare(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    env: Sequence[str] = (),
    pip: Sequence[str] = (),
    include: Sequence[Path] = (),
    resume: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Check all that can be checked on this machine; sends nothing. Raises ConfigError, BundleError and JobError."""
    config = load_config(file, overrides)
    bundle = bundle_of(config, file, include)
    run_dir = str(Path(config.run.dir).expanduser().absolute())
    # A job's own folder is deleted with it: what a run leaves behind must lie elsewhere.
    arguments = [str(file.resolve().relative_to(bundle.root)), *overrides, f"run.dir={run_dir}", "--plain"]
    if resume:
        arguments.append("--resume")
    return Job(
        config.run.name,
        bundle,
        "python -m pods_cluster.client.cli train " + shlex.join(arguments),
        run_dir,
        _forwarded(env, os.environ if environment is None else environment),
        _requirements(pip),
    )


def submit(job: Job, address: str | None = None) -> tuple[Any, str]:
    """Send the job; returns the client and the submission's id. Raises JobError."""
    client = connect(address)
    with tempfile.TemporaryDirectory(prefix="pods-submit-") as folder:
        job.bundle.copy_to(Path(folder))
        deadline = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                return client, call_within(UPLOAD_SECONDS, lambda: _send(client, job, Path(folder)))
            except Exception as error:  # requests' and ray's own kinds, each with a text for people
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise JobError(f"the job was not taken: {_hide(str(error), job.env)}") from None
            time.sleep(POLL_SECONDS)


def _send(client: Any, job: Job, folder: Path) -> str:
    return client.submit_job(
        entrypoint=job.entrypoint,
        submission_id=f"{job.name}-{secrets.token_hex(4)}",
        runtime_env=job.runtime_env(folder),
        metadata={"run": job.name},
    )


def connect(address: str | None = None) -> Any:
    """Connect to the job server at `address` (default: RAY_API_SERVER_ADDRESS, else this machine's). Raises JobError."""
    use_ray_token()
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    try:
        from ray.job_submission import JobSubmissionClient

        for module in ("dashboard_sdk", "job.sdk"):  # they log every upload and the end of every log
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
        logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.WARNING)
        with _without("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray lets these win over what is asked for
            return call_within(CALL_SECONDS, lambda: JobSubmissionClient(address))
    except Exception as error:
        hint = token_hint(error) or "start one with `ray start --head`, or give --address http://HEAD:8265"
        raise JobError(f"{address}: no job server can be reached ({first_line(error)}); {hint}") from None


def follow(client: Any, submission: str, say: Callable[[str], None]) -> int:
    """Pass the job's log to `say` as it comes; afterwards its exit code (0: succeeded). Raises JobError."""
    from aiohttp import ClientError

    log, broken = _Log(client, submission, say), 0
    while True:
        before = log.said
        try:
            asyncio.run(log.tail())
            break
        except (OSError, RuntimeError, ClientError) as error:  # the connection broke: the job goes on
            if _details(client, submission) is None:
                raise JobError(
                    f"{submission}: the job server is gone ({first_line(error)}); the job may go on"
                ) from error
            broken = 1 if log.said > before else broken + 1
            if broken == BROKEN_LOGS:
                raise JobError(
                    f"{submission}: its log cannot be followed ({first_line(error)}); the job goes on, see "
                    f"`ray job logs {submission}`"
                ) from error
            time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + FINAL_SECONDS
    while True:
        details = _details(client, submission)
        if details is not None and details.status.is_terminal():
            return exit_code(str(details.status.value), details.driver_exit_code)
        if time.monotonic() > deadline:
            raise JobError(f"{submission}: its log has ended, but it does not say how it ended; see `ray job status`")
        time.sleep(POLL_SECONDS)


class _Log:
    """A job's log, passed on as it comes. A second `tail` goes on where the first one broke off."""

    def __init__(self, client: Any, submission: str, say: Callable[[str], None]) -> None:
        self._client, self._submission, self._say = client, submission, say
        self.said = 0
        """Characters passed on."""

    async def tail(self) -> None:
        """Pass on the log to its end. Raises ConnectionError where the server is silent and answers no question."""
        texts = self._client.tail_job_logs(self._submission)
        read = 0
        while True:
            following = asyncio.ensure_future(_next(texts))
            try:
                while not (await asyncio.wait({following}, timeout=SILENT_SECONDS))[0]:
                    if await self._has_ended():
                        return
            finally:
                following.cancel()
            text = following.result()
            if text is None:
                return
            read += len(text)
            if read > self.said:
                self._say(text[len(text) - (read - self.said) :])
                self.said = read

    async def _has_ended(self) -> bool:
        details = await asyncio.to_thread(_details, self._client, self._submission)
        if details is None:
            raise ConnectionError(f"silent for {SILENT_SECONDS:g} s, and no answer to a question")
        return details.status.is_terminal()


async def _next(texts: AsyncIterator[str]) -> str | None:
    return await anext(texts, None)


def exit_code(status: str, driver: int | None) -> int:
    """The exit code of a process that ends as the job did."""
    if status == "SUCCEEDED":
        return 0
    return driver if driver is not None and 0 < driver < 256 else 1


def _details(client: Any, submission: str) -> Any:
    with contextlib.suppress(Exception):
        return call_within(CALL_SECONDS, lambda: client.get_job_info(submission))
    return None


def _forwarded(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables by these names. Raises JobError."""
    for name in names:
        if "=" in name:
            shown = name.split("=", 1)[0]
            raise JobError(f"--env {shown}=…: give the name alone; its value is taken from here, and is not shown")
        if name not in environment:
            raise JobError(f"--env {name}: is not set here; export it first, or leave it out")
    return {name: environment[name] for name in names}


def _requirements(pip: Sequence[str]) -> list[str]:
    """Requirements, those of files read. Raises JobError."""
    found: list[str] = []
    for item in pip:
        if not item.endswith(".txt"):
            found.append(item)
            continue
        try:
            lines = Path(item).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise JobError(f"--pip {item}: cannot be read ({error.strerror}); correct the path") from None
        found += [text for line in lines if (text := line.split(" #")[0].strip()) and not text.startswith("#")]
    return found


def _hide(text: str, values: Mapping[str, str]) -> str:
    for value in values.values():
        if value:
            text = text.replace(value, "…")
    return text


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
