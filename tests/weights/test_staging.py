"""What a card needs of versions that arrive beside an engine's steps, as far as it shows without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pods_cluster.weights import staging
from pods_cluster.weights.protocol import WeightUpdate
from pods_cluster.weights.staging import GroupEnd


def test_all_versions_on_a_card_come_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was freed on one stream is not given out on another: with a stream each, every version would keep its own."""
    made: list[object] = []
    used: list[object] = []

    def make(device: torch.device) -> object:
        made.append(device)
        return object()

    def stage(*_: Any, stream: object, **__: Any) -> None:
        used.append(stream)

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(staging, "stage", stage)
    end = GroupEnd(torch.device("cuda", 0))
    monkeypatch.setattr(end, "_receiver", object())
    for version in range(3):
        end.stage(WeightUpdate(version, (), (), 1.0), check_memory=True)
    assert made == [torch.device("cuda", 0)]
    assert len(used) == 3
    assert len(set(map(id, used))) == 1


def test_a_cpu_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    monkeypatch.setattr(staging, "stage", lambda *_, stream, **__: used.append(stream))
    end = GroupEnd(torch.device("cpu"))
    monkeypatch.setattr(end, "_receiver", object())
    end.stage(WeightUpdate(0, (), (), 1.0), check_memory=True)
    assert used == [None]
