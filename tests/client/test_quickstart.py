"""`pods quickstart` with a short run and a paced engine: both arms, one figure, a sentence; and going on with it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from pods_cluster.client import demo
from pods_cluster.config import ConfigError
from pods_cluster.quickstart.warm_start import Prepared, Report
from pods_cluster.run.live_file import write_live_file
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError
from tests.tiny_run import Made

SHORT = [
    "run.steps=2",
    "run.eval.every=1",
    "run.checkpoint.every=1",
    "learner.prompts_per_step=4",
    "learner.warmup_steps=0",
    "selector.no_signal=keep",
    "generator.engine=paced",
    "generator.engine_options={tokens_per_second: 2000, shortest: 2, longest: 6, accuracy: 0.5, reward_token: 5}",
]


@pytest.fixture
def prepared(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model in place of the warm start, which takes a minute."""
    report = Report(
        parameters=1, steps=1, seconds=1.0, greedy=0.0, sampled=0.0, rows={"warm": 1, "train": 256, "test": 32}
    )

    class InPlace(Prepared):
        @property
        def data(self) -> Path:
            return self.folder

    monkeypatch.setattr(demo, "_prepare", lambda *_: InPlace(made.model.parent, report, reused=True))


def run(folder: Path, *overrides: str, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=300)
    done = demo.quickstart(folder, folder / "cache", [*SHORT, *overrides], console, **options)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return text if done else f"{text}\nnot done"


@pytest.mark.slow  # two whole runs
def test_both_arms_are_run_compared_and_gone_on_with(cluster: None, prepared: None, tmp_path: Path) -> None:
    text = run(tmp_path)
    arms = [RunFolder.open(tmp_path / name) for name in ("quickstart", "quickstart-grpo")]
    for folder, made in zip(arms, (16, 4), strict=True):
        steps = [record for record in folder.read_metrics() if record.get("updates")]
        assert [record["rollouts/generated"] for record in steps] == [4 * made] * 2
        assert [record["rollouts/trained"] for record in steps] == [4 * 4] * 2
    assert (arms[0].figures / "comparison.png").stat().st_size > 10_000
    assert "After 2 updates PODS (4 of 16) has" in text
    assert "of 32 held-out rows right and GRPO (4 of 4)" in text

    (arms[0].figures / "comparison.png").unlink()
    written = arms[1].metrics.read_bytes()
    again = run(tmp_path, resume=True)  # both are finished: nothing runs, the comparison is made again
    assert "quickstart is finished already" in again
    assert "quickstart-grpo is finished already" in again
    assert arms[1].metrics.read_bytes() == written
    assert (arms[0].figures / "comparison.png").is_file()


def test_what_cannot_be_gone_on_with_or_removed(prepared: None, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no such run"):
        run(tmp_path, resume=True)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no run; choose another with --dir"):
        run(tmp_path)
    folder = RunFolder.create(tmp_path / "alive", "quickstart", "")
    write_live_file(folder, "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="is a quickstart that is alive"):
        run(tmp_path / "alive")
    assert folder.config.exists()


def test_wrong_settings_are_refused_before_the_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_prepare", lambda *_: pytest.fail("it was made"))
    with pytest.raises(ConfigError, match=r"run\.steps: 0 is refused"):
        run(tmp_path, "run.steps=0")
    with pytest.raises(RunFolderError, match="there is no such run"):
        run(tmp_path, resume=True)


def test_a_run_that_is_grpo_already_has_no_baseline(prepared: None, made: Made, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "quickstart", "run:\n  steps: 2\n")
    with Recorder.for_run(folder) as recorder:
        recorder.step(2, {"loss": 0.1})
        recorder.event("finished", "done: 2 steps")
    shown = run(tmp_path, "generator.rollouts_per_prompt=4", resume=True)
    assert "this is plain GRPO already" in shown
    named = tmp_path / "cache" / "model"  # as in configs/quickstart.yaml
    assert str(named) in shown
    assert named.resolve() == made.model.resolve()
