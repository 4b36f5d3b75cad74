"""Rows that are read when they are served: those of the files, in blocks, in an order that a resumed run goes on in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import Config
from pods_cluster.data import DataError, PromptStream, RowError, load_prompts, reward_columns
from pods_cluster.data.order import block_order
from pods_cluster.data.streamed import BLOCKS, JsonLines, StreamedRows, open_files
from pods_cluster.data.streamed_source import stream_source
from pods_cluster.data.survey import survey
from pods_cluster.types import Prompt
from tests.law import law

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@law(60)
@given(
    st.lists(
        st.one_of(st.dictionaries(texts, texts, min_size=1, max_size=3), st.sampled_from(["", "  ", "\t"])), max_size=30
    ),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_lines_are_found_where_they_are(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], chunk: int, ended: bool, newline: str
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    written = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_bytes((newline.join(written) + (newline if ended else "")).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pods_cluster.data.streamed._CHUNK", chunk)
        file = JsonLines(str(path))
    rows = [line for line in lines if not isinstance(line, str)]
    assert file.rows == len(rows)
    for start, stop in ((0, len(rows)), (len(rows) // 3, len(rows) // 2), (len(rows), len(rows))):
        assert [file.row(raw, 0) for raw in file.read(start, stop)] == rows[start:stop]


@law(100)
@given(st.integers(0, 2**63 - 1), st.integers(0, 5), st.integers(0, 60), st.integers(1, 20))
def test_an_order_goes_through_each_block_once(seed: int, epoch: int, rows: int, block: int) -> None:
    order = block_order(seed, epoch, rows, block).tolist()
    assert sorted(order) == list(range(rows))
    blocks = [row // block for row in order]
    changes = sum(one != other for one, other in itertools.pairwise(blocks))
    assert changes == max(0, -(-rows // block) - 1), "a block is left once, so it is read once"
    assert order == block_order(seed, epoch, rows, block).tolist()
    if rows > 20 and block > 8:
        assert order != block_order(seed, epoch + 1, rows, block).tolist()


def files(folder: Path) -> list[str]:
    """Twenty-five rows in a JSONL file and two parquet files of several row groups."""
    rows = [{"prompt": f"{n}+1", "answer": str(n + 1)} for n in range(25)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
    for name, part in (("b.parquet", rows[7:12]), ("c.parquet", rows[12:])):
        parquet.write_table(pa.Table.from_pylist(part), folder / name, row_group_size=3)
    return [str(folder / name) for name in ("a.jsonl", "b.parquet", "c.parquet")]


@pytest.mark.parametrize("span", [range(25), range(5, 14), range(24, 25)])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_rows_of_several_files_by_number(tmp_path: Path, block: int, span: range) -> None:
    rows = StreamedRows(open_files(files(tmp_path)), block, span)
    assert (len(rows), rows.whole, rows.column_names) == (len(span), 25, ["prompt", "answer"])
    for index in [*range(len(span)), 0, len(span) // 2]:
        assert rows[index] == {"prompt": f"{span[index]}+1", "answer": str(span[index] + 1)}
        assert len(rows._blocks) <= BLOCKS
    with pytest.raises(IndexError):
        rows[len(span)]


def test_an_epoch_reads_each_block_once_and_holds_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = StreamedRows(open_files(files(tmp_path)), 4)
    rows._blocks.clear()
    read: list[int] = []
    whole = StreamedRows._read
    monkeypatch.setattr(StreamedRows, "_read", lambda self, number: read.append(number) or whole(self, number))
    order = rows.order(3, 0).tolist()
    assert [rows[index]["prompt"] for index in order] == [f"{index}+1" for index in order]
    assert sorted(read) == list(range(7))


def render(epoch: int, row: int, values: Any) -> Prompt:
    return Prompt(epoch, row, text=values["prompt"], token_ids=(1,))


@law(20)
@given(st.integers(0, 2**31), st.integers(0, 80), st.lists(st.integers(0, 79), max_size=4))
def test_a_resumed_run_goes_on_at_its_row(
    tmp_path_factory: pytest.TempPathFactory, seed: int, taken: int, back: list[int]
) -> None:
    paths = files(tmp_path_factory.mktemp("rows"))

    def stream() -> PromptStream:
        return PromptStream(StreamedRows(open_files(paths), 4), render, seed=seed, max_prompt_tokens=8)

    unbroken, broken = stream(), stream()
    for each in (unbroken, broken):
        served = each.next(taken) if taken else []
        each.give_back({(p.epoch, p.row): p for p in (served[i] for i in back if i < taken)}.values())
    again = stream()
    again.restore(json.loads(json.dumps(broken.state())))
    assert again.next(60) == unbroken.next(60)


def test_another_order_is_refused(tmp_path: Path) -> None:
    def stream(block: int) -> PromptStream:
        return PromptStream(StreamedRows(open_files(files(tmp_path)), block), render, seed=0, max_prompt_tokens=8)

    state = stream(4).state()
    with pytest.raises(
        DataError, match=r"data\.streaming: shuffle_buffer 5 gives another order .*\(shuffle_buffer 4\)"
    ):
        stream(5).restore(state)
    with pytest.raises(DataError, match=r"shuffle_buffer 4 gives another order .*\(no streaming\)"):
        stream(4).restore({name: value for name, value in state.items() if name != "block"})


def test_the_files_are_those_of_the_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 4), ("test-00000-of-00001", 5)):
        Dataset.from_list([{"prompt": name}] * count).to_parquet(tmp_path / "data" / f"{name}.parquet")
    source = stream_source(str(tmp_path), None, "train[2:]", 3, block=2)
    assert [row["prompt"][:11] for row in (source.rows[index] for index in range(3))] == [
        "train-00000",
        *["train-00001"] * 2,
    ]
    assert (source.whole, source.span) == (7, range(2, 5))
    assert len(stream_source(str(tmp_path), None, "test", None, block=2).rows) == 5
    with pytest.raises(DataError, match=r"data\.split: 'dev' is not a split of .*it has train, test"):
        stream_source(str(tmp_path), None, "dev", None, block=2)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.csv", "a,b", "is neither a JSONL nor a parquet file"),
        ("rows.jsonl", "", "holds no rows to use"),
        ("rows.parquet", "no parquet", "cannot be read as parquet"),
        ("rows.jsonl", "[1]\n", "row 0 .*is no object"),
    ],
)
def test_files_that_cannot_be_streamed(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=told):
        stream_source(str(tmp_path / name), None, "train", None, block=4)


def test_a_saved_dataset_is_refused(tmp_path: Path) -> None:
    Dataset.from_list([{"prompt": "x"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"data\.streaming: .*save_to_disk"):
        stream_source(str(tmp_path / "saved"), None, "train", None, block=4)


def test_a_stream_is_served_as_a_table_is(make_config: Callable[..., Config], tokenizers: dict[str, Any]) -> None:
    """Answers as the file has them, a torn line left out and counted, columns for rewards, a survey."""
    lines = [json.dumps({"prompt": f"What is {n}?", "answer": n}) for n in range(40)]
    lines[7] = '{"prompt": "What is 7?", "answer": 0.50}'
    lines[33] = '{"prompt": "What'
    config, tokenizer = make_config(streaming=True, shuffle_buffer=16), tokenizers["chatml"]
    Path(config.data.path).write_text("\n".join(lines))
    stream = load_prompts(config, tokenizer)
    assert len(stream) == 40
    prompts = stream.next(39)
    assert {prompt.row for prompt in prompts} == set(range(40)) - {33}
    assert {prompt.row: prompt.answer for prompt in prompts}[7] == "0.50"
    assert {prompt.row: prompt.answer for prompt in prompts}[8] == "8"
    assert reward_columns(stream) >= {"answer"}
    stream.next(1)  # into the next epoch: the torn line was passed by
    assert stream.failed == 1
    assert isinstance(stream.failures[0], RowError)
    notes, looked = survey(load_prompts(config, tokenizer))
    assert looked == 40
    assert "1 of 40 rows cannot be rendered" in notes[0]
