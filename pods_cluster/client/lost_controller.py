"""The end of a run whose controller is gone, made by its driver: its actors, its folder, and how it ended."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.run.errors import RunError
from pods_cluster.run.live_file import remove_live_file
from pods_cluster.run.run_actors import end_actors
from pods_cluster.telemetry.jsonl import JsonLinesWriter
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError

END_SECONDS = 60.0
"""Time in which the processes of a lost controller have to be gone."""
POLL_SECONDS = 0.25


class ControllerLost(RunError):
    """The run's controller died, or does not answer and was killed; another one can go on from the newest saved state."""


def end_run(config: Config) -> RunFolder:
    """End every actor of the run, and wait until none of its processes holds the run's folder any more.

    Raises RunError and RunFolderError where they do not end.
    """
    end_actors(config.run.name, END_SECONDS)
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            with folder.lock():
                return folder
        except RunFolderError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def say_how_it_ended(config: Config, error: Exception, step: int) -> None:
    """Write the last event of a run, which its controller did not write any more, and remove its live file.

    Nothing is raised: the caller raises what ended the run.
    """
    with contextlib.suppress(Exception):
        folder = end_run(config)
        elapsed = max((record["elapsed"] for record in folder.read_metrics()), default=0.0)
        event = {"time": round(time.time(), 3), "elapsed": elapsed, "step": step, "kind": "failed", "level": "error"}
        with folder.lock():
            JsonLinesWriter(folder.events).write(event | {"text": str(error)})
        remove_live_file(folder)
