"""Commands on submitted and live runs: submit, runs, status, scale, stop."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pods_cluster.client.completion import override_names, run_names
from pods_cluster.client.option_values import seconds
from pods_cluster.sizing.moves import Sizes
from pods_cluster.wording import age

if TYPE_CHECKING:
    from pods_cluster.client.controls import LiveStatus
    from pods_cluster.client.run_state import RunState

RunTarget = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name.", autocompletion=run_names)]
Address = Annotated[str | None, typer.Option(help="Ray cluster (host:6379) of a run whose folder is not here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def submit(
    config: Annotated[Path, typer.Argument(metavar="RUN.YAML", help="The run's configuration.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides, as in run.steps=100.", autocompletion=override_names),
    ] = None,
    address: Annotated[str | None, typer.Option(help="Job server, as in http://HEAD:8265.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Forward this environment variable to the job.")
    ] = None,
    pip: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="Install this (or a requirements .txt) for the job.")
    ] = None,
    include: Annotated[list[Path] | None, typer.Option(help="Send this file or folder too.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return at once, without following the log.")] = False,
) -> None:
    """Run a configuration as a job of a Ray cluster: `pods submit run.yaml`."""
    from pods_cluster.client import jobs

    job = jobs.prepare(config, overrides or [], env=env or [], pip=pip or [], include=include or [], resume=resume)
    console = Console()
    client, submission = jobs.submit(job, address)
    files = ", ".join(str(path) for path in job.bundle.paths)
    console.print(f"job [bold]{submission}[/]: sent {escape(files)} ({job.bundle.nbytes / 1024:,.0f} KiB)"
                  + (f", forwarded {', '.join(job.env)}" if job.env else ""), highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"the run's folder on the cluster: {escape(job.run_dir)}/{job.name}", highlight=False, soft_wrap=True)
    if no_wait:
        return
    try:
        code = jobs.follow(client, submission, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        console.print(f"\nthe job goes on; see it with `ray job logs {submission}`, end it with `pods stop {job.name}`")
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def runs(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR", help="Folders of runs.")] = None,
    address: Annotated[str | None, typer.Option(help="List the runs alive on this Ray cluster too.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder (`runs`, if none is named), and those alive on a cluster."""
    from pods_cluster.client.run_handle import RunAccessError, live_runs
    from pods_cluster.client.run_list import RunList

    paths = folders or ([Path("runs")] if Path("runs").is_dir() else [])
    if not paths and address is None:
        raise RunAccessError("runs: there is no folder 'runs' here; give a folder of runs, or --address")
    rows = [_row(state) for state in (RunList(paths).states() if paths else [])]
    for name in live_runs(address) if address is not None else []:
        if not any(row["name"] == name and row["status"] == "running" for row in rows):
            rows.append(
                {"name": name, "status": "running", "step": None, "steps": None, "reward": None, "folder": None}
            )
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None)
    for column in ("run", "state", "step", "reward", "written", "folder"):
        table.add_column(column, justify="right" if column in ("step", "reward") else "left", overflow="fold")
    for row in rows:
        steps = f"{_text(row['step'])} / {_text(row['steps'])}" if row["step"] is not None else "–"
        reward = "–" if row["reward"] is None else f"{row['reward']:.3f}"
        table.add_row(escape(row["name"]), row["status"], steps, reward, _ago(row.get("updated")),
                      escape(_short_path(row["folder"]) if row["folder"] else "elsewhere"))  # fmt: skip
    Console().print(table)


def status(run: RunTarget, address: Address = None, as_json: AsJson = False) -> None:
    """Show the state of a run; of a live one also its workers and what is under way."""
    from pods_cluster.client.controls import NotLive
    from pods_cluster.client.run_handle import RunAccessError, find_run
    from pods_cluster.client.run_state import read_run_state
    from pods_cluster.run import checkpoints
    from pods_cluster.telemetry.health_report import read_health

    found = find_run(run, address)
    live: LiveStatus | None = None
    why_not_live = ""
    state = read_run_state(found.folder, found.name) if found.folder is not None else None
    if found.address is not None and (state is None or state.status != "killed"):
        try:
            live = found.ask(found.controls.status(found.name))
        except NotLive as error:
            why_not_live = str(error)
    row: dict[str, Any] = {"name": found.name}
    if found.folder is not None and state is not None:
        saved = checkpoints.latest(found.folder.checkpoints)
        health = read_health(found.folder)
        row = _row(state) | {"text": state.text, "checkpoint": str(saved) if saved else None}
        row["health"] = health.as_dict() if health is not None else None
    elif live is None:
        raise RunAccessError(why_not_live)
    row["live"] = live.model_dump(mode="json") if live is not None else None
    if as_json:
        print(json.dumps(row))
        return
    _show_status(row, live, why_not_live)


def scale(
    run: RunTarget,
    generators: Annotated[int | None, typer.Option(min=1, help="Generator workers.")] = None,
    learners: Annotated[int | None, typer.Option(min=1, help="Learner ranks.")] = None,
    address: Address = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the pools have these sizes.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that --wait waits.", callback=seconds)] = 900.0,
) -> None:
    """Change the sizes of a live run's pools: `pods scale RUN --generators 6 --learners 2`."""
    from pods_cluster.client.run_handle import find_run
    from pods_cluster.sizing.moves import ScaleError

    if generators is None and learners is None:
        raise ScaleError("scale: give --generators, --learners, or both")
    found = find_run(run, address)
    console = Console()
    console.print(escape(found.ask(found.controls.scale(found.name, generators, learners))), highlight=False)
    if not wait:
        return
    live = found.wait_for_sizes(timeout)
    console.print(f"step {live.step}: {_pools(live)}", highlight=False)
    if (generators or live.generators, learners or live.learners) != (live.generators, live.learners):
        raise ScaleError(f"{found.name}: not all came; see `pods status {run}` and the run's events for the cause")


def stop(
    run: RunTarget,
    address: Address = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the run may take to save its state.", callback=seconds)
    ] = 900.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return at once, before the run has ended.")] = False,
) -> None:
    """End a live run after its current step, save a checkpoint, and wait for both."""
    from pods_cluster.client.run_handle import find_run

    found = find_run(run, address)
    console = Console()
    console.print(escape(found.ask(found.controls.stop(found.name, "pods stop"))), highlight=False)
    if no_wait:
        return
    saved = found.wait_for_end(timeout)
    console.print(f"saved: {escape(str(saved))}" if saved else "it has ended", highlight=False, soft_wrap=True)


def _row(state: RunState) -> dict[str, Any]:
    reward = state.latest.get("reward")
    return {
        "name": Path(state.path).name,
        "status": state.status,
        "step": state.step,
        "steps": state.planned,
        "reward": reward if isinstance(reward, int | float) else None,
        "updated": state.updated,
        "folder": state.path,
    }


def _show_status(row: dict[str, Any], live: LiveStatus | None, why_not_live: str) -> None:
    from pods_cluster.telemetry.panel import HEALTH_COLORS

    console = Console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()

    def line(name: str, value: Any) -> None:
        if value is not None:
            table.add_row(name, escape(str(value)))

    line("run", row["name"])
    if "folder" in row:
        line("folder", _short_path(row["folder"]))
        line("state", f"{row['status']}: {row['text']}")
        line("step", f"{_text(row['step'])} of {_text(row['steps'])}, written {_ago(row['updated'])}")
        if row["health"] is not None:
            table.add_row("health", Text(row["health"]["line"], style=HEALTH_COLORS[row["health"]["level"]]))
            if row["health"]["level"] != "info" and row["health"]["pace"]:
                line("pace", row["health"]["pace"])
        line("reward", None if row["reward"] is None else f"{row['reward']:.4g}")
        line("checkpoint", _short_path(row["checkpoint"]) if row["checkpoint"] else "none yet")
    if live is not None:
        line("alive", f"step {_text(live.step)}, weight version {_text(live.version)}")
        line("pools", _pools(live))
        line("under way", live.note)
        line("stopping", live.stopping)
    elif why_not_live:
        line("alive", f"no: {why_not_live}")
    console.print(table)
    if live is not None and live.workers:
        workers = Table(box=None)
        for column in ("worker", "state", "pid", "node", "best tokens/s"):
            workers.add_column(column, justify="right" if column == "best tokens/s" else "left")
        for worker in live.workers:
            rate = f"{worker.tokens_per_second:,.0f}" if worker.tokens_per_second else ""
            workers.add_row(escape(worker.name), worker.state, _text(worker.pid), (worker.node or "–")[:16], rate)
        console.print(workers)


def _short_path(path: str) -> str:
    """A path below the current folder as it is typed there; another one as it is."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _pools(live: LiveStatus) -> str | None:
    """The pools' sizes; None while they start."""
    if live.generators is None or live.learners is None:
        return None
    return str(Sizes(live.generators, live.learners))


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _ago(updated: float | None) -> str:
    return "–" if updated is None else f"{age(time.time() - updated)} ago"
