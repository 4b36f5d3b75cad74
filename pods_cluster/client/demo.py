"""`pods quickstart`: a tiny model that half knows addition, trained with PODS on this machine, start to end."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from pods_cluster.client.driver import train
from pods_cluster.config import ConfigError, load_config
from pods_cluster.quickstart.__main__ import summary as prepared_table
from pods_cluster.quickstart.answer_batch import Accuracy
from pods_cluster.quickstart.warm_start import Prepared, WarmStart, prepare
from pods_cluster.telemetry.report import render

CONFIG = Path(__file__).parent.parent / "quickstart" / "run.yaml"

ABOUT = """A transformer of about 1 million parameters has learned two-digit addition half-way, from other sums than
those below. Now it is trained by reinforcement learning: generators sample [bold]n[/] answers to each sum, the selector
keeps the [bold]m[/] of greatest reward variance (PODS), a DeepSpeed learner updates on those alone and sends its new
weights back. Accuracy is on sums that neither the warm start nor the training has seen."""


def quickstart(directory: Path, cache: Path, overrides: list[str], console: Console) -> None:
    """Make (or reuse) the model, run, and show what came out. The run's folder is made anew each time."""
    console.print(Panel(ABOUT, title="[bold]PODS cluster quickstart[/]", title_align="left"))
    made = _prepare(cache, console)
    console.print(prepared_table(made, cache))
    places = [
        f"model.path={made.model}",
        f"data.path={made.data / 'train.jsonl'}",
        f"data.eval.path={made.data / 'test.jsonl'}",
        f"run.dir={directory}",
    ]
    config = load_config(CONFIG, [*places, *overrides])
    _clear(Path(config.run.dir) / config.run.name)
    summary = train(config, console=console)
    console.print(render(summary))
    folder = Path(config.run.dir) / config.run.name
    console.print(f"again with other settings: [bold]pods quickstart selector.rule=random[/]; "
                  f"this run's configuration: {escape(str(folder / 'config.yaml'))}")  # fmt: skip


def _prepare(cache: Path, console: Console) -> Prepared:
    with console.status("warm start: learning to add, until half-way") as status:

        def show(step: int, loss: float, check: Accuracy) -> None:
            status.update(f"warm start: step {step}, loss {loss:.3f}, {check.greedy:.0%} of unseen sums right")

        return prepare(cache, WarmStart(), progress=show)


def _clear(folder: Path) -> None:
    """Remove an earlier quickstart run; anything else that lies there is not ours to remove."""
    if not folder.exists():
        return
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run.dir: {folder} exists and holds no run; choose another with --dir")
    shutil.rmtree(folder)
