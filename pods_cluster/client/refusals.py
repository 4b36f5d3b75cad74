"""What `pods train` refuses before Ray is started: seconds earlier than the run itself would. Imports no ray."""

from __future__ import annotations

from pods_cluster.client.paths import run_folder
from pods_cluster.client.run_state import END_EVENTS, START_EVENTS
from pods_cluster.config import Config
from pods_cluster.run import checkpoints
from pods_cluster.run.live_file import living_process
from pods_cluster.scoring.reward_registry import check_rewards
from pods_cluster.selection.policy import selection_policy
from pods_cluster.telemetry.line_tail import newest
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError


def refuse_start(config: Config, *, resume: bool) -> None:
    """Raise for a run that could not start: its folder holds another one, it is alive, or nothing is left to do.

    Raises RunFolderError, CheckpointError, RewardConfigError and UnknownRuleError.
    """
    check_rewards(config.reward)
    if ":" not in config.selector.rule:  # a user's own is imported in the run, where that has a deadline
        selection_policy(config)
    folder = RunFolder(run_folder(config.run.dir) / config.run.name)
    if process := living_process(folder):
        raise RunFolderError(
            f"{folder.path}: this run is alive (process {process}); see it with `pods status {folder.path}`, end it with "
            f"`pods stop {folder.path}`, or choose another run.name"
        )
    if not resume:
        RunFolder.refuse_occupied(run_folder(config.run.dir), config.run.name)
        return
    folder = RunFolder.open(folder.path)
    checkpoint = checkpoints.latest(folder.checkpoints)
    if checkpoint is not None:
        _refuse_finished(config, folder, checkpoints.read_state(checkpoint))


def how_to_resume(config: Config, command: str) -> str:
    """The line that goes on with a run that has stopped or failed; empty where nothing of it is left to go on with."""
    folder = RunFolder(run_folder(config.run.dir) / config.run.name)
    checkpoint = checkpoints.latest(folder.checkpoints)
    if checkpoint is not None:
        return f"continue it from {checkpoint.name} with: {command}"
    return f"nothing was saved; begin it again with: {command}" if folder.config.is_file() else ""


def _refuse_finished(config: Config, folder: RunFolder, state: checkpoints.RunState) -> None:
    """A run that ended well and has no step left would only load its state, and write it again."""
    event = newest(folder.events, lambda line: line.get("kind") in (*END_EVENTS, *START_EVENTS))
    exported = not config.run.export or (folder.model / "config.json").is_file()
    if event is None or event.get("kind") != "finished" or not exported:
        return
    if state.step >= config.run.steps:
        raise RunFolderError(
            f"{folder.path}: is finished (run.steps: {config.run.steps}, its newest checkpoint is of step {state.step}); "
            f"raise run.steps to go on with it, or choose another run.name"
        )
    if config.run.max_seconds is not None and state.seconds >= config.run.max_seconds:
        raise RunFolderError(
            f"{folder.path}: is finished (run.max_seconds: {config.run.max_seconds:g}, it has worked {state.seconds:.0f} s); "
            f"raise run.max_seconds to go on with it, or choose another run.name"
        )
