"""Refusals of `pods train` before Ray is started: seconds earlier than the run itself would. Imports no ray."""

from __future__ import annotations

import time
from collections.abc import Callable

from pods_cluster.client.paths import run_folder
from pods_cluster.client.run_state import END_EVENTS, START_EVENTS
from pods_cluster.config import Config, ConfigError
from pods_cluster.run import checkpoints
from pods_cluster.run.live_file import living_process, read_live_file
from pods_cluster.run.ray_access import check_reachable
from pods_cluster.scoring.reward_registry import check_rewards
from pods_cluster.selection.policy import selection_policy
from pods_cluster.telemetry.line_tail import newest
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError

ENDING_SECONDS = 30.0
"""Time in which the process of a run has to end whose Ray cluster is gone."""
MOMENT_SECONDS = 3.0
"""The same where its cluster is there: Ray ends it as soon as it notices that its command has ended."""
LOOK_SECONDS = 0.1


def refuse_start(config: Config, *, resume: bool) -> None:
    """Raise for a run that could not start: its folder holds another one, it is alive, or nothing is left to do.

    Raises RunFolderError, CheckpointError, RewardConfigError and UnknownRuleError.
    """
    check_names(config, own_rule=False)  # a user's own is imported in the run, where that has a deadline
    folder = RunFolder(run_folder(config.run.dir) / config.run.name)
    if process := outlasting_process(folder) if resume else living_process(folder):
        raise RunFolderError(
            f"{folder.path}: this run is alive (process {process}); see it with `pods status {folder.path}`, end it with "
            f"`pods stop {folder.path}`, or choose another run.name"
        )
    if not resume:
        RunFolder.refuse_occupied(run_folder(config.run.dir), config.run.name)
        return
    if finished := why_finished(config, RunFolder.open(folder.path)):
        raise RunFolderError(finished)


def outlasting_process(folder: RunFolder) -> int | bool | None:
    """What `living_process` tells once a process that is about to end has had time to: that of a command which was killed a
    moment ago outlives it by seconds where the machine is busy, and whoever goes on with the run need not see that.
    """
    values = read_live_file(folder)
    until = time.monotonic()
    if values is not None and living_process(folder):
        try:
            check_reachable(values["address"])
            until += MOMENT_SECONDS
        except ConnectionError:
            until += ENDING_SECONDS
    while (process := living_process(folder)) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return process


def check_names(config: Config, *, own_rule: bool = True) -> None:
    """Resolve built-in rewards and the rule (with `own_rule` a user's too, which imports it), and what they are given.

    Raises ConfigError, one of its kinds where there is a single problem.
    """
    problems: list[ConfigError] = []
    looks: list[Callable[[], object]] = [lambda: check_rewards(config.reward)]
    if own_rule or ":" not in config.selector.rule:
        looks.append(lambda: selection_policy(config))
    for look in looks:
        try:
            look()
        except ConfigError as problem:
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError.listing(config.run.name, problems)


def how_to_resume(config: Config, command: str) -> str:
    """The line that goes on with a run that has stopped or failed; empty where nothing of it is left to go on with."""
    folder = RunFolder(run_folder(config.run.dir) / config.run.name)
    checkpoint = checkpoints.latest(folder.checkpoints, folder.copies)
    if checkpoint is not None:
        return f"continue it from {checkpoint.name} with: {command}"
    return f"nothing was saved; begin it again with: {command}" if folder.config.is_file() else ""


def why_finished(config: Config, folder: RunFolder) -> str:
    """Why nothing is left to do in a run that ended well, which would only load its state and write it again; else empty."""
    checkpoint = checkpoints.latest(folder.checkpoints)
    event = newest(folder.events, lambda line: line.get("kind") in (*END_EVENTS, *START_EVENTS))
    exported = not config.run.export or (folder.model / "config.json").is_file()
    if checkpoint is None or event is None or event.get("kind") != "finished" or not exported:
        return ""
    state = checkpoints.read_state(checkpoint)
    if config.run.epochs is None and state.step >= config.run.steps:
        return (
            f"{folder.path}: is finished (run.steps: {config.run.steps}, its newest checkpoint is of step {state.step}); "
            f"raise run.steps to go on with it, or choose another run.name"
        )
    if config.run.max_seconds is not None and state.seconds >= config.run.max_seconds:
        return (
            f"{folder.path}: is finished (run.max_seconds: {config.run.max_seconds:g}, it has worked {state.seconds:.0f} s); "
            f"raise run.max_seconds to go on with it, or choose another run.name"
        )
    return ""
