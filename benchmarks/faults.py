"""What the faults of a run's command and disk cost, each once: SIGTERM, SIGKILL, a checkpoint that is torn, a kill in one, a full
disk.

    python -m benchmarks.faults --model DIR --train FILE     # the full disk needs root: it is mounted for it

Each is done to a `pods train` of its own, with one generator and one rank; seconds are from the fault (after one that ends
the command: from the start of the next one) to the second step after it. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._faulted_run import FaultedRun
from pods_cluster.run.checkpoints import completed

SETTINGS = ("generator.workers=1", "generator.rollouts_per_prompt=8", "selector.keep=4", "selector.no_signal=keep",
            "learner.workers=1", "learner.prompts_per_step=4", "run.samples_every=0", "run.steps=100000", "run.eval.every=0",
            "run.export=false")  # fmt: skip
LIMIT = 300.0
DISK_MEGABYTES = 400


class Row:
    """A run, and how long things take in it."""

    def __init__(self, folder: Path, settings: list[str], *own: str) -> None:
        self.run = FaultedRun(folder, "faults", [*SETTINGS, *settings, *own])

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run.folder.events
        return [event for event in (self.run.folder.read_events() if path.exists() else []) if event["kind"] == kind]

    def wait(self, what: str, condition: Callable[[], object]) -> float:
        """Seconds until it held."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > LIMIT:
                raise RuntimeError(f"{what}: not within {LIMIT:g} s; see {self.run.log.read_text()[-2000:]}")
            time.sleep(0.02)
        return time.monotonic() - began

    def steps(self, count: int) -> float:
        """Seconds until so many more steps were made."""
        self.run._read()
        there, began = self.run.made, time.monotonic()
        if not self.run._wait(lambda: self.run.made >= there + count, LIMIT):
            raise RuntimeError(f"the command has ended:\n{self.run.log.read_text()[-2000:]}")
        return time.monotonic() - began

    def end(self, how: signal.Signals) -> float:
        """Seconds until the command has ended after a signal."""
        began = time.monotonic()
        self.run.process.send_signal(how)
        self.run.exit_codes.append(self.run.process.wait(LIMIT))
        return time.monotonic() - began

    def resume(self) -> dict[str, Any]:
        self.run._read()
        before = self.run.standing
        self.run.process = self.run._start("--resume")
        seconds = self.steps(2)
        return {"resumed_s": round(seconds, 1), "steps_again": before - (self.run.standing - 2)}


@contextmanager
def started(settings: list[str], *own: str, folder: Path | None = None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        row = Row(folder or Path(scratch), settings, *own)
        try:
            row.steps(4)
            yield row
        finally:
            row.run.kill()


def ended(settings: list[str]) -> None:
    """SIGTERM, then SIGKILL."""
    with started(settings, "run.checkpoint.every=5") as row:
        row.steps(7)
        seconds = row.end(signal.SIGTERM)
        tell("SIGTERM", ended_s=round(seconds, 1), exit_code=row.run.exit_codes[-1], **row.resume())
        row.steps(8)
        row.end(signal.SIGKILL)
        tell("SIGKILL", **row.resume())


def torn(settings: list[str]) -> None:
    """SIGKILL, and a bit of the newest checkpoint is another one."""
    with started(settings, "run.checkpoint.every=4", "run.checkpoint.keep=2") as row:
        row.wait("two checkpoints", lambda: len(completed(row.run.folder.checkpoints)) == 2)
        row.steps(2)
        row.end(signal.SIGKILL)
        shutil.rmtree(row.run.folder.copies, ignore_errors=True)
        newest = completed(row.run.folder.checkpoints)[-1]
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        torn = bytearray(largest.read_bytes())
        torn[len(torn) // 2] ^= 1
        largest.write_bytes(torn)
        resumed = row.resume()
        tell("a torn checkpoint", **resumed, told=[event["text"] for event in row.events("checkpoint_refused")])


def killed_in_a_checkpoint(settings: list[str]) -> None:
    with started(settings, "run.checkpoint.every=3", "run.checkpoint.copy_every=0") as row:
        row.steps(4)
        folder = row.run.folder.checkpoints
        row.wait("a checkpoint begins", lambda: list(folder.glob("*.tmp")))
        row.end(signal.SIGKILL)
        time.sleep(1)
        half = [path.name for path in folder.glob("*.tmp")]
        tell("SIGKILL in a checkpoint", half_written=half, **row.resume(), left=[p.name for p in folder.glob("*.tmp")])


def full_disk(settings: list[str]) -> None:
    with tempfile.TemporaryDirectory() as disk:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "faults", disk]
        subprocess.run(mount, check=True)
        try:
            with started(settings, "run.checkpoint.every=2", "run.checkpoint.keep=1", folder=Path(disk)) as row:
                row.steps(6)
                fill = Path(disk) / "fill"
                with fill.open("wb", buffering=0) as file:
                    try:
                        while file.write(bytes(2**16)):
                            pass
                    except OSError:
                        pass
                filled = time.time()
                time.sleep(20)
                fill.unlink()
                freed = time.time()
                row.steps(4)
                seconds = row.wait("a checkpoint", lambda: [e for e in row.events("checkpoint") if e["time"] > freed])
                records = [r for r in row.run.folder.read_metrics() if "timing_s/step" in r]
                times = [r["timing_s/step"] for r in records]
                meanwhile = [r for r in records if filled < r["time"] < freed]
                tell("the disk full for 20 s", steps_meanwhile=len(meanwhile), median_step_s=statistics.median(times),
                     longest_step_s=max((r["timing_s/step"] for r in meanwhile), default=None),
                     next_checkpoint_s=round(seconds, 1), alive=row.run.alive,
                     told=[e["text"] for e in row.events("checkpoint_failed")])  # fmt: skip
        finally:
            subprocess.run(["umount", "-l", disk], check=False)


def tell(fault: str, **about: Any) -> None:
    print(json.dumps({"fault": fault, **about}), flush=True)


PARTS = {
    "ended": ended,
    "torn": torn,
    "checkpoint": killed_in_a_checkpoint,
    "full_disk": full_disk,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model, with its tokenizer")
    parser.add_argument("--train", type=Path, required=True, help="rows with `prompt` and `answer`, JSON Lines")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="full_disk needs root")
    options = parser.parse_args()
    settings = [f"model.path={options.model.absolute()}", f"data.path={options.train.absolute()}"]
    settings.append(f"data.eval.path={options.train.absolute()}")
    for part in options.parts:
        PARTS[part](settings)


if __name__ == "__main__":
    main()
