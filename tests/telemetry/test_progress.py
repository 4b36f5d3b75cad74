"""The live display, fed with what the recorder makes."""

import io
import re
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from pods_cluster.telemetry.number_format import compact, duration, percent, plain_text, size, sparkline
from pods_cluster.telemetry.progress import Progress, ProgressState, line
from pods_cluster.telemetry.recorder import Recorder
from tests.telemetry.synthetic import told_steps


def records(steps: int = 30) -> list[dict]:
    with Recorder(strict=True) as recorder:
        return [recorder.step(step, values) for step, values in told_steps(steps, every=10)]


def shown(state: ProgressState, width: int = 110) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(state)
    return console.export_text()


def test_the_panel_shows_every_part() -> None:
    state = ProgressState("quickstart", 40, subtitle="n 64 → m 16")
    made = records()
    for record in made:
        state.update(record)
    state.event("worker_lost", "generator/0 died and is replaced", level="warning", elapsed=61.0)
    text = shown(state)
    before, now = made[0]["eval/greedy_accuracy"], made[-1]["eval/greedy_accuracy"]
    training = made[-2]
    for expected in (
        "quickstart",
        "n 64 → m 16",
        "30/40",
        "to go",
        f"rollouts/s {compact(training['throughput/rollouts_generated'])}",
        f"updates/s {compact(training['throughput/updates'])}",
        f"{compact(training['rollout_to_update_ratio'])} (run "
        f"{compact(training['rollout_to_update_ratio/cumulative'])})",
        f"greedy {100 * before:.1f} % → {100 * now:.1f} %",
        "sampled ",
        "1 generator ",
        "2 learners ",
        "generate ",
        "publish ",
        "trained 240",
        f"no signal {sum(record.get('groups/no_signal', 0) for record in made)}",
        "version 30",
        "4.8 MB",
        "staleness 0 mean 0 max",
        "1:01 min  generator/0 died and is replaced",
        "1 warning so far",
    ):
        assert expected in text, f"{expected!r} is missing in\n{text}"
    assert re.search("[▁▂▃▄▅▆▇█]{10}", text), "the sparkline of the reward"


@pytest.mark.parametrize("width", [20, 40, 72, 200])
def test_the_panel_fits_any_width(width: int) -> None:
    state = ProgressState("a-run-with-quite-a-long-name", 40, subtitle="some long words beside the name")
    for record in records():
        state.update(record)
    state.event("x", "a very long event " * 20, level="error")
    lines = shown(state, width).splitlines()
    assert all(len(text) <= width for text in lines)
    assert len(lines) < 120


def test_an_empty_and_an_odd_run_are_shown() -> None:
    assert "0/5" in shown(ProgressState("new", 5))
    state = ProgressState("odd", 5)
    state.update({"step": 1, "reward": None, "loss": "nan", "nonfinite": {"loss": "nan"}, "generator/idle_share": 1.7})
    state.update({"step": 2, "reward": float("nan"), "timing_s/generate": 0.0, "elapsed": 3.0})
    state.update({"eval/greedy_accuracy": 0.5})
    text = shown(state)
    assert "2/5" in text
    assert "50.0 % → 50.0 %" in text
    assert shown(ProgressState("none", 0))


def test_the_stage_bar_fills_its_width_and_is_of_the_last_step() -> None:
    state = ProgressState("bar", 5)
    state.update({"step": 1, "timing_s/eval": 9.0, "timing_s/update": 1.0})
    state.update({"step": 2, "timing_s/generate": 3.0})
    state.update({"step": 2, "timing_s/update": 1.0})
    text = shown(state, 60)
    assert "eval" not in text
    assert "generate 3" in text
    bar = next(row for row in text.splitlines() if "seconds" in row)
    assert bar.count("━") == 60 - 2 * 2 - len("seconds") - 2


def test_eta_follows_the_pace() -> None:
    state = ProgressState("eta", 100)
    for step in range(1, 11):
        state.update({"step": step, "elapsed": 2.0 * step})
    state.finished = True  # the clock stands
    assert state.eta == pytest.approx(180.0)
    state.update({"step": 100, "elapsed": 200.0})
    assert state.eta is None


def test_hostile_texts_stay_texts() -> None:
    state = ProgressState("x", 5)
    state.event("e", "[bold]not markup[/bold] \x1b[2J\x1b]0;title\x07 line\nbreak\r\u202ertl", level="warning")
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    console.print(state)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]not markup[/bold]" in written
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert "\u202e" not in written
    assert "line break" in written


def test_one_line_a_step_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress("quickstart", 30, console=Console(file=out, width=40)) as progress:
        for record in records():
            progress.update(record)
        progress.event(kind="checkpoint", text="saved [step 30]", level="info", time=1.0, step=30, elapsed=1.0)
        progress.event("worker_lost", "generator/0 died", level="warning")
    lines = out.getvalue().splitlines()
    assert len(lines) == 30 + 4 + 2
    assert lines[1].startswith("step 1/30 · reward 0.")
    assert "rollouts 512 made 128 trained · 3.99 rollouts per trained rollout (run 3.99)" in lines[1]
    assert "greedy accuracy" in lines[0]
    assert lines[-2:] == ["saved [step 30]", "warning: generator/0 died"]
    assert "\x1b" not in out.getvalue()


def test_a_loss_that_is_no_number_is_seen_in_the_line() -> None:
    with Recorder(strict=True) as recorder:
        record = recorder.step(3, {"loss": float("nan"), "reward": 0.5})
    assert "loss nan" in line(ProgressState("x", 9), record)


def test_the_feed_of_a_recorder_is_shown() -> None:
    out = io.StringIO()
    with Recorder(strict=True) as recorder, Progress("x", 3, console=Console(file=out)) as progress:
        recorder.step(1, {"reward": 0.25})
        recorder.warning("slow", "a slow worker", worker="x/generator/0")
        feed = recorder.poll()
        progress.feed(feed.items)
        progress.feed(recorder.poll(feed.cursor).items)
    assert [text.split(" · ")[0] for text in out.getvalue().splitlines()] == ["step 1/3", "warning: a slow worker"]


def test_the_live_panel_renews_itself_and_stays_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with Progress("live", 30, console=console) as progress:
        progress.stage("generating")
        for record in records():
            progress.update(record)
    text = out.getvalue()
    assert "30/30" in text
    assert "done" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_closed_pipe_ends_the_display_not_the_run() -> None:
    code = """
        import os
        from pods_cluster.telemetry.progress import Progress
        with Progress("x", 200) as progress:
            for step in range(200):
                progress.update({"step": step, "reward": 0.5, "elapsed": step})
        os.write(2, b"the run ended")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert b"the run ended" in errors
    assert b"Traceback" not in errors.split(b"the run ended")[0]


def test_numbers_for_people() -> None:
    assert [compact(value) for value in (None, 0, 0.25, 1.5, 12.34, 1234.5, 12345, 2.5e6, 3e-7, -0.5)] == [
        *("–", "0", "0.250", "1.50", "12.3"),
        *("1,234", "12.3k", "2.5M", "3.0e-07", "-0.500"),
    ]
    assert compact(float("nan")) == "nan"
    assert [duration(value) for value in (None, 0.12, 1.25, 42, 185, 3700, 100_000)] == [
        *("–", "0.12 s", "1.2 s", "42 s", "3:05 min", "1:01 h", "1 d 3 h")
    ]
    assert [percent(0.123), percent(0.123, 1), percent(None)] == ["12 %", "12.3 %", "–"]
    assert [size(value) for value in (12, 1.5e6, 2e9)] == ["12 B", "1.5 MB", "2.0 GB"]
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([]) == sparkline([float("nan")]) == ""
    assert len(sparkline(range(1000), 24)) == 24
    assert plain_text("a" * 400, 10) == "a" * 9 + "…"
