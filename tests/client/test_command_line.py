"""Commands given in wrong ways: each ends with an exit code above 0 and a sentence, at once and without a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.client.command import run_here
from tests.client.test_wrong_inputs import BASE

Pods = Callable[..., tuple[int, str]]


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Pods:
    """Runs a command beside `run.yaml` and `runs/done`, a run that has ended; (exit code, what it said without breaks)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "400")
    if "ray" in sys.modules:  # a command's own process is not connected to the cluster of other tests
        monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    Path("run.yaml").write_text(yaml.safe_dump(BASE))
    done = Path("runs/done")
    done.mkdir(parents=True)
    (done / "config.yaml").write_text(yaml.safe_dump(BASE))
    records = [{"step": step, "elapsed": float(step), "timing_s/step": 1.0, "reward": 0.5} for step in range(12)]
    (done / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (done / "events.jsonl").write_text(json.dumps({"kind": "finished", "text": "finished", "time": 1.0}) + "\n")

    return partial(run_here, capsys)


LONG = "x" * 300
HOME = "names the home folder of a user whom this machine does not have"
WRONG: dict[str, tuple[list[str], int, str]] = {
    "status of nothing": (["status", ""], 1, "is not the folder of a run"),
    "status of a file": (["status", "runs/done/metrics.jsonl"], 1, "is not the folder of a run"),
    "status of a user": (["status", "~nobody_of_this_name/x"], 1, HOME),
    "status of a long name": (["status", LONG], 1, "File name too long"),
    "scale of a user": (["scale", "~nobody_of_this_name/x", "--generators", "2"], 1, HOME),
    "scale of a long name": (["scale", LONG, "--generators", "2"], 1, "File name too long"),
    "stop of a long name": (["stop", LONG], 1, "File name too long"),
    "scale of an ended run": (["scale", "done", "--generators", "2"], 1, "the run is not alive"),
    "stop of an ended run": (["stop", "done"], 1, "the run is not alive"),
    "scale to nothing": (["scale", "done"], 1, "give --generators, --learners, or both"),
    "scale to 0": (
        ["scale", "done", "--generators", "0"],
        2,
        "'--generators': Input should be greater than or equal to 1",
    ),
    "scale to less": (
        ["scale", "done", "--generators", "-1"],
        2,
        "'--generators': Input should be greater than or equal to 1",
    ),
    "scale to a half": (["scale", "done", "--learners", "1.5"], 2, "'--learners': Input should be a valid integer"),
    "scale to 1e9": (["scale", "done", "--generators", "1e9"], 2, "'--generators': Input should be a valid integer"),
    "scale for ever": (
        ["scale", "done", "--generators", "2", "--wait", "--timeout", "nan"],
        2,
        "nan is no finite number",
    ),
    "scale in the past": (["scale", "done", "--generators", "2", "--timeout", "-1"], 2, "-1 is less than 0"),
    "stop for ever": (["stop", "done", "--timeout", "inf"], 2, "inf is no finite number"),
    "scale nowhere": (
        ["scale", "nope", "--generators", "2", "--address", "127.0.0.1:1"],
        1,
        "no Ray cluster at 127.0.0.1:1",
    ),
    "compare to NaN": (["compare", "done", "--target", "nan"], 2, "nan is no finite number"),
    "compare a share of NaN": (["compare", "done", "--share", "nan"], 2, "'--share': "),
    "compare a gain of infinity": (["compare", "done", "--gain", "inf"], 2, "inf is no finite number"),
    "compare into a file": (["compare", "done", "--metric", "reward", "--out", "run.yaml"], 1, "run.yaml: File exists"),
    "one run as two seeds": (
        ["compare", "a=done", "a=runs/done/", "--metric", "reward"],
        1,
        "would count as two seeds",
    ),
    "a figure of one run twice": (["figure", "done", "runs/done"], 1, "would count as two seeds"),
    "figure into a file": (["figure", "done", "--out", "run.yaml"], 1, "run.yaml: File exists"),
    "figure of a path": (["figure", "done", "--name", "../x"], 1, "--name: '../x' is no name of a file"),
    "figure of nothing": (["figure", "done", "--name", ""], 1, "--name: '' is no name of a file"),
    "figure of a user": (["figure", "~nobody_of_this_name/x"], 1, HOME),
    "runs of a user": (["runs", "~nobody_of_this_name/x"], 1, HOME),
    "eval of a user": (["eval", "~nobody_of_this_name/x"], 1, HOME),
    "a large port": (["dashboard", "runs", "--port", "99999999"], 1, "--port 99999999: is no port"),
    "a small port": (["dashboard", "runs", "--port", "-1"], 1, "--port -1: is no port"),
    "a port of words": (["dashboard", "runs", "--port", "http"], 2, "'--port': Input should be a valid integer"),
    "an override of half": (["check", "run.yaml", "run.steps=\ud800"], 1, "is not valid YAML"),
    "options behind": (["check", "run.yaml", "--", "--resume"], 1, "an override is written key=value"),
    "another command": (["trian"], 2, "trian"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_commands(pods: Pods, name: str) -> None:
    words, code, told = WRONG[name]
    found, said = pods(*words)
    assert found == code, said
    assert told in said
    assert "Traceback" not in said


def test_a_title_and_labels_are_drawn_as_written(pods: Pods) -> None:
    """matplotlib takes what stands between two `$` for a formula, and refuses most of them."""
    code, said = pods("figure", r"$\frac$ 5$=done", "--title", r"$\nope$", "--y", "reward", "--formats", "svg")
    assert code == 0, said
    assert r"$\nope$" in Path("runs/done/figures/comparison.svg").read_text()
