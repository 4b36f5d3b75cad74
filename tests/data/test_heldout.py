"""Held-out rows are held out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from pods_cluster.config import Config
from pods_cluster.data import DataError, load_eval
from pods_cluster.data.prompts import load_heldout


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a} + 1", "answer": str(a + 1)}) + "\n" for a in range(20)))
    return str(path)


def heldout(config: Config) -> list[str]:
    assert config.data.eval is not None
    return [row["answer"] for row in load_heldout(config.data, config.data.eval).rows]  # type: ignore[misc]


def test_one_file_in_two_parts(file: str, make_config: Callable[..., Config]) -> None:
    config = make_config(path=file, split="train[5:]", eval={"split": "train[:5]"})
    assert heldout(config) == ["1", "2", "3", "4", "5"]
    assert heldout(make_config(path=file, rows=12, eval={"split": "test[12:]", "rows": 2})) == ["13", "14"]


@pytest.mark.parametrize(
    ("data", "shared"),
    [
        ({"eval": {}}, "rows 0 to 19"),
        ({"eval": {"rows": 4}}, "rows 0 to 3"),
        ({"split": "train[5:]", "eval": {"split": "train[:8]"}}, "rows 5 to 7"),
        ({"rows": 12, "eval": {"split": "train[50%:]"}}, "rows 10 to 11"),
    ],
)
def test_trained_rows_are_refused(
    file: str, make_config: Callable[..., Config], data: dict[str, Any], shared: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.eval: {shared} of .* are trained on as well"):
        heldout(make_config(path=file, **data))
    same = data | {"eval": data["eval"] | {"path": str(Path(file).parent / "." / "rows.jsonl")}}
    with pytest.raises(DataError, match="trained on as well"):
        heldout(make_config(path=file, **same))


def test_splits_of_a_folder(tmp_path: Path, make_config: Callable[..., Config]) -> None:
    parts = {name: datasets.Dataset.from_list([{"prompt": name, "answer": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert heldout(make_config(path=str(tmp_path / "saved"), eval={})) == ["test"]
    with pytest.raises(DataError, match="trained on as well"):
        heldout(make_config(path=str(tmp_path / "saved"), eval={"split": "train"}))
    with pytest.raises(DataError, match=r"data\.eval\.split: 'dev' is not a split"):
        heldout(make_config(path=str(tmp_path / "saved"), eval={"split": "dev"}))
    parts["train"].save_to_disk(tmp_path / "one")
    with pytest.raises(DataError, match="trained on as well"):
        heldout(make_config(path=str(tmp_path / "one"), eval={}))


def test_another_file(tmp_path: Path, file: str, make_config: Callable[..., Config]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "x", "answer": "y"}\n')
    assert heldout(make_config(path=file, eval={"path": str(other)})) == ["y"]
    with pytest.raises(DataError, match=r"data\.eval\.path: .*gone\.jsonl' does not exist"):
        heldout(make_config(path=file, eval={"path": str(tmp_path / "gone.jsonl")}))


def test_no_evaluation(file: str, make_config: Callable[..., Config], tokenizers: dict[str, Any]) -> None:
    prompts = load_eval(make_config(path=file), tokenizers["chatml"])
    assert prompts == []
    assert prompts.dropped == 0


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"question": "1 + 1", "label": "2"}], r"'prompt' is not a column"),
        ([{"prompt": "1 + 1", "label": "2"}], r"'answer' is not a column"),
        ([{"prompt": [{"role": "user", "content": ""}], "answer": "2"}], r"of row 0 has no text"),
        ([{"prompt": [{"content": "1 + 1"}], "answer": "2"}], r"of row 0 holds .*not a chat message"),
    ],
    ids=["prompt column", "answer column", "no text", "no role"],
)
def test_a_fault_in_the_held_out_rows_is_told_of_them(
    rows: list[dict[str, Any]],
    told: str,
    file: str,
    tmp_path: Path,
    make_config: Callable[..., Config],
    tokenizers: dict[str, Any],
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"^data\.eval: rows of '.*other\.jsonl', .*" + told):
        load_eval(make_config(path=file, eval={"path": str(other)}), tokenizers["chatml"])
