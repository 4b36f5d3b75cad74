"""`pods init`: what it writes is a valid configuration for the data and the cards, and shipped ones are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from pods_cluster.client.cli import app
from pods_cluster.client.init_command import Answers, shipped, written
from pods_cluster.config import Config, ConfigError, load_config, parse_config


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def rows_in(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_every_number_of_cards_gives_a_valid_configuration(gpus: int) -> None:
    config: Config = parse_config(written(Answers("org/model", "rows.jsonl", "question", None, "", gpus, "model")))
    assert config.generator.engine == ("vllm" if gpus else "transformers")
    asked = config.generator.workers * config.generator.gpus(gpus) + config.learner.workers * config.learner.gpus(gpus)
    assert asked == gpus, "both pools together take the cards that there are"
    assert config.reward[0].name == "think_answer_format", "rows without an answer have none to compare with"


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "reward"),
    [
        ({"question": "1+1?", "solution": "2"}, "question", "solution", "math_answer"),
        ({"prompt": "1+1?"}, "prompt", None, "think_answer_format"),
        (
            {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "2"}},
            "prompt",
            "answer",
            "math_answer",
        ),
    ],
)
def test_columns_are_found_in_the_data(
    row: dict[str, Any], prompt: str, answer: str | None, reward: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    done = init(str(file), "--model", "org/My Model", "--data", str(rows_in(tmp_path, row)), "--gpus", "0")
    assert done.exit_code == 0, done.output
    assert "next: pods check" in done.output
    config = load_config(file)
    assert (config.data.prompt, config.data.answer, config.reward[0].name) == (prompt, answer, reward)
    assert config.run.name == "My-Model"
    again = init(str(file), "--model", "m", "--data", "d")
    assert isinstance(again.exception, ConfigError)
    assert "exists already" in str(again.exception)


def test_data_that_cannot_be_read_and_what_is_missing(tmp_path: Path) -> None:
    done = init(str(tmp_path / "a.yaml"), "--model", "m", "--data", str(tmp_path / "none.jsonl"), "--gpus", "0")
    assert done.exit_code == 0
    assert "the columns could not be read" in done.output
    assert load_config(tmp_path / "a.yaml").data.prompt == "prompt"
    asked = init(str(tmp_path / "b.yaml"), "--data", "rows.jsonl")
    assert "--model: missing, and there is no terminal to ask on" in str(asked.exception)


def test_shipped_configurations_are_listed_and_copied(tmp_path: Path) -> None:
    listed = init("--example", "list").output.splitlines()
    assert [line.split()[0] for line in listed] == shipped()
    assert "GSM8K" in next(line for line in listed if line.startswith("gsm8k-1gpu "))
    assert {"quickstart", "gsm8k-2gpu", "paper/a-pods"} <= set(shipped())
    assert init(str(tmp_path / "run.yaml"), "--example", "gsm8k-2gpu").exit_code == 0
    assert load_config(tmp_path / "run.yaml").run.name == "gsm8k-0.5b"
    assert "there is no 'gsm9k'; choose of" in str(init(str(tmp_path / "c.yaml"), "--example", "gsm9k").exception)


def test_comments_stand_in_one_column_and_never_change_a_value() -> None:
    text = written(Answers("m", "rows.jsonl", "prompt", "answer", "", 2, "n"))
    behind = [line for line in text.splitlines() if line.lstrip()[:1] not in ("#", "-") and "  # " in line]
    assert len(behind) > 8
    assert {line.index("# ") for line in behind} == {28}
    odd = written(Answers("m", "a  # b.jsonl", "prompt", "answer", "", 2, "n"))
    assert yaml.safe_load(odd)["data"]["path"] == "a  # b.jsonl"
