"""The `pods` command."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pods_cluster import __version__
from pods_cluster.client import MissingPackage
from pods_cluster.client.compare_command import compare_runs
from pods_cluster.client.figure_command import figure
from pods_cluster.client.import_command import import_settings
from pods_cluster.client.init_command import init
from pods_cluster.client.plan_command import plan
from pods_cluster.client.run_commands import runs, scale, status, stop, submit
from pods_cluster.client.sweep_command import sweep
from pods_cluster.client.train_command import ConfigPath, Overrides, train
from pods_cluster.config import Config, ConfigError, load_config
from pods_cluster.run.ray_access import use_ray_token

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Reinforcement learning of language models with separately scaled generators and learners.",
)


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Look at the configuration alone: no model, no data.")
    ] = False,
    rewards: Annotated[
        bool, typer.Option(" /--no-rewards", show_default=False, help="Do not import and try the rewards.")
    ] = True,
    address: Annotated[str | None, typer.Option(help="A Ray cluster on which the pools must fit.")] = None,
) -> None:
    """Validate a configuration, show its plan and the first prompt; try its rewards."""
    from pods_cluster.client.check import check as run
    from pods_cluster.client.check import show

    loaded = load_config(config, overrides or [])
    console = Console()
    with console.status("looking at data and rewards"):
        found = run(loaded, offline=offline, rewards=rewards)
    show(loaded, found, console)
    if address is not None:
        _fits(loaded, address)
        console.print(f"[green]the pools fit on the cluster at {escape(address)}[/]")


def _fits(config: Config, address: str) -> None:
    import ray

    from pods_cluster.run.cluster import connect

    connect(config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": address})}))
    ray.shutdown()


def evaluate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A run's folder, a checkpoint, or a model.")],
    overrides: Overrides = None,
    config: Annotated[str | None, typer.Option(help="Configuration of a target that lies in no run's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the held-out accuracy of a checkpoint or a model."""
    from pods_cluster.client.evaluate import evaluate_target, find_target, target_config

    found = find_target(target)
    values = evaluate_target(target_config(found, config, overrides or []), Console(stderr=as_json))
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=f"evaluation of {escape(found.name)}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


def dashboard(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Runs' folders, or folders that hold several.")],
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need the token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on.")] = 8765,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster of the live runs; by default the one that each run's folder names.")
    ] = None,
) -> None:
    """Show live and past runs as a web page: `pods dashboard runs`.

    Scaling and stopping a run from the page needs the token that the command prints.
    """
    from pods_cluster.client.run_handle import controls_of

    try:
        from pods_cluster.dashboard.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pods_cluster"):
            raise
        raise MissingPackage(
            f"dashboard: the package {error.name!r} is not installed; pip install 'pods-cluster[dashboard]'"
        ) from None

    serve(folders, host, port, controls=controls_of(folders, address))


def rewards() -> None:
    """List the built-in rewards."""
    from pods_cluster.scoring.builtin import BUILTINS

    table = Table(box=None)
    for column in ("reward", "range", "what it gives"):
        table.add_column(column)
    for name, builtin in sorted(BUILTINS.items()):
        bounds = "as declared" if builtin.range is None else "{:g} to {:g}".format(*builtin.range)
        table.add_row(name, bounds, (builtin.function.__doc__ or "").strip().splitlines()[0])
    Console().print(table)


def quickstart(
    directory: Annotated[Path, typer.Option("--dir", help="Folder of the run.")] = Path("runs"),
    cache: Annotated[Path, typer.Option(help="Folder in which the tiny model is kept.")] = Path(".cache/quickstart"),
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a quickstart that was interrupted.")] = False,
    baseline: Annotated[
        bool, typer.Option(" /--no-baseline", show_default=False, help="Leave out plain GRPO and the comparison.")
    ] = True,
) -> None:
    """Build a tiny model that half knows arithmetic and train it with PODS, then with plain GRPO, on this machine."""
    from pods_cluster.client.demo import quickstart as run
    from pods_cluster.run.errors import RunError

    options = ["--dir", str(directory), "--cache", str(cache), *([] if baseline else ["--no-baseline"])]
    again = "continue it with: pods quickstart " + shlex.join([*options, *(overrides or []), "--resume"])
    console = Console()
    try:
        done = run(directory, cache, overrides or [], console, resume=resume, baseline=baseline)
    except RunError as error:
        error.add_note(again)
        raise
    if not done:
        console.print(again, markup=False, highlight=False, soft_wrap=True)


COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Prepare a run": (init, import_settings, rewards, check, plan),
    "Train": (quickstart, train, submit, sweep),
    "Watch and steer": (runs, status, dashboard, scale, stop),
    "Results": (evaluate, figure, compare_runs),
}
"""The commands as `pods --help` shows them: by what a user is about to do, in the order in which it is done."""
NAMES: dict[Callable[..., None], str] = {evaluate: "eval", import_settings: "import", compare_runs: "compare"}
"""Commands whose function cannot have their name."""

for panel, functions in COMMANDS.items():
    for function in functions:
        # the words after `pods import verl --` are another trainer's options
        settings = {"ignore_unknown_options": True} if function is import_settings else None
        app.command(NAMES.get(function), rich_help_panel=panel, context_settings=settings)(function)


def _version(value: bool) -> None:
    if value:
        print(f"pods {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point. Prints the text of errors that are meant for users; others, or all with PODS_DEBUG=1, keep their traceback."""
    # A user's own rules and rewards lie where the command is typed; Ray hands this path on to its workers.
    sys.path.insert(0, os.getcwd())
    use_ray_token()
    try:
        app()
    except Exception as error:
        text = _for_people(error)
        if os.environ.get("PODS_DEBUG") or text is None:
            raise
        console = Console(stderr=True)
        console.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _for_people(error: Exception) -> str | None:
    """The text of an error that a user can act on; None for one that needs its traceback."""
    if isinstance(error, ConfigError) or type(error).__module__.startswith("pods_cluster."):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{str(error.filename)[:200]}: {error.strerror}; give another path, or make room for it (PODS_DEBUG=1 shows where)"
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of Path.expanduser
        return "~: a path names the home folder of a user whom this machine does not have; write the path out"
    return None


if __name__ == "__main__":
    main()
