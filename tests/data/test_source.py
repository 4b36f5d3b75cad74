"""Files, folders, saved datasets and hub names to rows; every failure names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from pods_cluster.data import DataError, load_source
from pods_cluster.data.source import first_blank

ROWS = [{"prompt": f"{a} + 1", "answer": str(a + 1)} for a in range(20)]
SHARED = Path(__file__).parents[3] / "shared" / "data"


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


def rows_of(path: Path | str, split: str = "train", **options: Any) -> list[dict[str, Any]]:
    return list(load_source(str(path), None, split, **options).rows)


def test_each_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_text(json.dumps(ROWS))
    files = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_jsonl(tmp_path / "a.ndjson", ROWS),
        write_jsonl(tmp_path / "lines.json", ROWS),
        tmp_path / "array.json",
        write_parquet(tmp_path / "a.parquet", ROWS),
    ]
    for file in files:
        assert rows_of(file) == ROWS, file.name


def test_a_local_file_is_memory_mapped_and_addressed_by_index(tmp_path: Path) -> None:
    source = load_source(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), None, "train")
    assert source.rows.cache_files, "rows lie in an Arrow file, not in memory"
    assert source.rows[7] == ROWS[7]
    assert len(source.rows) == source.whole == 20


def test_a_folder_name_with_pattern_characters_is_taken_literally(tmp_path: Path) -> None:
    assert rows_of(write_jsonl(tmp_path / "runs[1]*" / "a.jsonl", ROWS)) == ROWS


def test_a_folder_has_the_splits_its_file_names_tell(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "train.jsonl", ROWS[:15])
    write_jsonl(tmp_path / "d" / "test.jsonl", ROWS[15:])
    assert rows_of(tmp_path / "d") == ROWS[:15]
    assert rows_of(tmp_path / "d", "test") == ROWS[15:]
    with pytest.raises(
        DataError, match=r"data\.split: 'tests' is not a split .*did you mean 'test'.*it has train, test"
    ):
        rows_of(tmp_path / "d", "tests")


def test_a_folder_of_parquet_shards_is_one_split(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d" / "part-0.parquet", ROWS[:9])
    write_parquet(tmp_path / "d" / "part-1.parquet", ROWS[9:])
    assert rows_of(tmp_path / "d") == ROWS


def test_saved_datasets_load_with_and_without_splits(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "dict")
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "dict") == ROWS
    assert (
        load_source(str(tmp_path / "one"), None, "test").origin == load_source(str(tmp_path / "one"), None, "x").origin
    )
    with pytest.raises(DataError, match=r"data\.split: 'test' is not a split of .*it has train"):
        rows_of(tmp_path / "dict", "test")


@pytest.mark.parametrize(
    ("split", "limit", "expected"),
    [
        ("train[:5]", None, range(5)),
        ("train[5:]", None, range(5, 20)),
        ("train[-3:]", None, range(17, 20)),
        ("train[10%:50%]", None, range(2, 10)),
        ("anything[2:8]", 3, range(2, 5)),
        ("train", 100, range(20)),
    ],
)
def test_a_part_of_a_split(tmp_path: Path, split: str, limit: int | None, expected: range) -> None:
    source = load_source(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), None, split, limit)
    assert list(source.rows) == [ROWS[index] for index in expected]
    assert source.span == expected


@pytest.mark.parametrize("split", ["", "train+test", "train[1]", "train[a:]", "train[:5", "[:5]"])
def test_a_split_that_is_not_one(tmp_path: Path, split: str) -> None:
    with pytest.raises(DataError, match=r"data\.split: .* is not a split; write its name"):
        load_source(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), None, split)


def test_bounds_that_take_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: .*holds no rows to use, 'train\[50:\]' takes none of its 20"):
        load_source(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), None, "train[50:]")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": \n{"a": 3}\n', r"line 3 is not valid JSON \(Expecting value, column 7\)"),
        (b'{"a": 1}\n{"a": "tru', r"line 2 is not valid JSON \(Unterminated string"),
        (b'{"a": 1}\n[1, 2]\n', r"line 2 holds a list, not an object with columns"),
        (b"3\n", r"line 1 holds a int, not an object"),
        (b'{"a": "x"}\n{"a": "\xff"}\n', r"line 2 is not UTF-8"),
        (b"", r"is an empty file"),
        (b"\n\n", r"holds no rows"),
    ],
)
def test_a_bad_jsonl_file_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.path: .*bad\.jsonl.*" + message):
        rows_of(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},\n {"a": }]', r"line 2 is not valid JSON"),
        ('[{"a": 1}, 2]', r"item 1 holds a int"),
    ],
)
def test_a_bad_json_array_names_the_place(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "bad.json")


def test_a_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "a.jsonl", ROWS)
    (tmp_path / "d" / "b.jsonl").write_text('{"prompt": "x", "answer": "1"}\n{"prompt": ')
    with pytest.raises(DataError, match=r"data\.path: .*b\.jsonl: line 2 is not valid JSON"):
        rows_of(tmp_path / "d")


def test_columns_that_first_appear_late_in_the_file_load(tmp_path: Path) -> None:
    # the library infers columns in blocks of 10 MB; this row lies in the second
    rows = [{"prompt": "x" * 4000, "n": 1}] * 2700 + [{"prompt": "y", "n": "two", "extra": {"k": 1}}]
    source = load_source(str(write_jsonl(tmp_path / "late.jsonl", rows)), None, "train")
    assert source.rows[2700] == {"prompt": "y", "n": "two", "extra": {"k": 1}}
    assert source.rows[0] == {"prompt": "x" * 4000, "n": 1, "extra": None}


@pytest.mark.parametrize(
    ("begin", "told"),
    [(b"\x1f\x8b\x08", "compressed by gzip; unpack it"), (b"PK\x03\x04", "a zip archive; unpack it"),
     (b"PAR1", r"a parquet file; name it \.parquet"), (b"\xff\xfe{\x00", "UTF-16; save it as UTF-8"),
     (b"\x28\xb5\x2f\xfd", "compressed by zstd")],
)  # fmt: skip
def test_another_kind_of_file_under_the_name_of_json_is_told(tmp_path: Path, begin: bytes, told: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(begin + b"\xff" * 20)
    with pytest.raises(DataError, match=r"data\.path: .*is not UTF-8 text but " + told):
        rows_of(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "fix"),
    [("a.csv", r"load_dataset\('csv', data_files='.*a\.csv'\)"), ("a.tsv", r"sep='\\t'"), ("a.jsonl.gz", "unpack it"),
     ("a.arrow", r"load_dataset\('arrow'"), ("a", "name it by its format")],
)  # fmt: skip
def test_a_file_of_an_unknown_format_says_how_it_is_converted(tmp_path: Path, name: str, fix: str) -> None:
    (tmp_path / name).write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"data\.path: .*unknown format .*; known: .*; .*" + fix):
        rows_of(tmp_path / name)


def test_the_conversion_that_is_told_works(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("prompt\tanswer\n1+1=\t2\n")
    with pytest.raises(DataError) as refused:
        rows_of(tmp_path / "a.tsv")
    code = str(refused.value).partition("convert it: ")[2].replace("'rows.jsonl'", repr(str(tmp_path / "rows.jsonl")))
    exec(f"import datasets\n{code}", {})
    assert list(rows_of(tmp_path / "rows.jsonl")) == [{"prompt": "1+1=", "answer": 2}]


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data\.path: .*holds no rows to use"):
        rows_of(tmp_path / "a.parquet")


def test_hidden_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / ".a.jsonl", ROWS)
    with pytest.raises(DataError, match="is a folder without data"):
        rows_of(tmp_path / "d")


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"data\.path: .*bad\.parquet.* cannot be read as parquet \(ArrowInvalid"):
        rows_of(tmp_path / "bad.parquet")


def test_paths_that_hold_no_data(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"unknown format '\.txt'; known: \.jsonl"):
        rows_of(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"is a folder without data"):
        rows_of(tmp_path / "empty")
    with pytest.raises(DataError, match=r"data\.path: '.*gone\.jsonl' does not exist \(looked at /"):
        rows_of(tmp_path / "gone.jsonl")
    write_jsonl(tmp_path / "mixed" / "a.jsonl", ROWS)
    write_parquet(tmp_path / "mixed" / "b.parquet", ROWS)
    with pytest.raises(DataError, match=r"mixes JSON and parquet"):
        rows_of(tmp_path / "mixed")


def test_a_hub_name_offline_says_what_was_tried() -> None:
    with pytest.raises(
        DataError, match=r"data\.path: 'openai/gsm8k' could not be loaded\. Tried: .*the Hugging Face hub"
    ) as e:
        load_source("openai/gsm8k", "main", "train")
    assert "Give the path" in str(e.value)
    with pytest.raises(DataError, match=r"data\.eval\.path: 'openai/gsm8k'"):
        load_source("openai/gsm8k", "main", "train", field="data.eval")


def test_a_subset_of_a_local_file_is_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"data\.name: 'main' picks a subset of a hub dataset"):
        load_source(str(file), "main", "train")


@pytest.mark.parametrize("blank", [None, "", "  \n"])
def test_blank_texts_are_found(tmp_path: Path, blank: str | None) -> None:
    rows = [*ROWS[:3], {"prompt": blank, "answer": "1"}, *ROWS]
    source = load_source(str(write_jsonl(tmp_path / "a.jsonl", rows)), None, "train")
    assert first_blank(source.rows, "prompt") == 3
    assert first_blank(source.rows, "answer") is None
    part = load_source(str(tmp_path / "a.jsonl"), None, "train[2:]")
    assert first_blank(part.rows, "prompt") == 1


@pytest.mark.parametrize("blank", [None, []])
def test_empty_conversations_are_found(tmp_path: Path, blank: list[Any] | None) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": blank}]
    source = load_source(str(write_jsonl(tmp_path / "a.jsonl", rows)), None, "train")
    assert first_blank(source.rows, "prompt") == 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="GSM8K and MATH are not beside the repository")
def test_gsm8k_and_math() -> None:
    assert len(load_source(str(SHARED / "gsm8k"), None, "train").rows) == 7473
    assert len(load_source(str(SHARED / "gsm8k"), None, "test").rows) == 1319
    math = load_source(str(SHARED / "math" / "problems.jsonl"), None, "train[500:]")
    assert len(math.rows) == 4500
    assert math.rows[0]["idx"] == 500


def test_several_subsets_are_read_one_after_the_other(tmp_path: Path) -> None:
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: [{{split: train, path: {name}.jsonl}}]\n"
        for name in ("algebra", "geometry")
    )
    (tmp_path / "README.md").write_text(card + "---\n")
    write_jsonl(tmp_path / "algebra.jsonl", [{"prompt": "a0"}, {"prompt": "a1"}])
    write_jsonl(tmp_path / "geometry.jsonl", [{"prompt": "g0"}])
    source = load_source(str(tmp_path), "algebra+geometry", "train")
    assert [row["prompt"] for row in source.rows] == ["a0", "a1", "g0"]
    assert [row["prompt"] for row in load_source(str(tmp_path), "geometry", "train").rows] == ["g0"]
    with pytest.raises(DataError, match=r"data\.name: 'poetry' is not a subset"):
        load_source(str(tmp_path), "algebra+poetry", "train")
    with pytest.raises(DataError, match=r"empty subset or one twice"):
        load_source(str(tmp_path), "algebra+algebra", "train")
