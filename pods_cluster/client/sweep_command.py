"""`pods sweep`: arms x seeds of one configuration, and how they compare."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pods_cluster.client.completion import override_names
from pods_cluster.client.lanes import isolated, lanes_of
from pods_cluster.client.sweep import LOOK_SECONDS, Job, Runner, prepare, runs_at_once, write_sweep_file
from pods_cluster.client.sweep import log_of as log_of_run
from pods_cluster.config import Config, ConfigError
from pods_cluster.config.sweep import Sweep, load_sweep
from pods_cluster.telemetry.curves import CurveError
from pods_cluster.telemetry.number_format import MISSING, compact, duration, percent
from pods_cluster.wording import counted

if TYPE_CHECKING:
    from pods_cluster.client.driver import Interrupts

STYLES = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
LINE_SECONDS = 30.0
"""Seconds between two lines on runs under way, where the output is no terminal."""


def sweep(
    config: Annotated[Path, typer.Argument(metavar="SWEEP.YAML", help="Arms, seeds and the base configuration.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings of all arms.", autocompletion=override_names),
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Runs at once: a number, or auto; by default as in the file.")
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Run only these arms, separated by commas.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run only the first of the file's seeds, so many.")] = None,
    isolate: Annotated[
        bool | None,
        typer.Option(help="Whether each run has cards and cores of this machine to itself; by default as in the file."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines in place of the live table.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all runs, show them, and start none.")] = False,
) -> None:
    """Run arms x seeds of one configuration: `pods sweep sweep.yaml`.

    The same command again goes on with what is not done.

    Every run is an ordinary run's folder, below `<run.dir>/<name>/`. All configurations are checked before the first starts.
    """
    wanted = [arm.strip() for arm in (arms or "").split(",") if arm.strip()]
    loaded = load_sweep(config, overrides or [], arms=wanted, seeds=seeds)
    if parallel is not None:
        if parallel != "auto" and not (parallel.isdigit() and int(parallel)):
            raise ConfigError(f"--parallel: {parallel!r} is no number of runs; give 1 or more, or auto")
        asked = "auto" if parallel == "auto" else int(parallel)
        loaded = Sweep(loaded.config.model_copy(update={"parallel": asked}), loaded.runs)
    if isolate is not None:
        loaded = Sweep(loaded.config.model_copy(update={"isolate": isolate}), loaded.runs)
    if loaded.config.isolate:
        loaded = isolated(loaded)
    jobs, console = prepare(loaded), Console()
    for note in notes(loaded):
        console.print(note, style="yellow", markup=False, highlight=False)
    if dry_run:
        console.print(table(jobs))
        return
    write_sweep_file(loaded)
    if any(job.state != "finished" for job in jobs):
        _run(loaded, jobs, console, live=console.is_terminal and not plain)
    options = _as_typed({"--arms": arms, "--seeds": seeds, "--parallel": parallel})
    options += [] if isolate is None else ["--isolate" if isolate else "--no-isolate"]
    options += ["--plain"] if plain else []
    _conclude(jobs, console, "go on with it: pods sweep " + shlex.join([str(config), *options, *(overrides or [])]))


def _as_typed(options: Mapping[str, object]) -> list[str]:
    return [part for name, value in options.items() if value is not None for part in (name, str(value))]


def notes(loaded: Sweep) -> list[str]:
    """Warnings of settings that make arms less comparable than they look."""
    runs = [runs[0] for runs in loaded.arms.values()]
    found = []
    if any(run.config.selector.no_signal == "replace" for run in runs):
        found.append(
            "selector.no_signal: replace lets arms see different prompts, since groups without signal are replaced; "
            "drop or keep leaves all arms the same ones"
        )
    if not loaded.config.isolate and loaded.config.parallel != 1 and any(_shares_cards(run.config) for run in runs):
        found.append(
            "runs side by side may share cards, as their workers ask for parts of them, and slow each other; "
            "isolate: true (--isolate) gives each its own"
        )
    if len({run.config.learner.prompts_per_step for run in runs}) > 1:
        found.append("learner.prompts_per_step differs between the arms: their steps are not alike")
    if not all(run.config.run.eval.on for run in runs):
        found.append("run.eval.every is 0 in some arm, and run.eval.minutes too: it cannot be compared by accuracy")
    return found


def _shares_cards(config: Config) -> bool:
    return any(0 < (pool.gpus_per_worker or 0) < 1 for pool in (config.generator, config.learner))


def _run(loaded: Sweep, jobs: list[Job], console: Console, *, live: bool) -> None:
    from pods_cluster.client.driver import Interrupts

    with _runner(loaded, jobs, console) as runner:
        each = f", each with {runner.lanes[0].describe()} to itself" if runner.lanes else ""
        console.print(
            f"{counted(len(jobs), 'run')}, {sum(job.state == 'finished' for job in jobs)} done before, {runner.at_once} at "
            f"a time{each}",
            highlight=False,
        )
        with Interrupts() as interrupts:
            try:
                _watch(runner, interrupts, console, live=live)
            finally:
                runner.kill()


@contextlib.contextmanager
def _runner(loaded: Sweep, jobs: list[Job], console: Console) -> Iterator[Runner]:
    """What starts the runs: each on a lane of its own, or all on one cluster, which ends with this."""
    if loaded.config.isolate:
        lanes = lanes_of(loaded)
        yield Runner(jobs, len(lanes), {}, {}, lanes)
        return
    import ray

    from pods_cluster.run.cluster import connect

    largest = max((run.config for run in loaded.runs), key=_slots)
    cores = os.cpu_count() or 1
    with console.status("connecting to Ray"):
        wanted = loaded.config.parallel if isinstance(loaded.config.parallel, int) else cores
        resources = connect(largest, runs=min(wanted, len(jobs)))
    try:
        own = not _given(largest.cluster.address)
        count = runs_at_once(loaded, resources, cores if own else int(resources.get("CPU", 1)))
        # every run joins this cluster; one that its configuration names is theirs by itself
        address = ray.get_runtime_context().gcs_address
        yield Runner(jobs, count, resources, {"RAY_ADDRESS": address})
    finally:
        ray.shutdown()


def _slots(config: Config) -> float:
    from pods_cluster.run.cluster import Demand

    return Demand.of(config, 0.0).cpus


def _given(address: str) -> bool:
    return address not in ("auto", "local") or (address == "auto" and bool(os.environ.get("RAY_ADDRESS")))


def _watch(runner: Runner, interrupts: Interrupts, console: Console, *, live: bool) -> None:
    told: dict[str, str] = {}
    heard, line_due = 0, time.monotonic() + LINE_SECONDS
    shown = Live(table(runner.jobs), console=console, auto_refresh=False) if live else None
    if shown is not None:
        shown.start()
    try:
        while not runner.over:
            runner.step()
            signals = max(interrupts.ctrl_c, int(interrupts.reason is not None))
            if signals > heard:
                heard = signals
                runner.stop()
                console.print("stopping: the runs save their states (Ctrl-C again: end them at once)", style="yellow")
            for job in runner.running:
                job.look()
            if shown is not None:
                shown.update(table(runner.jobs), refresh=True)
            else:
                due = time.monotonic() >= line_due
                line_due += LINE_SECONDS if due else 0.0
                for job in runner.jobs:
                    if told.get(job.run.name, "waiting") != job.state or (due and job.state == "running"):
                        told[job.run.name] = job.state
                        console.print(_line(job), markup=False, highlight=False, soft_wrap=True)
            time.sleep(LOOK_SECONDS)
    finally:
        if shown is not None:
            shown.stop()


def _line(job: Job) -> str:
    seen = job.seen
    parts = [f"{job.run.name}: {job.state}"]
    if seen is not None and seen.step is not None:
        parts.append(f"step {seen.step} of {job.run.config.run.steps}")
    if job.accuracy is not None:
        parts.append(f"accuracy {percent(job.accuracy, 1)}")
    if job.why:
        parts.append(job.why)
    return ", ".join(parts)


def table(jobs: list[Job]) -> Table:
    """The runs and where they stand."""
    found = Table(box=None)
    for column in ("arm", "seed", "state", "step", "accuracy", "reward", "time"):
        found.add_column(column, justify="left" if column in ("arm", "state") else "right")
    for job in jobs:
        seen = job.seen
        reward = seen.latest.get("reward") if seen is not None else None
        found.add_row(
            escape(job.run.arm),
            str(job.run.seed),
            f"[{STYLES[job.state]}]{job.state}[/]",
            MISSING if seen is None or seen.step is None else f"{seen.step} / {job.run.config.run.steps}",
            percent(job.accuracy, 1),
            compact(reward) if isinstance(reward, int | float) else MISSING,
            duration(seen.elapsed if seen is not None else None),
        )
    return found


def _conclude(jobs: list[Job], console: Console, again: str) -> None:
    from pods_cluster.client.compare_command import compare_folder, show

    failed = [job for job in jobs if job.state == "failed"]
    undone = [job for job in jobs if job.state in ("waiting", "stopped")]
    for job in failed:
        console.print(f"[red]{escape(job.run.name)} failed:[/] {escape(job.why)} (log: {escape(str(log_of_run(job.run)))})",
                      highlight=False, soft_wrap=True)  # fmt: skip
    if any(job.state == "finished" for job in jobs):
        folder = jobs[0].folder.path.parent
        try:
            show(compare_folder(folder), console)
        except (CurveError, ConfigError) as error:
            console.print(f"no comparison: {error}", markup=False, highlight=False)
        console.print(
            f"again, with figures: pods compare {folder} --figure", markup=False, highlight=False, soft_wrap=True
        )
    if failed or undone:
        console.print(
            f"{counted(len(failed), 'run')} failed, {len(undone)} not done; {again}",
            markup=False,
            highlight=False,
            soft_wrap=True,  # one line, to be copied
        )
    if failed:
        raise typer.Exit(1)
    if undone:
        raise typer.Exit(130)
