"""`python -m pods_cluster.quickstart OUT_DIR`: make the quickstart's model and data, or reuse earlier ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pods_cluster.quickstart.answer_batch import Accuracy
from pods_cluster.quickstart.warm_start import Prepared, WarmStart, prepare


def publish(prepared: Prepared, out: Path) -> None:
    """Point `out/model` and `out/data`, the paths of `configs/quickstart.yaml`, at the prepared folder, each by one rename.

    Raises FileExistsError where one of them exists and is no link, and other OSErrors where no link can be made.
    """
    out.mkdir(parents=True, exist_ok=True)
    for target in (prepared.model, prepared.data):
        link = out / target.name
        if link.exists() and not link.is_symlink():
            raise FileExistsError(f"{link} exists and was not made by the quickstart; choose another folder")
        fresh = out / f".{target.name}-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(target, out), target_is_directory=True)
        os.replace(fresh, link)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pods_cluster.quickstart", description=__doc__)
    parser.add_argument("out", type=Path, help="folder that receives model/ and data/{warm,train,test}.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="of the splits, the first weights and the order of rows")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the warm start (default 1)")
    chosen = parser.parse_args(arguments)

    console = Console()
    with console.status("warm start: learning to add, until half-way") as status:

        def show(step: int, loss: float, check: Accuracy) -> None:
            status.update(f"warm start: step {step}, loss {loss:.3f}, {100 * check.greedy:.0f} % of unseen sums right")

        prepared = prepare(chosen.out, WarmStart(seed=chosen.seed), threads=chosen.threads, progress=show)
    publish(prepared, chosen.out)
    console.print(summary(prepared, chosen.out))
    return 0


def summary(prepared: Prepared, out: Path) -> Table:
    """Return a table of what was made, and of how well the model adds before RL."""
    report = prepared.report
    if not (out / "model").exists():  # no links could be made there
        out = prepared.folder
    table = Table(title="Quickstart: two-digit addition, learned half-way", show_header=False)
    table.add_row("model", f"{out / 'model'}  ({report.parameters / 1e6:.2f} M parameters)")
    made = "reused from before" if prepared.reused else f"{report.steps} steps in {report.seconds:.0f} s"
    table.add_row("warm start", f"{made}, {report.rows['warm']} sums")
    table.add_row("data", f"{out / 'data'}  ({report.rows['train']} sums for RL, {report.rows['test']} held out)")
    table.add_row("held-out accuracy, greedy", f"{report.greedy:.1%}")
    table.add_row("held-out accuracy, sampled", f"{report.sampled:.1%}  (temperature 1)")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
