"""Memory that a process can still take, in containers and jobs of every kind of limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pods_cluster import free_memory as module
from pods_cluster.free_memory import free_memory, limits

GIB = 1 << 30


def group(folder: Path, most: str, used: int, cached: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nactive_file 7\n")


def own(tmp_path: Path, text: str) -> Path:
    (tmp_path / "own").write_text(text)
    return tmp_path / "own"


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    group(tmp_path / "fs", str(8 * GIB), 3 * GIB, GIB)
    assert limits(tmp_path / "fs", own(tmp_path, "0::/\n")) == [6 * GIB]


def test_limits_of_all_groups_above_hold_as_in_a_job_of_slurm(tmp_path: Path) -> None:
    top = tmp_path / "fs"
    top.mkdir()
    group(top / "system.slice", "max", 90 * GIB, 0)
    group(top / "system.slice" / "job_7", str(20 * GIB), 16 * GIB, GIB)
    group(top / "system.slice" / "job_7" / "step_0", str(64 * GIB), 2 * GIB, 0)
    assert limits(top, own(tmp_path, "0::/system.slice/job_7/step_0\n")) == [62 * GIB, 5 * GIB]


def test_version_1_and_its_number_for_no_limit(tmp_path: Path) -> None:
    top = tmp_path / "fs"
    group(top / "memory" / "docker", str(4 * GIB), GIB, 0, version=1)
    group(top / "memory", "9223372036854771712", 50 * GIB, 0, version=1)
    text = "12:cpu,cpuacct:/docker\n5:memory:/docker\n0::/elsewhere\n"
    assert limits(top, own(tmp_path, text)) == [3 * GIB]


@pytest.mark.parametrize("text", ["", "0::/not/in/this/namespace\n", "3:cpu:/a\n"])
def test_without_a_limit_that_can_be_read_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert limits(tmp_path / "fs", own(tmp_path, text)) == []
    assert limits(tmp_path / "fs", tmp_path / "none") == []
    monkeypatch.setattr(module, "OWN", tmp_path / "own")
    assert free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.1)


def test_the_least_counts_and_never_less_than_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUPS", tmp_path / "fs")
    monkeypatch.setattr(module, "OWN", own(tmp_path, "0::/\n"))
    for used, free in ((90, 10), (120, 0)):
        group(tmp_path / "fs", "100", used, 0)
        assert free_memory() == free
