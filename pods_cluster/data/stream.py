"""The stream of training prompts: seeded, resumable, each row once an epoch."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from pods_cluster.data.errors import DataError, RowError
from pods_cluster.data.order import epoch_order
from pods_cluster.data.source import Rows
from pods_cluster.data.streamed import StreamedRows
from pods_cluster.types import GroupId, Prompt

Render = Callable[[int, int, Mapping[str, Any]], Prompt]

_SAMPLED_ROWS = 32
FAILED_ROWS = 100
"""Number of first rows that, when all of them fail to render, mean that the configuration is at fault."""
REMEMBERED_FAILURES = 20


def dataset_fingerprint(rows: Rows) -> dict[str, Any]:
    """Identify a dataset by its number of rows, its columns, and a hash of rows spread evenly over it."""
    if isinstance(rows, StreamedRows):
        return rows.fingerprint()
    picked = np.unique(np.linspace(0, len(rows) - 1, num=min(len(rows), _SAMPLED_ROWS)).astype(int)).tolist()
    digest = hashlib.sha256()
    for index in picked:
        digest.update(json.dumps(dict(rows[index]), sort_keys=True, default=_plain).encode())
    return {"rows": len(rows), "columns": sorted(rows.column_names), "sample": digest.hexdigest()[:32]}


class PromptStream:
    """Serves prompts in a seeded order, epoch after epoch; over-long ones and rows that fail to render are counted.

    Invariant: over any interleaving of `next`, `give_back`, `state` and `restore`, each (epoch, row) is served exactly
    once, a prompt that was given back not counting as served. Rows are rendered and tokenised when they are served.
    """

    def __init__(
        self,
        rows: Rows,
        render: Render,
        *,
        seed: int,
        max_prompt_tokens: int,
        shuffle: bool = True,
        changed: Literal["refuse", "new_epoch"] = "refuse",
    ) -> None:
        """`changed`: what a resumed run does about another dataset. Raises DataError when there are no rows."""
        if not len(rows):
            raise DataError("data.path: the dataset holds no rows; give one with rows")
        self.rows = rows
        self.render = render
        self.seed = seed
        self.shuffle = shuffle
        self.max_prompt_tokens = max_prompt_tokens
        self.fingerprint = dataset_fingerprint(rows)
        self.epoch = 0
        """Epoch of the next new row."""
        self.served = 0
        """Prompts served, less those given back."""
        self.taken = 0
        """Prompts served by this object; those served again count again."""
        self.dropped = 0
        """Over-long prompts so far; a row counts once in each epoch."""
        self.failed = 0
        """Rows so far that failed to render; a row counts once in each epoch."""
        self.failures: deque[RowError] = deque(maxlen=REMEMBERED_FAILURES)
        """The causes of the newest of these failures."""
        self.note: str | None = None
        """A remark for the user about the last `restore`, or None."""
        self._changed = changed
        self._first_failure: RowError | None = None
        self._position = 0  # rows of this epoch's order that are behind us
        self._fits = 0  # of those, rows that were short enough
        self._shortest = 0  # tokens of the shortest over-long prompt of an epoch without any that fits
        self._returned: deque[tuple[int, int]] = deque()
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Rows in an epoch, over-long ones included."""
        return len(self.rows)

    @property
    def block(self) -> int | None:
        """Rows of a block where rows are streamed in a shuffled order."""
        return self.rows.block if self.shuffle and isinstance(self.rows, StreamedRows) else None

    @property
    def position(self) -> int:
        """Rows of this epoch that were served or left out."""
        return self._position

    @property
    def epochs(self) -> float:
        """Passes over the rows so far, the current one as a fraction."""
        return self.epoch + self._position / len(self)

    @property
    def returned(self) -> int:
        """The number of prompts that were given back and wait to be served again."""
        return len(self._returned)

    def next(self, count: int) -> list[Prompt]:
        """Serve the next `count` prompts, those given back first, across the end of an epoch.

        Raises DataError when a whole epoch holds no prompt within the limit, and the RowError of the first row when
        `FAILED_ROWS`, or a whole epoch, cannot be rendered; the prompts taken before it are then given back.
        """
        if count < 1:
            raise ValueError(f"count: {count} prompts cannot be taken; ask for 1 or more")
        taken: list[Prompt] = []
        try:
            while len(taken) < count:
                taken.append(self._next_returned() if self._returned else self._next_new())
        except Exception:
            self._returned.extendleft((prompt.epoch, prompt.row) for prompt in reversed(taken))
            raise
        self.served += count
        self.taken += count
        return taken

    def give_back(self, prompts: Iterable[Prompt | GroupId]) -> None:
        """Take back prompts whose groups were cancelled: they are served again, first, under their epoch and row.

        Raises ValueError for one that was never served or is back already; then none is taken back.
        """
        places = [(item.epoch, item.row) for item in prompts]
        self._check_served(places)
        self._returned.extend(places)
        self.served -= len(places)

    def state(self, in_flight: Iterable[Prompt | GroupId] = ()) -> dict[str, Any]:
        """Return the position of the stream as JSON-able values.

        `in_flight`: prompts that are out and untrained; in the state (not in this stream) they count as given back, so
        that a resumed run serves them again.
        """
        rows_out = [(item.epoch, item.row) for item in in_flight]
        self._check_served(rows_out)
        return {
            "version": 1,
            "dataset": dict(self.fingerprint),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "block": self.block,
            "epoch": self.epoch,
            "position": self._position,
            "fits": self._fits,
            "shortest": self._shortest,
            "served": self.served - len(rows_out),
            "dropped": self.dropped,
            "failed": self.failed,
            "returned": [list(place) for place in (*self._returned, *rows_out)],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. With `changed="new_epoch"`, a new epoch begins where the dataset is another one.

        Raises DataError, changing nothing, when it is of another dataset or order, or damaged.
        """
        self.note = None
        try:
            other = self._other_dataset(state)
            self._check_same(state)
            epoch, position = int(state["epoch"]), int(state["position"])
            fits, shortest = int(state["fits"]), int(state["shortest"])
            served, dropped = int(state["served"]), int(state["dropped"])
            failed = int(state.get("failed", 0))
            returned = [(int(e), int(row)) for e, row in state["returned"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"resume: the prompt stream's state is damaged ({error!r}); use an older checkpoint"
            ) from error
        if other is not None:
            # Rows have other numbers now: what was given back cannot be found again.
            self.note = f"the dataset has changed ({other}); epoch {epoch + 1} begins with it (data.changed: new_epoch)"
            epoch, position, fits, shortest, returned = epoch + 1, 0, 0, 0, []
        within = epoch >= 0 and 0 <= position <= len(self) and 0 <= fits <= position
        if not within or any(not (0 <= e <= epoch and 0 <= row < len(self)) for e, row in returned):
            raise DataError(
                f"resume: the prompt stream's state is damaged (epoch {epoch}, position {position} of {len(self)}, "
                f"{len(returned)} given back); use an older checkpoint"
            )
        self._order = self._order_of(epoch)
        self.epoch, self._position, self._fits, self._shortest = epoch, position, fits, shortest
        self.served, self.dropped, self.failed = served, dropped, failed
        self._returned = deque(returned)

    def _next_returned(self) -> Prompt:
        epoch, row = self._returned[0]
        prompt = self.render(epoch, row, self.rows[row])
        self._returned.popleft()
        return prompt

    def _next_new(self) -> Prompt:
        while True:
            if self._position == len(self):
                self._start_epoch()
            row = int(self._order[self._position])
            try:
                prompt = self.render(self.epoch, row, self.rows[row])
            except RowError as error:
                self._leave_out(error)
                continue
            self._position += 1
            tokens = len(prompt.token_ids)
            if tokens <= self.max_prompt_tokens:
                self._fits += 1
                return prompt
            self.dropped += 1
            self._shortest = min(self._shortest or tokens, tokens)

    def _leave_out(self, error: RowError) -> None:
        self.failures.append(error)
        self._first_failure = self._first_failure or error
        if not self._fits and not self._shortest and self._position + 1 >= min(FAILED_ROWS, len(self)):
            raise RowError(f"{self._first_failure} (and so are the first {self._position + 1} rows, all of them)")
        self._position += 1
        self.failed += 1

    def _start_epoch(self) -> None:
        if not self._fits:
            raise DataError(
                f"data.max_prompt_tokens: {self.max_prompt_tokens} is less than the shortest of all {len(self)} "
                f"prompts, which has {self._shortest} tokens; raise it, or choose other rows; "
                "where the model's context is the bound, lower generator.max_tokens or take a model with a longer one"
            )
        self.epoch += 1
        self._position = self._fits = self._shortest = 0
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> Int64[np.ndarray, " rows"]:
        if not self.shuffle:
            return np.arange(len(self))
        if isinstance(self.rows, StreamedRows):
            return self.rows.order(self.seed, epoch)
        return epoch_order(self.seed, epoch, len(self))

    def _check_served(self, places: list[tuple[int, int]]) -> None:
        current = [row for epoch, row in places if epoch == self.epoch]
        passed = self._order[: self._position]
        behind = set(passed[np.isin(passed, current)].tolist()) if current else set()
        back = set(self._returned)
        for place in places:
            epoch, row = place
            served = row in behind if epoch == self.epoch else 0 <= epoch < self.epoch and 0 <= row < len(self)
            if not served or place in back:
                reason = "is back already" if served else "was never served"
                raise ValueError(f"prompt (epoch {epoch}, row {row}) {reason}, so it cannot be given back")
            back.add(place)

    def _check_same(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != 1:
            raise DataError(
                f"resume: the prompt stream's state has version {state.get('version')!r}; this release reads version 1"
            )
        if state.get("block") != self.block:
            now, then = (
                f"shuffle_buffer {block}" if block else "no streaming" for block in (self.block, state.get("block"))
            )
            raise DataError(
                f"data.streaming: {now} gives another order of prompts than the run was started with ({then}); set it back, or "
                f"start a new run (another run.name)"
            )
        other = self._other_dataset(state)
        if other is not None and self._changed == "refuse":
            raise DataError(
                f"data.path: the dataset is not the one that the run was started with ({other}); restore the dataset, "
                f"set data.changed: new_epoch to go on with the new one, or start a new run (another run.name)"
            )
        for field, name in (("run.seed", "seed"), ("data.shuffle", "shuffle")):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"{field}: {getattr(self, name)} gives another order of prompts than the run was started with "
                    f"({state[name]}); set it back, or start a new run (another run.name)"
                )

    def _other_dataset(self, state: Mapping[str, Any]) -> str | None:
        """Say how the dataset of a state differs from this one; None where it is the same."""
        was, now = state["dataset"], self.fingerprint
        if was == now:
            return None
        part = next(name for name in ("rows", "columns", "sample") if was.get(name) != now[name])
        return "the rows' contents differ" if part == "sample" else f"{part} {was.get(part)} then, {now[part]} now"


def _plain(value: Any) -> str:
    """Return a stable text for a value that JSON cannot hold."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else type(value).__name__
