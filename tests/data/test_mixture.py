"""Several datasets as one: each row as often as its weight says, one order over all, and none held out twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import Config
from pods_cluster.data import DataError, load_eval, load_prompts
from pods_cluster.data.mixture import repeated_rows
from tests.law import law


def file_of(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@law(80)
@given(st.integers(1, 60), st.floats(0.01, 5), st.integers(0, 2**63 - 1), st.integers(0, 3))
def test_each_row_is_there_as_often_as_the_weight_says(rows: int, weight: float, seed: int, part: int) -> None:
    indices = repeated_rows(rows, weight, seed, part)
    assert len(indices) == max(1, round(weight * rows))
    counts = Counter(indices.tolist())
    assert set(counts) <= set(range(rows))
    assert {counts[row] for row in range(rows)} <= {len(indices) // rows, len(indices) // rows + 1}
    assert np.array_equal(indices, repeated_rows(rows, weight, seed, part)), "a resumed run has the same rows"


def test_an_epoch_serves_all_datasets_in_one_order(
    tokenizers: dict[str, Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    first = file_of(tmp_path, "a", *({"prompt": f"a{n}", "answer": str(n)} for n in range(10)))
    second = file_of(tmp_path, "b", *({"question": f"b{n}", "solution": str(-n), "level": n} for n in range(8)))
    config = make_config(
        path=first,
        mix=[{"path": second, "prompt": "question", "answer": "solution", "weight": 0.5}, {"path": first, "weight": 2}],
    )
    stream = load_prompts(config, tokenizers["chatml"])
    assert len(stream) == 10 + 4 + 20
    prompts = stream.next(len(stream))
    assert {prompt.epoch for prompt in prompts} == {0}
    served = Counter(prompt.text.split("user\n")[-1].split("<")[0].strip() for prompt in prompts)
    assert {count for text, count in served.items() if text.startswith("a")} == {3}
    assert [text for text in served if text.startswith("b")] != [], "rows of the other are among them"
    assert sum(count for text, count in served.items() if text.startswith("b")) == 4
    of_b = [prompt for prompt in prompts if prompt.columns.get("level") is not None]
    assert [prompt.answer for prompt in of_b] == [str(-prompt.columns["level"]) for prompt in of_b]
    again = load_prompts(config, tokenizers["chatml"])
    again.restore(stream.state())
    assert [prompt.text for prompt in again.next(5)] == [prompt.text for prompt in stream.next(5)]


def test_what_cannot_be_mixed_is_told(
    tokenizers: dict[str, Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    first = file_of(tmp_path, "a", {"prompt": "a", "answer": "1", "level": 1})
    second = file_of(tmp_path, "b", {"question": "b", "answer": "1"})
    chats = file_of(tmp_path, "c", {"prompt": [{"role": "user", "content": "c"}], "answer": "1"})

    def refusal(**part: Any) -> str:
        with pytest.raises(DataError) as error:
            load_prompts(make_config(path=first, mix=[part]), tokenizers["chatml"])
        return str(error.value)

    assert "data.mix.0.prompt: left out, and" in refusal(path=second)
    assert "data.mix.0.prompt: 'problem' is not a column of" in refusal(path=second, prompt="problem")
    assert "data.mix.0.path: " in refusal(path=str(tmp_path / "none.jsonl"))
    assert "data.mix: the datasets have columns of one name that hold different kinds" in refusal(path=chats)
    held_out = make_config(
        path=first, mix=[{"path": second, "prompt": "question"}], eval={"path": second, "split": "train"}
    )
    with pytest.raises(DataError, match="are trained on as well, so they are not held out"):
        load_eval(held_out, tokenizers["chatml"])
