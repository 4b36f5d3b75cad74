"""`pods quickstart`: a tiny model that half knows addition, trained with PODS and with plain GRPO on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from pods_cluster.client.driver import train
from pods_cluster.client.figure_command import read_run
from pods_cluster.client.paths import run_folder
from pods_cluster.client.refusals import refuse_start
from pods_cluster.client.run_state import read_run_state
from pods_cluster.config import Config, ConfigError, load_config
from pods_cluster.quickstart.__main__ import publish
from pods_cluster.quickstart.__main__ import summary as prepared_table
from pods_cluster.quickstart.answer_batch import Accuracy
from pods_cluster.quickstart.warm_start import Prepared, WarmStart, prepare
from pods_cluster.run.cluster import connect
from pods_cluster.run.live_file import living_process
from pods_cluster.telemetry.comparison_figure import save_comparison
from pods_cluster.telemetry.curves import Axis, CurveError, curve
from pods_cluster.telemetry.report import render
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.summary import Summary, summarize
from pods_cluster.telemetry.verdict import ACCURACY, verdict

CONFIG = Path(__file__).parent.parent / "quickstart" / "run.yaml"
BASELINE = "-grpo"
"""Ending of the baseline run's name."""
AXES: tuple[Axis, ...] = ("steps", "minutes")

ABOUT = (
    "A transformer of about 1 million parameters learns two-digit addition half-way, from examples. Then it is trained by "
    "reinforcement learning on other sums: generators sample [bold]n[/] answers to each, the selector keeps the [bold]m[/] "
    "whose rewards vary most (PODS), and a DeepSpeed learner updates on those alone and sends its new weights back. Accuracy "
    "is measured on sums that neither part of the training has seen."
)
ABOUT_BASELINE = (
    "The same again as plain GRPO: as many updates, but only [bold]m[/] answers to each sum are made, and nothing is selected "
    "among them. (--no-baseline skips this.)"
)


def quickstart(
    directory: Path,
    cache: Path,
    overrides: list[str],
    console: Console,
    *,
    resume: bool = False,
    baseline: bool = True,
) -> bool:
    """Make (or reuse) the model, run PODS and then plain GRPO, and show what came out; whether all of it was done.

    The runs' folders are made anew, or with `resume` gone on with; a run that is finished is left as it is then.
    """
    # refused before the warm start, which takes a minute
    planned = _arms([f"run.dir={directory}", *overrides], baseline)
    if resume:
        RunFolder.open(_path(planned[0]))
    else:
        for each in planned:
            _refuse_to_clear(RunFolder(_path(each)))
    console.print(Panel(ABOUT, title="[bold]PODS cluster quickstart[/]", title_align="left"))
    made = _prepare(cache, console)
    with suppress(OSError):  # links for configs/quickstart.yaml; this run goes by the folders themselves
        publish(made, cache)
    console.print(prepared_table(made, cache))
    places = [
        f"model.path={made.model}",
        f"data.path={made.data / 'train.jsonl'}",
        f"data.eval.path={made.data / 'test.jsonl'}",
        f"run.dir={directory}",
    ]
    wanted = _arms([*places, *overrides], baseline)
    config = wanted[0]
    if not resume:
        for path in filter(Path.exists, map(_path, wanted)):
            shutil.rmtree(path)
    with _one_cluster():
        for each in wanted:
            if each is not config:
                console.print(Panel(ABOUT_BASELINE, title="[bold]the baseline[/]", title_align="left"))
            summary = _run(each, resume, console)
            if each is config:
                console.print(render(summary))
            if summary.status != "finished":
                return False
    if len(wanted) > 1:
        _compare(config, console)
    elif baseline:
        console.print(
            "selector.keep equals generator.rollouts_per_prompt: this is plain GRPO already, without a baseline"
        )
    console.print(f"again with other settings: [bold]pods quickstart selector.rule=random[/]; "
                  f"this run's configuration: {escape(str(_path(config) / 'config.yaml'))}")  # fmt: skip
    return True


def _arms(overrides: list[str], baseline: bool) -> list[Config]:
    """PODS as configured, and plain GRPO, with as many updates on as many rollouts: n = m. Raises ConfigError."""
    pods = load_config(CONFIG, overrides)
    m = pods.selector.keep
    if not baseline or pods.generator.rollouts_per_prompt == m:
        return [pods]
    grpo = [f"generator.rollouts_per_prompt={m}", "generator.rollouts_range=null", "selector.settle=off"]
    return [pods, load_config(CONFIG, [*overrides, *grpo, f"run.name={pods.run.name}{BASELINE}"])]


def _run(config: Config, resume: bool, console: Console) -> Summary:
    """Run one arm to its end, or go on with it; a finished one is only read."""
    path = _path(config)
    resume = resume and (path / "config.yaml").is_file()
    if resume:
        folder = RunFolder.open(path)
        state = read_run_state(folder, folder.name)
        if state.status == "finished" and (state.step or 0) >= config.run.steps:
            console.print(f"{escape(folder.name)} is finished already")
            return summarize(folder.read_metrics(), folder.read_events(), run=folder.name)
    refuse_start(config, resume=resume)
    if not ray.is_initialized():  # here, so that both runs share the cluster
        with console.status("connecting to Ray"):
            connect(config)
    return train(config, resume=resume, console=console)


def _compare(config: Config, console: Console) -> None:
    """Draw accuracy of both arms against updates and minutes, and say what came out."""
    folder = RunFolder.open(_path(config))
    _, pods = read_run(str(folder.path))
    _, grpo = read_run(f"{folder.path}{BASELINE}")
    n, m, rule = config.generator.rollouts_per_prompt, config.selector.keep, config.selector.rule
    labels = (f"{'PODS' if rule == 'max_variance' else rule} ({m} of {n})", f"GRPO ({m} of {m})")
    try:
        panels = [(ACCURACY, [curve(label, [run], ACCURACY, axis) for label, run in zip(labels, (pods, grpo), strict=True)])
                  for axis in AXES]  # fmt: skip
        said = verdict(labels[0], pods, labels[1], grpo)
    except CurveError as error:
        console.print(f"no comparison: {error}", markup=False)
        return
    console.print(f"\n{said}", markup=False, highlight=False)
    for path in save_comparison(panels, AXES, folder.figures, formats=("png",)):
        console.print(f"both in one figure: {escape(str(path))}", highlight=False, soft_wrap=True)


@contextmanager
def _one_cluster() -> Iterator[None]:
    """End the Ray cluster that a run within started."""
    before = ray.is_initialized()
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def _path(config: Config) -> Path:
    return run_folder(config.run.dir) / config.run.name


def _prepare(cache: Path, console: Console) -> Prepared:
    with console.status("warm start: learning to add, until half-way") as status:

        def show(step: int, loss: float, check: Accuracy) -> None:
            status.update(f"warm start: step {step}, loss {loss:.3f}, {100 * check.greedy:.0f} % of unseen sums right")

        return prepare(cache, WarmStart(), progress=show)


def _refuse_to_clear(folder: RunFolder) -> None:
    """An earlier quickstart run is removed; what is alive, or no run, is not ours to remove. Raises ConfigError."""
    if not folder.path.exists():
        return
    if not folder.config.is_file():
        raise ConfigError(f"run.dir: {folder.path} exists and holds no run; choose another with --dir")
    if process := living_process(folder):
        raise ConfigError(
            f"run.dir: {folder.path} is a quickstart that is alive (process {process}); end it with `pods stop "
            f"{folder.path}`, or choose another folder with --dir"
        )
