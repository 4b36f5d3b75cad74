"""The files in `benchmarks/results/` are compact, and the figures of the documentation come from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from benchmarks import figures
from benchmarks._result_file import records, render, table, write_result

RESULTS = sorted((figures.ROOT / figures.RESULTS).glob("*.json"))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=6),
    max_leaves=30,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=12), plain, max_size=6))
def test_a_result_file_reads_back_as_it_was(result: dict) -> None:
    text = render(result)
    assert render(json.loads(text)) == text

    def same(a: object, b: object) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, float) and isinstance(b, (int, float)):
            return math.isclose(a, b, rel_tol=1e-5, abs_tol=0.0)
        return type(a) is type(b) and a == b

    assert same(result, json.loads(text))


def test_a_table_names_its_columns_once(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.5, "other": 3}, {"step": 2}]
    found = table(rows, ("step", "loss"))
    assert found == {"columns": ["step", "loss"], "rows": [[1, 0.5], [2, None]]}
    assert records(found) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    write_result(tmp_path / "new" / "result.json", {"steps": found})
    assert json.loads((tmp_path / "new" / "result.json").read_text())["steps"] == found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_files_are_as_the_benchmarks_write_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert render(json.loads(text)) == text


def test_all_results_together_are_small() -> None:
    """In bytes, 9 kB a file on average; a benchmark keeps what its figure and its text need, not every step of every metric."""
    folder = figures.ROOT / figures.RESULTS
    sizes = [path.stat().st_size for path in (*folder.glob("*.json"), *folder.glob("*.jsonl"))]
    assert sum(sizes) < 9_000 * len(sizes)
    assert max(sizes) < 45_000


@pytest.mark.parametrize("figure", figures.FIGURES, ids=lambda path: path.stem)
def test_figures_come_from_the_result_files(figure: Path, tmp_path: Path) -> None:
    drawn = imread(figures.draw(figure, tmp_path))
    kept = imread(figures.ROOT / figure)
    assert drawn.shape == kept.shape
    # Another matplotlib may place a letter elsewhere by a pixel; another curve changes far more than that.
    assert float(np.abs(drawn - kept).mean()) < 0.01
