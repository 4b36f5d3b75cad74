"""Key/value cache of the built-in engine: one row of slots a rollout, rows packed at the front.

Every decoding row has its own length, so rows of any age run in one batch: a step writes each row's new key and value
at that row's position and attends over a shared number of columns behind an additive mask.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "pods_decode"
COLUMN_CHUNK = 16

States = Float[Tensor, "rows kv_heads columns head_dim"]
"""Keys or values of one layer."""


class SlotCache(Cache):
    """Keys and values by layer; grows in rows and columns on demand.

    The model sees it as its cache in one of two modes: *prefill* hands new keys and values through and keeps them
    aside (`captured`), *decode* writes one token a row and returns the stored ones.
    """

    def __init__(self) -> None:
        self.keys: dict[int, States] = {}
        self.values: dict[int, States] = {}
        self.captured: dict[int, tuple[States, States]] = {}
        self.rows = 0
        self.columns = 0
        self._prefilling = True
        self._width = 0
        self._batch = 0
        self._positions = torch.empty(0, dtype=torch.long)
        self._uniform: int | None = None
        self._flat: dict[tuple[int, int], Int64[Tensor, " places"]] = {}

    # What the model calls.

    def update(
        self,
        key_states: States,
        value_states: States,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[States, States]:
        """Take the keys and values of new tokens; return those to attend over."""
        if self._prefilling:
            self.captured[layer_idx] = (key_states, value_states)
            return key_states, value_states
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        self._write(keys, key_states)
        self._write(values, value_states)
        return keys[: self._batch, :, : self._width], values[: self._batch, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0 if self._prefilling else self._width - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return (query_length if self._prefilling else self._width), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        return -1

    @property
    def is_initialized(self) -> bool:
        return bool(self.keys)

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.keys)

    # What the engine calls.

    def begin_prefill(self) -> None:
        self._prefilling = True
        self.captured = {}

    def begin_decode(self, positions: Int64[Tensor, " rows"], width: int) -> None:
        """The next forward feeds one token to each of the first rows, at `positions`, of columns [0, width)."""
        self._prefilling = False
        self._positions = positions
        self._batch = len(positions)
        self._width = width
        first = int(positions[0])
        self._uniform = first if bool((positions == first).all()) else None
        self._flat = {}

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` rows of `columns` tokens; stored rows are kept."""
        if rows <= self.rows and columns <= self.columns:
            return
        new_rows = max(rows, self.rows)
        if columns > self.columns:
            chunk = max(COLUMN_CHUNK, columns // 8 // COLUMN_CHUNK * COLUMN_CHUNK)
            new_columns = -(-columns // chunk) * chunk
        else:
            new_columns = self.columns
        for layers in (self.keys, self.values):
            for layer, old in layers.items():
                grown = old.new_empty(new_rows, old.shape[1], new_columns, old.shape[3])
                # Columns that no row wrote yet are masked, but a masked NaN would still spread: 0 x NaN = NaN.
                grown[:, :, self.columns :].zero_()
                grown[self.rows :].zero_()
                grown[: self.rows, :, : self.columns] = old
                layers[layer] = grown
        self.rows, self.columns = new_rows, new_columns

    def store(self, rows: slice | Int64[Tensor, " rows"], source: Int64[Tensor, " rows"]) -> None:
        """Copy the captured prefill into `rows`; the i-th of them takes captured sequence `source[i]`."""
        for layer, captured in self.captured.items():
            for layers, states in zip((self.keys, self.values), captured, strict=True):
                if layer not in layers:
                    layers[layer] = states.new_zeros(self.rows, states.shape[1], self.columns, states.shape[3])
                layers[layer][rows, :, : states.shape[2]] = states[source]
        self.captured = {}

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], width: int) -> None:
        """Copy rows `source` over rows `target` (columns [0, width))."""
        for layers in (self.keys, self.values):
            for tensor in layers.values():
                tensor[target, :, :width] = tensor[source, :, :width]

    def clear(self) -> None:
        """Free all memory."""
        self.keys, self.values, self.captured = {}, {}, {}
        self.rows = self.columns = 0

    def _write(self, store: States, states: Float[Tensor, "rows kv_heads 1 head_dim"]) -> None:
        if self._uniform is not None:
            store[: self._batch, :, self._uniform] = states[:, :, 0]
            return
        _, heads, columns, dim = store.shape
        index = self._flat.get((heads, columns))
        if index is None:
            row = torch.arange(self._batch, device=store.device)[:, None] * heads
            head = torch.arange(heads, device=store.device)
            index = ((row + head) * columns + self._positions.to(store.device)[:, None]).reshape(-1)
            self._flat[heads, columns] = index
        store.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))


def decode_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows kv_heads columns head_dim"],
    value: Float[Tensor, "rows kv_heads columns head_dim"],
    attention_mask: Float[Tensor, "rows 1 queries columns"] | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows queries heads head_dim"], Tensor | None]:
    """Attention of one query a row as two batched products; longer queries go to `scaled_dot_product_attention`.

    torch's CPU kernel for the latter costs several microseconds a (row, head), and repeats grouped keys in memory.
    Query heads that share a key head form the rows of one small matrix here. The mask is added to the scores.
    """
    if query.shape[2] != 1 or kwargs.get("position_bias") is not None or kwargs.get("s_aux") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, heads, _, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    scale = dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(batch * kv_heads, heads // kv_heads, dim)
    keys = key.reshape(batch * kv_heads, columns, dim).transpose(1, 2)
    if attention_mask is None:
        scores = torch.bmm(grouped, keys) * scale
    else:
        bias = attention_mask.expand(batch, kv_heads, 1, columns).reshape(batch * kv_heads, 1, columns)
        scores = torch.baddbmm(bias, grouped, keys, alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    mixed = torch.bmm(weights, value.reshape(batch * kv_heads, columns, value.shape[3]))
    return mixed.view(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, decode_attention)
