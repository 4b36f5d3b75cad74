"""Training states on disk that any number of ranks of any ZeRO stage can read.

    <folder>/fragments-<rank>-<part>.safetensors   one-dimensional float32 tensors "<kind> <start> <parameter>"

Every rank writes the pieces that it holds, without talking to the others; a reader takes from all files what overlaps
the pieces that it holds itself. `kind` is the float32 weight (`master`) or one of Adam's moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pods_cluster.learning.fragments import Fragment

_PART_BYTES = 1 << 30


class MissingFragment(Exception):
    """The files do not hold all of a parameter; the text names it."""


def write(folder: Path, rank: int, fragments: Iterable[Fragment], part_bytes: int = _PART_BYTES) -> None:
    """Write one rank's pieces, in files of about `part_bytes`."""
    part, held, nbytes = 0, dict[str, Tensor](), 0

    def flush() -> None:
        nonlocal part, held, nbytes
        save_file(held, folder / f"fragments-{rank:05d}-{part:05d}.safetensors")
        part, held, nbytes = part + 1, {}, 0

    for fragment in fragments:
        for kind, tensor in fragment.tensors.items():
            held[f"{kind} {fragment.start} {fragment.name}"] = tensor.detach().to("cpu", torch.float32, copy=True)
            nbytes += 4 * fragment.numel
        if nbytes >= part_bytes:
            flush()
    if held or not part:
        flush()


class Reader:
    """All pieces below a folder, by parameter. Use it as a context; tensors are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises MissingFragment for a folder without pieces or with a broken file."""
        self._folder = folder
        self._open = ExitStack()
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = defaultdict(list)
        files = sorted(folder.glob("fragments-*.safetensors"))
        if not files:
            raise MissingFragment(f"{folder} holds no fragments-….safetensors")
        for path in files:
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
                for key in file.keys():  # noqa: SIM118 (it is no dict)
                    kind, start, name = key.split(" ", 2)
                    (numel,) = file.get_slice(key).get_shape()
                    self._pieces[kind, name].append((int(start), int(start) + numel, file, key))
            except (SafetensorError, ValueError, OSError) as error:
                self._open.close()
                raise MissingFragment(f"{path}: broken ({error})") from error

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, fragment: Fragment, kind: str) -> Tensor:
        """float32 [numel]: that place of that parameter. Raises MissingFragment if a part of it is nowhere."""
        first, last = fragment.start, fragment.start + fragment.numel
        result = torch.empty(fragment.numel, dtype=torch.float32)
        found = 0
        for start, stop, file, key in self._pieces.get((kind, fragment.name), ()):
            low, high = max(start, first), min(stop, last)
            if low < high:
                result[low - first : high - first] = file.get_slice(key)[low - start : high - start]
                found += high - low
        if found != fragment.numel:
            raise MissingFragment(
                f"{self._folder}: {fragment.name} ({kind}) has {found} of the elements {first} to {last}; files are missing"
            )
        return result
