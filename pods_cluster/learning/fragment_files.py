"""Files of a training state that any number of ranks of any ZeRO stage can read.

    <folder>/fragments-<rank>-<part>.safetensors   one-dimensional float32 tensors "<kind> <start> <parameter>"

Every rank writes the fragments that it holds, without talking to the others, and reads from all files the elements of
those that it holds then. `kind` is the float32 weight (`master`) or one of Adam's moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pods_cluster.learning.fragments import Fragment

_PART_BYTES = 1 << 30


class MissingFragment(Exception):
    """A parameter of which the files do not hold every element; the text names it."""


def write_fragments(folder: Path, rank: int, fragments: Iterable[Fragment], part_bytes: int = _PART_BYTES) -> None:
    """Write one rank's fragments, in files of about `part_bytes`."""
    part, held, nbytes = 0, dict[str, Tensor](), 0

    def flush() -> None:
        nonlocal part, held, nbytes
        save_file(held, folder / f"fragments-{rank:05d}-{part:05d}.safetensors")
        part, held, nbytes = part + 1, {}, 0

    for fragment in fragments:
        for kind, tensor in fragment.tensors.items():
            held[fragment.piece(kind)] = _alone(tensor.detach().to("cpu", torch.float32))
            nbytes += 4 * fragment.numel
        if nbytes >= part_bytes:
            flush()
    if held or not part:
        flush()


def _alone(tensor: Float[Tensor, " numel"]) -> Float[Tensor, " numel"]:
    """The tensor in a storage of its own, as the files want it: views of a flat state are copied, copies are not."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class FragmentReader:
    """All fragments in a folder, by parameter. Use it as a context; tensors are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises MissingFragment for a folder without fragments or with a broken file."""
        self._folder = folder
        self._open = ExitStack()
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = defaultdict(list)
        files = sorted(folder.glob("fragments-*.safetensors"))
        if not files:
            raise MissingFragment(f"{folder} holds no fragments-….safetensors")
        for path in files:
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
                for key in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
                    kind, start, name = key.split(" ", 2)
                    (numel,) = file.get_slice(key).get_shape()
                    self._pieces[kind, name].append((int(start), int(start) + numel, file, key))
            except (SafetensorError, ValueError, OSError) as error:
                self._open.close()
                raise MissingFragment(f"{path}: broken ({error})") from error

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, fragment: Fragment, kind: str) -> Float[Tensor, " numel"]:
        """The fragment's range of its parameter, in float32. Raises MissingFragment if a part of it is in no file."""
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
