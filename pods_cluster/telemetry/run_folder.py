"""The folder of a run: where everything lies that a run leaves behind.

<dir>/<name>/config.yaml      the resolved configuration
             metrics.jsonl    one object a step (see docs/metrics.md)
             events.jsonl     what happened: start, evaluations, losses of workers, warnings, end
             rewards.log      what rewards printed, under their names; at 8 MiB it becomes rewards.1.log
             samples.jsonl    whole groups of rollouts, for people to read
             evals.jsonl      one object for each held-out row of each evaluation: right or wrong
             checkpoints/     states that --resume continues from
             copies/          the newest light copy of the learner's state, while the run goes on or where it failed
             model/           the trained model in Hugging Face format
             best/            the model of the best evaluation, with run.checkpoint.best
             summary.json     the end-of-run summary
             figures/         curves
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pods_cluster.telemetry.jsonl import read_lines
from pods_cluster.telemetry.secret_values import holds_secrets
from pods_cluster.telemetry.step_record import Record, drop_superseded
from pods_cluster.wording import age


class RunFolderError(Exception):
    """The folder cannot be used as asked; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run, and what is read from them. `create`, `resume` and `open` make it."""

    path: Path

    @classmethod
    def create(cls, root: str | Path, name: str, config_yaml: str) -> RunFolder:
        """Make the folder of a new run. Raises RunFolderError if it holds anything already, or cannot be made."""
        folder = cls(_absolute(root) / name)
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.path.mkdir()
            except FileExistsError:
                cls.refuse_occupied(root, name)
            folder._make_parts()
            _write_config(folder.config, config_yaml)
        except OSError as error:
            raise RunFolderError(
                f"{folder.path}: the run's folder cannot be made ({error.strerror or error}); set run.dir to a place "
                f"that can be written"
            ) from None
        return folder

    @classmethod
    def refuse_occupied(cls, root: str | Path, name: str) -> None:
        """Raise RunFolderError where `create` would find a file, or a folder that holds anything."""
        folder = cls(_absolute(root) / name)
        refuse_place(root)
        try:
            if folder.path.exists() and not folder.path.is_dir():
                raise RunFolderError(
                    f"{folder.path}: is a file; run.dir and run.name must give a folder: change one of them"
                )
            if folder.path.is_dir() and any(folder.path.iterdir()):
                raise RunFolderError(folder._occupied())
        except OSError as error:
            raise RunFolderError(
                f"{folder.path}: cannot be read ({error.strerror or error}); set run.dir to another place"
            ) from None

    @classmethod
    def resume(cls, root: str | Path, name: str, config_yaml: str) -> RunFolder:
        """The folder of a run that goes on. A configuration that differs replaces config.yaml; the old one is kept
        beside it as config.<n>.yaml. Raises RunFolderError if there is no run to go on with.
        """
        folder = cls.open(_absolute(root) / name)
        try:
            folder._make_parts()
            old = folder.config.read_text(encoding="utf-8")
            if old != config_yaml:
                number = next(n for n in range(1, 10**6) if not (folder.path / f"config.{n}.yaml").exists())
                _write_config(folder.path / f"config.{number}.yaml", old)
                _write_config(folder.config, config_yaml)
        except OSError as error:
            raise RunFolderError(f"{folder.path}: cannot be written ({error.strerror or error})") from None
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The folder of a run that exists. Raises RunFolderError."""
        folder = cls(_absolute(path))
        if not folder.path.exists():
            raise RunFolderError(f"{folder.path}: there is no such run; start it without --resume, or correct run.name")
        if not folder.config.is_file():
            raise RunFolderError(f"{folder.path}: is no run's folder: it has no config.yaml; give the path of a run")
        return folder

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def rewards_log(self) -> Path:
        return self.path / "rewards.log"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def copies(self) -> Path:
        return self.path / "copies"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    def read_metrics(self) -> list[Record]:
        """Step records that stand (steps that a resume took back left out), in the order written."""
        return drop_superseded(read_lines(self.metrics))

    def read_events(self) -> list[Record]:
        """Every event; what happened is never taken back."""
        return read_lines(self.events)

    def read_samples(self) -> list[Record]:
        """Sampled groups that stand."""
        return drop_superseded(read_lines(self.samples))

    def read_evals(self) -> list[Record]:
        """Held-out rows of the evaluations that stand: `step`, `version`, `row`, `greedy` (true, false, or null where
        it was not scored), `tokens`, and `sampled` (a list of such) where completions were sampled too.
        """
        return drop_superseded(read_lines(self.evals))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace summary.json in one piece. Raises OSError."""
        _write_atomically(self.summary, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for one writer; freed by itself when the process ends, however it ends.

        Raises RunFolderError if a process on this machine holds it. Where the file system has no locks it does nothing.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "another"
                    raise RunFolderError(
                        f"{self.path}: process {holder} is writing this run; stop it first, or use another run.name"
                    ) from None
            else:
                with contextlib.suppress(OSError):  # only for the message above: a full disk is no reason to stop
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _make_parts(self) -> None:
        for part in (self.checkpoints, self.figures):
            part.mkdir(exist_ok=True)

    def _occupied(self) -> str:
        about = "holds files already"
        if self.config.exists():
            records = self.read_metrics()
            step = max((record["step"] for record in records), default=0)
            ago = time.time() - max(
                path.stat().st_mtime for path in (self.config, self.metrics, self.events) if path.exists()
            )
            about = f"holds a run already (at step {step}, last written {age(ago)} ago)"
        return f"{self.path}: {about}; continue it with --resume, choose another run.name, or remove the folder"


def refuse_place(root: str | Path) -> None:
    """Raise RunFolderError where a file stands in the way of `run.dir`."""
    folder = _absolute(root)
    for place in (folder, *folder.parents):
        try:
            if place.is_dir():
                return
            in_the_way = place.exists()
        except OSError:  # it cannot be looked into: making the folder says why
            return
        if in_the_way:
            raise RunFolderError(
                f"run.dir: {str(root)!r} cannot be a folder: {place} is a file; set run.dir to another place"
            )


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def _write_config(path: Path, text: str) -> None:
    """Write a configuration; one with secrets in it is for its owner alone."""
    _write_atomically(path, text, mode=0o600 if holds_secrets(text) else 0o644)


def _write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Readers see the old file or the new one, never a half."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
