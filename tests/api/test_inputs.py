"""What `pods_cluster.train` makes of its arguments, before anything is started."""

from __future__ import annotations

import datetime
import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

import pods_cluster
from pods_cluster.api import rewards as module_under_test
from pods_cluster.api.rewards import reward_entries
from pods_cluster.api.train import configure
from pods_cluster.config import Config, ConfigError, RewardConfig, dump_config, parse_config
from pods_cluster.data.source import load_source
from pods_cluster.scoring.pickled_function import PickleError, pickle_function, unpickle_function

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
LOCK = threading.Lock()


def module_level(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(ROWS)) for _ in completions]


def holds_a_lock(completions: list[str], **columns: Any) -> list[float]:
    with LOCK:
        return [1.0 for _ in completions]


class Scorer:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.value for _ in completions]


def configured(tmp_path: Path, dataset: Any = ROWS, reward: Any = "exact_match", **sections: Any) -> Config:
    return configure("some/model", dataset, reward, config={"run.dir": tmp_path}, **sections)


@pytest.mark.parametrize(
    "dataset",
    [ROWS, tuple(ROWS), Dataset.from_list(ROWS), DatasetDict({"train": Dataset.from_list(ROWS)}), pd.DataFrame(ROWS)],
    ids=["list", "tuple", "Dataset", "DatasetDict", "frame"],
)
def test_rows_of_any_kind_are_read_again_as_they_were(dataset: Any, tmp_path: Path) -> None:
    data = configured(tmp_path, dataset).data
    source = load_source(data.path, data.name, data.split)
    assert [dict(row) for row in source.rows] == ROWS
    assert Path(data.path).is_relative_to(tmp_path / ".inputs")
    again = configured(tmp_path, dataset, run={"name": Path(data.path).parent.name})
    assert again.data.path == data.path, "the same rows lie where they lay"


def test_rows_without_an_answer_and_with_held_out_ones(tmp_path: Path) -> None:
    config = configured(tmp_path, [{"prompt": "a", "solution": "b"}], module_level, eval_dataset=[{"prompt": "c"}])
    assert config.data.answer is None
    assert config.data.eval is not None
    assert json.loads(Path(config.data.eval.path or "").read_text()) == {"prompt": "c"}
    assert config.run.eval.every == 10
    verl = [{"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}}]
    assert configured(tmp_path, verl).data.answer == "answer", "verl's answer is found without its name"
    kept = configured(tmp_path, [{"prompt": "a", "when": datetime.date(2025, 1, 2), "n": np.int64(3)}], module_level)
    assert json.loads(Path(kept.data.path).read_text()) == {"prompt": "a", "when": "2025-01-02", "n": 3}


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ([], "dataset: is an empty list"),
        ([{"prompt": "a", "file": LOCK}], "dataset: row 0 cannot be written as JSON"),
        ([ROWS[0], {"prompt": "half \ud800", "answer": "1"}], "dataset: row 1 cannot be written as JSON"),
        ([ROWS[0], {"prompt": "a", "answer": {1, 2}}], "dataset: row 1 cannot be written as JSON"),
        ([{("a", "b"): 1}], "dataset: row 0 cannot be written as JSON"),
        ({"prompt": ["a"]}, "dataset: a dict is no dataset; give a datasets.Dataset"),
        (Dataset.from_dict({"prompt": []}), "dataset: holds no rows"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), "dataset: a streaming dataset has no rows by number"),
        (iter(ROWS), "is no dataset"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        configured(tmp_path, dataset)
    assert not list(tmp_path.iterdir())


def test_missing_values_of_a_frame_are_none(tmp_path: Path) -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": pd.array([1, pd.NA], dtype="Int64"),
                          "day": pd.to_datetime(["2024-05-10", None])})  # fmt: skip
    config = configure("model", frame, "exact_match", run={"name": "r", "dir": str(tmp_path)})
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    assert rows[1] == {"prompt": "b", "answer": None, "day": None}
    assert rows[0]["answer"] == 1


def test_rows_that_cannot_be_written_name_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: the dataset's rows cannot be written to .*set run\.dir"):
        configure("model", ROWS, "exact_match", run={"name": "r", "dir": str(tmp_path / "file")})


def test_settings_are_nested_or_dotted_and_answered_as_those_of_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learner: {learning_rate: 1e-5, prompts_per_step: 4}\nreward: [{name: exact_match}]\n")
    config = configure(
        "some/model",
        "rows.jsonl",
        config=file,
        learner={"prompts_per_step": np.int64(8)},
        staleness=1,
        **{"run.name": "mine", "generator.workers": 2, "reward.0.weight": 2},
    )
    assert (config.learner.learning_rate, config.learner.prompts_per_step) == (1e-5, 8)
    assert (config.run.name, config.generator.workers, config.staleness) == ("mine", 2, 1)
    assert config.reward[0].weight == 2
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, num_generations=8, learning_rate=1e-5, learner={"kepe": 1}, **{"run.steps": "many"})
    text = str(refused.value)
    assert text.startswith("train: 4 problems")
    assert "num_generations: unknown field (value 8); here it is generator.rollouts_per_prompt" in text
    assert "it belongs to learner: write learner.learning_rate" in text
    assert not (tmp_path / ".inputs").exists(), "nothing is written for a run that is refused"
    with pytest.raises(ConfigError, match=r"staleness\.k: staleness is a value"):
        configured(tmp_path, staleness=1, **{"staleness.k": 1})


def test_the_name_and_the_engine_follow_from_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = configured(tmp_path)
    assert config.run.name.startswith("model-20")
    assert config.generator.engine == "transformers"
    assert configured(tmp_path, generator={"engine": "paced"}).generator.engine == "paced"


def test_a_model_object_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: a Scorer lies in this process alone.*save_pretrained"):
        configure(Scorer(1.0), ROWS, "exact_match", config={"run.dir": tmp_path})


def run_in_another_process(code: str) -> list[float]:
    """What the function of a text returns in an interpreter that has none of this process's modules."""
    program = (
        "import sys; from pods_cluster.scoring.pickled_function import unpickle_function; "
        "print(unpickle_function(sys.stdin.read())(completions=['a', 'bc']))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=code, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_functions_travel_by_value_under_their_names() -> None:
    factor = 0.5

    def closure(completions: list[str], **columns: Any) -> list[float]:
        return [factor * len(text) for text in completions]

    entries = reward_entries(
        [closure, lambda completions: [1.0] * len(completions), module_level, Scorer(3.0), functools.partial(closure)],
        {"none": "skip"},
    )
    assert [entry["label"] for entry in entries] == ["closure", "lambda", "module_level", "Scorer", "closure_2"]
    assert all(entry["none"] == "skip" for entry in entries)
    built = [RewardConfig.model_validate(entry) for entry in entries]
    assert [reward.key for reward in built] == [entry["label"] for entry in entries]
    assert run_in_another_process(entries[0]["code"]) == [0.5, 1.0]
    results = [unpickle_function(entry["code"])(completions=["a", "bc"]) for entry in entries]
    assert results == [[0.5, 1.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [0.5, 1.0]]


def test_a_run_with_such_a_function_is_whole_in_its_yaml(tmp_path: Path) -> None:
    config = configured(tmp_path, reward=lambda completions, **columns: [0.25] * len(completions))
    again = parse_config(dump_config(config))
    assert again == config, "`pods train config.yaml --resume` goes on with it"
    assert run_in_another_process(again.reward[0].code or "") == [0.25, 0.25]


def test_installed_functions_are_named_and_names_pass() -> None:
    assert reward_entries("math_answer") == [{"name": "math_answer"}]
    assert reward_entries({"name": "mine.py:f", "weight": 0.5}) == [{"name": "mine.py:f", "weight": 0.5}]
    assert reward_entries(json.dumps) == [{"name": "json:dumps"}]
    assert reward_entries(RewardConfig(name="tag_count"))[0]["name"] == "tag_count"
    (own,) = reward_entries({"name": module_level, "weight": 0.5, "label": "length"})
    assert (own["label"], own["weight"]) == ("length", 0.5)


def test_what_cannot_travel_is_named_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reward_entries(holds_a_lock) == [{"name": f"{__name__}:holds_a_lock"}], "its module makes the lock anew"

    def holds_one(completions: list[str], lock: Any = LOCK) -> list[float]:
        return [1.0]

    with pytest.raises(
        ConfigError, match=r"reward\.0: the function .*holds_one cannot be sent .*lock.*inside the function"
    ):
        reward_entries(holds_one)
    data = np.random.default_rng(0).random(1 << 18)
    with pytest.raises(PickleError, match=r"takes [\d.]+ MiB with what it holds, and 1 MiB is the most"):
        pickle_function(lambda completions: [data.sum()])
    with pytest.raises(ConfigError, match=r"reward\.1: 3 is no reward"):
        reward_entries(["exact_match", 3])  # type: ignore[list-item]
    assert module_under_test.reward_entries([]) == []


def test_the_package_is_light_and_says_what_it_has() -> None:
    program = "import sys, pods_cluster; print(sorted({'ray', 'torch', 'pydantic', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert {"train", "TrainResult", "__version__"} <= set(dir(pods_cluster))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pods_cluster.trian  # type: ignore[attr-defined]
