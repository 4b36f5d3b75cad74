"""Weights of `model.path` on disk, read one parameter at a time by Hugging Face name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"


class CheckpointFiles:
    """Checkpoint files that are opened once and read on demand, through the operating system's page cache.

    `path` is a folder, or a hub name whose files (of `revision`) were downloaded before. Raises OSError for one without weights.
    """

    def __init__(self, path: str, revision: str | None = None) -> None:
        self.folder = _folder(path, revision)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for single in (_SAFE, _PICKLED):
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                self._file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            elif (self.folder / single).is_file():
                self._file_of = dict.fromkeys(self._open(single).keys(), single)
            if self._file_of:
                break
        else:
            raise OSError(f"{self.folder} holds neither {_SAFE} nor {_PICKLED}, nor an index of either")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Shaped[Tensor, "*shape"]:
        """Parameter `name` on the CPU, in the dtype of the file. Raises KeyError."""
        file = self._open(self._file_of[name])
        return file[name] if isinstance(file, dict) else file.get_tensor(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            if file.endswith(".safetensors"):
                from safetensors import safe_open

                self._files[file] = safe_open(path, framework="pt")
            else:
                self._files[file] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return self._files[file]


def _folder(path: str, revision: str | None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, local_files_only=True))
