"""The end-of-run summary and its figures, from folders that the recorder wrote."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pods_cluster.telemetry.figure import save_figures, stages_overlap
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.report import render
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.summary import Summary, summarize, write_summary
from tests.telemetry.synthetic import told_steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list, Summary]:
    """A run of 40 steps as the recorder wrote it, what was told, and its summary."""
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "quickstart", "")
    told = list(told_steps(40, every=10))
    with Recorder.for_run(folder, strict=True) as recorder:
        for step, values in told:
            recorder.step(step, values)
        recorder.warning("worker_lost", "generator/0 died")
    folder.model.mkdir()
    (folder.model / "model.safetensors").write_bytes(b"x")
    return folder, told, write_summary(folder, status="stopped")


def text_of(summary, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(render(summary))
    return console.export_text()


def test_the_summary_adds_up(run: tuple[RunFolder, list, Summary]) -> None:
    folder, told, summary = run

    def total(name: str) -> float:
        return sum(values.get(name, 0) for _, values in told)

    greedy = [(step, values["eval/greedy_accuracy"]) for step, values in told if "eval/greedy_accuracy" in values]
    found = summary.evaluations["eval/greedy_accuracy"]
    assert (found.before, found.after) == pytest.approx((greedy[0][1], greedy[-1][1]))
    assert (found.best_step, found.best) == pytest.approx(max(greedy, key=lambda point: point[1]))
    assert summary.steps == 40
    for kind in ("generated", "scored", "selected", "trained"):
        assert summary.rollouts[kind] == total(f"rollouts/{kind}")
    assert summary.ratio == pytest.approx(total("rollouts/scored") / total("rollouts/trained"))
    assert summary.token_ratio == pytest.approx(total("tokens/sampled") / total("tokens/trained"))
    assert summary.stage_seconds["generate"] == pytest.approx(total("timing_s/generate"))
    assert sum(summary.stage_shares.values()) == pytest.approx(1.0)
    assert not summary.stages_overlap
    assert summary.fates == {"trained": 320, "no_signal": total("groups/no_signal"), "stale": 0}
    assert summary.rates["updates_per_second"] == pytest.approx(40 / total("timing_s/step"))
    weights = [(values["generator/idle_share"], values["timing_s/step"]) for _, values in told if "updates" in values]
    mean = sum(share * time for share, time in weights) / sum(time for _, time in weights)
    assert summary.idle_shares["generator"] == pytest.approx(mean)
    assert (summary.weights_version, summary.warnings, summary.errors) == (40, 1, 0)
    assert summary.model == str(folder.model)
    assert summary.notes == []
    on_disk = json.loads(folder.summary.read_text())
    assert on_disk["rollouts"]["trained"] == summary.rollouts["trained"]
    assert on_disk["evaluations"]["eval/greedy_accuracy"]["before"] == found.before


def test_the_summary_reads_well(run: tuple[RunFolder, list, Summary]) -> None:
    folder, _, summary = run
    text = text_of(summary, 200)
    found = summary.evaluations["eval/greedy_accuracy"]
    for expected in (
        "quickstart stopped after 40 steps",
        f"{100 * found.before:.1f} %",
        f"{100 * found.after:.1f} %",
        f"{100 * (found.after - found.before):+.1f} points",
        "rollouts per trained rollout",
        "generators ",
        "320 trained",
        "generate",
        "1 warning",
        str(folder.figures / "curve.png"),
        str(folder.model),
    ):
        assert expected in text, f"{expected!r} is missing in\n{text}"
    assert text_of(summary, 40)


def test_figures_are_drawn_and_leave_nothing_behind(run: tuple[RunFolder, list, Summary], tmp_path: Path) -> None:
    folder, _, summary = run
    assert [Path(figure).name for figure in summary.figures] == ["curve.png", "seconds.png"]
    from matplotlib import image, pyplot

    curve = image.imread(summary.figures[0])
    height, width, _ = curve.shape
    assert width > 1200
    assert height > 700
    for color in ((0x0F, 0x76, 0x6E), (0x25, 0x63, 0xEB), (0xD9, 0x77, 0x06)):
        near = (abs(curve[..., :3] * 255 - color).max(axis=-1) < 2).sum()
        assert near > 200, f"the line in {color} is drawn"
    assert (curve[:, :4, :3] > 0.99).all(), "nothing is cut off at the left edge"
    before = pyplot.get_fignums()  # other tests of this process may have left some
    assert save_figures(folder.read_metrics(), tmp_path)
    assert pyplot.get_fignums() == before


def test_a_figure_for_what_there_is(tmp_path: Path) -> None:
    assert save_figures([], tmp_path / "none") == []
    only_reward = [{"step": 1, "elapsed": 1.0, "reward": 0.5}]
    assert [path.name for path in save_figures(only_reward, tmp_path / "one")] == ["curve.png"]
    only_eval = [{"step": 0, "elapsed": 1.0, "eval/greedy_accuracy": 0.0}]
    assert [path.name for path in save_figures(only_eval, tmp_path / "two")] == ["curve.png"]
    odd = [
        {"step": 1, "elapsed": 1.0, "reward": float("nan"), "timing_s/update": 1.0},
        {"step": 2, "elapsed": 2.0, "reward": None, "timing_s/update": float("inf")},
    ]
    assert [path.name for path in save_figures(odd, tmp_path / "three")] == ["seconds.png"]


def test_an_empty_run_has_a_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "nothing", "")
    summary = write_summary(folder, status="failed")
    assert (summary.steps, summary.ratio, summary.figures, summary.evaluations) == (0, None, [], {})
    assert "nothing failed after 0 steps" in text_of(summary)
    assert json.loads(folder.summary.read_text())["status"] == "failed"


def test_a_summary_that_cannot_be_written_is_returned_all_the_same(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "obstructed", "")
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.step(40, {"reward": 0.5})
    folder.figures.rmdir()
    folder.figures.write_text("in the way")
    folder.summary.mkdir()
    summary = write_summary(folder)
    assert summary.steps == 40
    assert len(summary.notes) == 2
    assert "no figure: " in summary.notes[0]
    assert "summary.json could not be written" in summary.notes[1]
    assert "no figure" in text_of(summary)


def test_values_that_are_no_numbers_stay_out_of_the_sums() -> None:
    summary = summarize(
        [
            {"step": 1, "elapsed": 1.0, "reward": float("nan"), "rollouts/scored": 8, "rollouts/trained": 0},
            {"step": 2, "elapsed": 2.0, "reward": 0.5, "rollouts/scored": None, "rollouts/trained": 4},
        ]
    )
    assert summary.ratio == 2.0
    assert summary.reward_first == summary.reward_last == 0.5
    json.dumps(summary.as_dict(), allow_nan=False)


def test_overlapping_stages_are_named() -> None:
    serial = [{"step": 1, "timing_s/generate": 2.0, "timing_s/update": 1.0, "timing_s/eval": 9.0, "timing_s/step": 3.0}]
    overlapped = [{"step": 1, "timing_s/generate": 2.0, "timing_s/update": 2.0, "timing_s/step": 2.1}]
    assert not stages_overlap(serial)
    assert stages_overlap(overlapped)
    assert "they overlap" in text_of(summarize(overlapped))


def test_a_run_that_trained_nothing_says_so() -> None:
    empty = [{"step": step, "elapsed": step, "groups/no_signal": 8, "weights/version": 0} for step in (1, 2, 3)]
    summary = summarize(empty)
    assert summary.trained_nothing
    assert "nothing was trained in 3 steps (groups: 24 no_signal)" in text_of(summary, 200)
    assert not summarize([*empty, {"step": 4, "elapsed": 4, "weights/version": 1}]).trained_nothing
    assert not summarize([]).trained_nothing


def test_rewards_that_failed_stand_in_the_summary_with_their_last_error() -> None:
    steps = [{"step": step, "elapsed": step, "scoring/failures/error/my/judge": 20} for step in (1, 2, 3)]
    told = {"kind": "reward_failed", "level": "warning", "reward": "my/judge", "failure": "error"}
    events = [
        told | {"count": 1, "message": "KeyError: 'a' (r.py:2 in f)"},
        told | {"count": 10, "message": "KeyError: 'b' (r.py:2 in f)"},
        told | {"reward": "slow", "failure": "timeout", "count": 4, "message": "no result within 5 s"},
    ]
    notes = summarize(steps, events).notes
    assert notes == [
        "reward 'my/judge' gave no number for 60 rollouts (error): KeyError: 'b' (r.py:2 in f)",
        "reward 'slow' gave no number for 4 rollouts (timeout): no result within 5 s",
    ]
    assert notes[0] in text_of(summarize(steps, events), 200)
    assert summarize([{"step": 1, "scoring/failures/error/x": 0}]).notes == []
