"""The prompt stream: each row once an epoch, whatever is given back, saved and restored in between."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import Config
from pods_cluster.data import DataError, PromptStream, RowError, load_eval, load_prompts
from pods_cluster.data.order import epoch_order
from pods_cluster.data.stream import dataset_fingerprint
from pods_cluster.types import GroupId, Prompt

SHARED = Path(__file__).parents[3] / "shared" / "data"
LIMIT = 10


class Table(list[dict[str, Any]]):
    """Rows in memory, in the shape of a dataset."""

    @property
    def column_names(self) -> list[str]:
        return ["tokens"]


def table(lengths: list[int]) -> Table:
    return Table({"tokens": length} for length in lengths)


def render(epoch: int, row: int, values: Mapping[str, Any]) -> Prompt:
    if values["tokens"] < 0:
        raise RowError(f"row {row}")
    return Prompt(epoch, row, text="", token_ids=tuple(range(values["tokens"])))


def stream_of(lengths: list[int], seed: int = 0, shuffle: bool = True) -> PromptStream:
    return PromptStream(table(lengths), render, seed=seed, max_prompt_tokens=LIMIT, shuffle=shuffle)


def places(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.epoch, prompt.row) for prompt in prompts]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.integers(1, 9)),
        st.tuples(st.just("give_back"), st.lists(st.integers(0, 30), max_size=4)),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    max_size=25,
)


@given(
    lengths=st.lists(st.sampled_from([1, LIMIT, LIMIT + 1]), min_size=1, max_size=8).filter(lambda x: min(x) <= LIMIT),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    operations=OPERATIONS,
)
def test_each_row_once_an_epoch_net_of_what_came_back(
    lengths: list[int], seed: int, shuffle: bool, operations: list[tuple[str, Any]]
) -> None:
    stream = stream_of(lengths, seed, shuffle)
    fitting = {row for row, length in enumerate(lengths) if length <= LIMIT}
    out: dict[tuple[int, int], Prompt] = {}  # served and not given back
    waiting: list[tuple[int, int]] = []
    for name, value in operations:
        if name == "next":
            got = stream.next(value)
            assert places(got)[: len(waiting)] == waiting[:value], "what came back is served first, in order"
            waiting = waiting[value:]
            assert not any(place in out for place in places(got))
            out |= dict(zip(places(got), got, strict=True))
        elif name == "give_back":
            back = [list(out.values())[at] for at in sorted({at for at in value if at < len(out)})]
            stream.give_back(back)
            for prompt in back:
                del out[prompt.epoch, prompt.row]
            waiting += places(back)
        else:
            in_flight = list(out.values())[-3:] if value else []
            saved = json.loads(json.dumps(stream.state(in_flight)))
            stream = stream_of(lengths, seed, shuffle)
            stream.restore(saved)
            for prompt in in_flight:
                del out[prompt.epoch, prompt.row]
            waiting += places(in_flight)
        assert stream.served == len(out)
        assert stream.returned == len(waiting)
    seen = Counter(epoch for epoch, _ in [*out, *waiting])
    assert {row for _, row in [*out, *waiting]} <= fitting
    assert all(seen[epoch] == len(fitting) for epoch in range(stream.epoch)), "every epoch behind us was whole"
    behind = set(stream._order[: stream.position].tolist())
    assert seen[stream.epoch] == len(behind & fitting)
    too_long = set(range(len(lengths))) - fitting
    assert stream.dropped == stream.epoch * len(too_long) + len(behind & too_long)


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    orders = {(seed, epoch): tuple(epoch_order(seed, epoch, 50)) for seed in (0, 1, 2**40) for epoch in (0, 1, 2)}
    assert len(set(orders.values())) == len(orders), "each seed and each epoch has its own"
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert all(tuple(epoch_order(*key, 50)) == order for key, order in orders.items())


def test_the_order_does_not_change_between_releases() -> None:
    # a run that resumes after an upgrade relies on these very numbers
    assert epoch_order(0, 0, 10).tolist() == [2, 6, 1, 9, 3, 7, 5, 8, 0, 4]
    assert epoch_order(7, 3, 10).tolist() == [8, 3, 0, 1, 4, 2, 6, 7, 5, 9]


def test_the_order_is_uniform() -> None:
    counts = np.zeros((5, 5))
    for epoch in range(4000):
        counts[np.arange(5), epoch_order(3, epoch, 5)] += 1
    # 800 expected in each cell, standard deviation 25
    assert np.abs(counts - 800).max() < 130


def test_without_shuffling_the_files_order() -> None:
    assert places(stream_of([1, 1, 1], shuffle=False).next(5)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_passes_and_prompts_taken() -> None:
    stream = stream_of([1] * 4, seed=5)
    assert (stream.epochs, stream.taken) == (0.0, 0)
    first = stream.next(3)
    stream.give_back(first[:2])
    assert (stream.epochs, stream.taken, stream.served) == (0.75, 3, 1)
    stream.next(5)  # the two again, the fourth, and two of the next epoch
    assert (stream.epochs, stream.taken, stream.served) == (1.5, 8, 6)


def test_served_by_any_portions_the_sequence_is_the_same() -> None:
    whole = stream_of([1] * 7, seed=5).next(20)
    parts = stream_of([1] * 7, seed=5)
    assert places(whole) == places([prompt for count in (1, 6, 8, 5) for prompt in parts.next(count)])


def test_all_prompts_too_long_is_an_error_and_not_a_spin() -> None:
    stream = stream_of([LIMIT + 5, LIMIT + 2, LIMIT + 9])
    with pytest.raises(
        DataError, match=r"data\.max_prompt_tokens: 10 .*shortest of all 3 prompts, which has 12 tokens; raise"
    ):
        stream.next(1)
    assert stream.dropped == 3


def test_no_rows() -> None:
    with pytest.raises(DataError, match=r"data\.path: the dataset holds no rows"):
        stream_of([])


def test_a_row_that_cannot_be_rendered_is_left_out_and_counted() -> None:
    lengths = [1] * 6
    good = places(stream_of(lengths, seed=1).next(6))
    bad_row = good[3][1]
    lengths[bad_row] = -1
    stream = stream_of(lengths, seed=1)
    assert places(stream.next(5)) == [*good[:3], *good[4:]]
    assert (stream.served, stream.failed, stream.dropped) == (5, 1, 0)
    assert [str(error) for error in stream.failures] == [f"row {bad_row}"]
    again = stream_of(lengths, seed=1)
    again.restore(json.loads(json.dumps(stream.state())))
    assert again.failed == 1
    assert places(again.next(5)) == places(stream.next(5))
    assert again.failed == 2, "once in each epoch"


@pytest.mark.parametrize("rows", [1, 3, 250])
def test_rows_of_which_none_can_be_rendered_are_refused(rows: int) -> None:
    stream = stream_of([-1] * rows, shuffle=False)
    with pytest.raises(RowError, match=rf"row 0 \(and so are the first {min(rows, 100)} rows, all of them\)"):
        stream.next(1)


def test_a_changed_dataset_begins_a_new_epoch_where_that_is_allowed() -> None:
    before = stream_of([1] * 5)
    before.next(3)
    state = json.loads(json.dumps(before.state()))
    stream = PromptStream(table([1] * 4), render, seed=0, max_prompt_tokens=LIMIT, changed="new_epoch")
    stream.restore(state)
    assert stream.note is not None
    assert "rows 5 then, 4 now" in stream.note
    assert sorted(places(stream.next(4))) == [(1, row) for row in range(4)]
    same = PromptStream(table([1] * 5), render, seed=0, max_prompt_tokens=LIMIT, changed="new_epoch")
    same.restore(state)
    assert same.note is None
    assert places(same.next(2)) == places(before.next(2))


def test_giving_back_what_is_not_out() -> None:
    stream = stream_of([1] * 4, shuffle=False)
    first, second = stream.next(2)
    for place in (GroupId(0, 3), GroupId(1, 0), GroupId(0, 99), GroupId(-1, 0)):
        with pytest.raises(ValueError, match="was never served"):
            stream.give_back([first, place])
    with pytest.raises(ValueError, match="is back already"):
        stream.give_back([first, first])
    assert stream.returned == 0, "a refused call takes nothing back"
    stream.give_back([GroupId(0, 1, attempt=2), first])
    with pytest.raises(ValueError, match="is back already"):
        stream.give_back([second])
    assert places(stream.next(3)) == [(0, 1), (0, 0), (0, 2)]


@pytest.mark.parametrize("count", [0, -1])
def test_taking_nothing(count: int) -> None:
    with pytest.raises(ValueError, match=f"count: {count}"):
        stream_of([1]).next(count)


@pytest.mark.parametrize(
    ("lengths", "seed", "shuffle", "message"),
    [
        ([1, 1, 1, 1], 0, True, r"data\.path: .*rows 3 then, 4 now"),
        ([1, 2, 1], 0, True, r"data\.path: .*the rows' contents differ"),
        ([1, 1, 1], 1, True, r"run\.seed: 1 gives another order .*\(0\)"),
        ([1, 1, 1], 0, False, r"data\.shuffle: False gives another order"),
    ],
)
def test_another_dataset_or_order_is_refused_at_resume(
    lengths: list[int], seed: int, shuffle: bool, message: str
) -> None:
    old = stream_of([1, 1, 1])
    old.next(2)
    new = stream_of(lengths, seed, shuffle)
    before = new.state()
    with pytest.raises(DataError, match=message):
        new.restore(old.state())
    assert new.state() == before


@pytest.mark.parametrize(
    "damage",
    [{"position": 4}, {"epoch": -1}, {"returned": [[0, 9]]}, {"returned": [[3, 0]]}, {"fits": None}, {"returned": 3}],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    stream = stream_of([1, 1, 1])
    before = stream.state()
    with pytest.raises(DataError, match=r"resume: the prompt stream's state is damaged"):
        stream.restore(before | damage)
    with pytest.raises(DataError, match=r"resume: .* version 7; this release reads version 1"):
        stream.restore(before | {"version": 7})
    with pytest.raises(DataError, match=r"damaged"):
        stream.restore({"version": 1})
    assert stream.state() == before


def test_the_fingerprint_sees_first_and_last_rows_and_columns_of_any_kind() -> None:
    rows = [{"tokens": index, "raw": b"x", "when": np.datetime64("2026-01-01").astype(object)} for index in range(100)]
    base = dataset_fingerprint(Table(rows))
    assert base == dataset_fingerprint(Table(rows))
    for index in (0, 99):
        changed = [dict(row) for row in rows]
        changed[index]["raw"] = b"y"
        assert dataset_fingerprint(Table(changed)) != base


def _write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return str(path)


def test_over_long_prompts_of_a_real_tokenizer_are_dropped_and_counted(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    short, long = [f"{index} + 1" for index in range(6)], ["How many clips? " * 40] * 3
    train = _write(tmp_path / "rows.jsonl", short[:3] + long[:2] + short[3:])
    held = _write(tmp_path / "held.jsonl", [*short, long[0]])
    config = make_config(path=train, max_prompt_tokens=40, eval={"path": held})
    stream = load_prompts(config, tokenizers["chatml"])
    got = stream.next(12)
    assert sorted(prompt.row for prompt in got[:6]) == [0, 1, 2, 5, 6, 7]
    assert {prompt.epoch for prompt in got[6:]} == {1}
    assert stream.dropped in (2, 3, 4), "those of the first epoch, and those met in the second"
    assert max(len(prompt.token_ids) for prompt in got) <= 40
    heldout = load_eval(config, tokenizers["chatml"])
    assert [prompt.row for prompt in heldout] == [0, 1, 2, 3, 4, 5]
    assert heldout.dropped == 1
    with pytest.raises(
        DataError, match=r"data\.max_prompt_tokens: 2 is less than the shortest of the 7 held-out prompts"
    ):
        load_eval(make_config(path=train, max_prompt_tokens=2, eval={"path": held}), tokenizers["chatml"])


def test_a_real_dataset_resumes_and_a_changed_one_does_not(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    config = make_config(path=_write(tmp_path / "rows.jsonl", list("abcdefgh")), seed=3)
    stream = load_prompts(config, tokenizers["header"])
    first = stream.next(5)
    saved = json.loads(json.dumps(stream.state(in_flight=first[4:])))
    again = load_prompts(config, tokenizers["header"])
    again.restore(saved)
    assert again.next(4) == [first[4], *stream.next(3)]
    _write(tmp_path / "rows.jsonl", list("abcdefgX"))
    with pytest.raises(DataError, match=r"data\.path: the dataset is not the one"):
        load_prompts(config, tokenizers["header"]).restore(saved)


@pytest.mark.skipif(not SHARED.is_dir(), reason="GSM8K and MATH are not beside the repository")
def test_gsm8k_whole_epoch(make_config: Callable[..., Config], tokenizers: dict[str, Any]) -> None:
    config = make_config(
        path=str(SHARED / "gsm8k"),
        prompt="question",
        template="think_answer",
        rows=300,
        max_prompt_tokens=700,
        eval={"split": "test", "rows": 20},
    )
    stream = load_prompts(config, tokenizers["chatml"])
    assert sorted(prompt.row for prompt in stream.next(300 - stream.dropped))[:3] == [0, 1, 2]
    heldout = load_eval(config, tokenizers["chatml"])
    assert len(heldout) + heldout.dropped == 20
    assert all(prompt.answer and "####" in prompt.answer for prompt in heldout)
