"""Fingerprints of tensors, which prove that both ends of a transfer hold the same bytes at the same positions.

A tensor is read as little-endian 64-bit words. Word w at position i becomes mix(w xor i * c), a bijective mixer
(splitmix64's finalizer: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014); the fingerprint
is the sum of the mixed words mod 2^64, with dtype and shape before it. One flipped bit always changes it, and moved
words change it up to a chance of about 2^-64. A plain weighted sum would not do: words that differ in their top bit
alone (the sign of a bfloat16) could swap positions unseen. Integer arithmetic only, so CPU and GPU agree exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int64, Shaped
    from torch import Tensor

# Words per pass: on a CPU the temporaries stay in the cache, on a GPU a pass should fill the card, and take little memory of
# an engine that has filled it.
_CPU_WORDS = 1 << 15
_GPU_WORDS = 1 << 22


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_POSITION = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def fingerprint(tensor: Shaped[Tensor, "*shape"]) -> str:
    """Fingerprint of a tensor's bytes, dtype and shape, e.g. `bfloat16[2,3]:01f3…`; the same on every device."""
    return format_fingerprint(dtype_name(tensor), tensor.shape, int(word_sum(tensor).item()))


def fingerprints(
    tensors: Iterable[tuple[str, Shaped[Tensor, "*shape"]]] | Mapping[str, Shaped[Tensor, "*shape"]],
) -> dict[str, str]:
    """Fingerprints by name. Each tensor is read before the next is asked for; sums are copied to the host once per
    device."""
    named = cast("Iterable[tuple[str, Tensor]]", tensors.items() if isinstance(tensors, Mapping) else tensors)
    heads: list[tuple[str, str, torch.Size]] = []
    sums = WordSums()
    for name, tensor in named:
        heads.append((name, dtype_name(tensor), tensor.shape))
        sums.add(tensor)
    return {
        name: format_fingerprint(dtype, shape, value)
        for (name, dtype, shape), value in zip(heads, sums.values(), strict=True)
    }


class WordSums:
    """Sums of many tensors' mixed words, in the order in which they are added.

    On a card a tensor by itself is some twenty kernels, and a model has hundreds: small ones are gathered and mixed together, in
    as many kernels as one, and told apart by running sums. `gather` words are gathered at most; None: as the device wants it.
    """

    def __init__(self, gather: int | None = None) -> None:
        self._most = gather
        self._found: list[Int64[Tensor, ""] | None] = []
        self._gathered: dict[torch.device, _Gathered] = {}

    def add(self, tensor: Shaped[Tensor, "*shape"]) -> None:
        """Read a whole tensor."""
        most = self._most if self._most is not None else (0 if tensor.device.type == "cpu" else _GPU_WORDS)
        count = -(-tensor.numel() * tensor.element_size() // 8)
        if not 0 < count <= most:
            self.add_sum(word_sum(tensor))
            return
        gathered = self._gathered.get(tensor.device)
        if gathered is None:
            gathered = self._gathered[tensor.device] = _Gathered(most, tensor.device)
        if not gathered.fits(count):
            self._flush(gathered)
        gathered.add(len(self._found), tensor, count)
        self._found.append(None)

    def add_sum(self, total: Int64[Tensor, ""]) -> None:
        """Take a sum that is known."""
        self._found.append(total)

    def values(self) -> list[int]:
        """All sums, mod 2^64 (their sign is that of int64); copied to the host once per device."""
        import torch

        for gathered in self._gathered.values():
            self._flush(gathered)
        totals = [total for total in self._found if total is not None]
        values: list[int] = [0] * len(totals)
        for device in {total.device for total in totals}:
            rows = [row for row, total in enumerate(totals) if total.device == device]
            for row, value in zip(rows, torch.stack([totals[row] for row in rows]).tolist(), strict=True):
                values[row] = int(value)
        return values

    def _flush(self, gathered: _Gathered) -> None:
        for place, total in gathered.sums():
            self._found[place] = total


class _Gathered:
    """Words of tensors, one after the other, each beginning at a whole word."""

    def __init__(self, most: int, device: torch.device) -> None:
        import torch

        self._words = torch.empty(most, dtype=torch.int64, device=device)
        self._places: list[int] = []
        self._counts: list[int] = []
        self._used = 0

    def fits(self, count: int) -> bool:
        return self._used + count <= len(self._words)

    def add(self, place: int, tensor: Shaped[Tensor, "*shape"], count: int) -> None:
        import torch

        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        target = self._words[self._used : self._used + count]
        if len(data) % 8:
            target[-1] = 0
        target.view(torch.uint8)[: len(data)].copy_(data)
        self._places.append(place)
        self._counts.append(count)
        self._used += count

    def sums(self) -> list[tuple[int, Int64[Tensor, ""]]]:
        """Sum of each tensor, by its place; nothing is gathered then."""
        import torch

        if not self._places:
            return []
        words = self._words[: self._used]
        counts = torch.tensor(self._counts, device=words.device)
        ends = counts.cumsum(0)
        starts = torch.repeat_interleave(ends - counts, counts, output_size=self._used)
        positions = torch.arange(self._used, dtype=torch.int64, device=words.device).sub_(starts).mul_(_POSITION)
        until = _mix(positions.bitwise_xor_(words)).cumsum(0)[ends - 1]  # wraps, as a difference of two does
        found = torch.diff(until, prepend=until.new_zeros(1))
        places, self._places, self._counts, self._used = self._places, [], [], 0
        return list(zip(places, found.unbind(), strict=True))


def combined(parts: Mapping[str, str]) -> str:
    """Short fingerprint (16 hex digits) of named fingerprints, independent of their order."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(parts):
        digest.update(f"{len(name)}:{name}={parts[name]};".encode())
    return digest.hexdigest()


def difference(sent: Mapping[str, str], held: Mapping[str, str], *, limit: int = 5) -> str:
    """Difference between the sender's fingerprints and an engine's, naming the first `limit` tensors; "" if none.

    Every sent tensor must be held with the same fingerprint. A tensor that is held but was not sent must equal some sent
    one, because it is a tied copy, and a stale copy computes with old weights.
    """
    problems: list[str] = []
    known = set(sent.values())
    for name, value in sent.items():
        other = held.get(name)
        if other is None:
            problems.append(f"{name}: sent, not held by the engine")
        elif other != value:
            problems.append(f"{name}: sent {value}, held {other}")
    problems += [
        f"{name}: held ({value}) but equal to nothing that was sent (a stale tied copy?)"
        for name, value in held.items()
        if name not in sent and value not in known
    ]
    if not problems:
        return ""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    head = "1 tensor differs: " if len(problems) == 1 else f"{len(problems)} tensors differ: "
    return head + "; ".join(problems[:limit]) + more


def word_sum(tensor: Shaped[Tensor, "*shape"]) -> Int64[Tensor, ""]:
    """Sum of the mixed words, on the tensor's device."""
    return strided_sum(tensor, 1, 0, 0)


def strided_sum(tensor: Shaped[Tensor, "*shape"], rows: int, row_words: int, first: int) -> Int64[Tensor, ""]:
    """Sum of the mixed words of a part of a tensor, at their positions in the whole.

    The part consists of `rows` equal runs of words. The first run begins at word `first` of the whole, each further one
    `row_words` after the one before. Runs must end at whole words, unless there is only one.
    """
    import torch

    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    data = tensor.detach().contiguous().reshape(rows, -1).view(torch.uint8)
    if padding := -data.shape[1] % 8:
        data = torch.nn.functional.pad(data, (0, padding))
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    words = data.view(torch.int64)
    most = _CPU_WORDS if data.device.type == "cpu" else _GPU_WORDS
    width = min(most, words.shape[1])
    height = max(1, most // width)
    positions = torch.arange(min(height, rows), dtype=torch.int64, device=data.device).mul_(row_words)[:, None]
    positions = (positions + torch.arange(width, dtype=torch.int64, device=data.device)).mul_(_POSITION)
    for top in range(0, rows, height):
        for left in range(0, words.shape[1], width):
            block = words[top : top + height, left : left + width]
            total += _mixed_sum(block, positions[: block.shape[0], : block.shape[1]], first + top * row_words + left)
    return total


def _mixed_sum(
    words: Int64[Tensor, "rows width"], positions: Int64[Tensor, "rows width"], start: int
) -> Int64[Tensor, ""]:
    """Sum of the mixed words; `positions` holds i * c of each word's position i, counted from `start`."""
    # int64 arithmetic wraps, and >> keeps the sign, hence the masks.
    offset = _signed(start * _POSITION % (1 << 64))
    return _mix((positions + offset).bitwise_xor_(words)).sum()


def _mix(words: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Splitmix64's finalizer of each word, in place."""
    words.bitwise_xor_((words >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    words.bitwise_xor_((words >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))


def format_fingerprint(dtype: str, shape: Iterable[int], value: int) -> str:
    """Text of a fingerprint whose mixed words sum to `value`."""
    return f"{dtype}[{','.join(map(str, shape))}]:{value % (1 << 64):016x}"


def dtype_name(tensor: Shaped[Tensor, "*shape"]) -> str:
    """Name of a tensor's dtype without the module, as in `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
