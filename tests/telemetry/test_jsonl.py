"""JSON lines under crashes, full disks and odd values."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pods_cluster.telemetry.jsonl import JsonLinesTail, JsonLinesWriter, encode, read_lines
from tests.law import law


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "a.jsonl")
    assert writer.write({"step": 1, "text": "é\n\u2028"})
    assert read_lines(tmp_path / "a.jsonl") == [{"step": 1, "text": "é\n\u2028"}]
    writer.close()


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 2', b'{"step": 2, "text": "\xc3', b"\x00\x00"])
def test_a_half_written_last_line_spoils_only_itself(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n' + torn)
    assert read_lines(path) == [{"step": 1}]
    writer = JsonLinesWriter(path)
    writer.write({"step": 3})
    writer.close()
    assert read_lines(path) == [{"step": 1}, {"step": 3}]


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_lines_that_are_no_objects_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n\n[1]\n7\nnull\nrubbish\n\xff\xfe\n{"a":2}\n')
    tail = JsonLinesTail(path)
    assert tail.poll() == [{"a": 1}, {"a": 2}]
    assert tail.bad_lines == 5


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl") == []
    assert JsonLinesTail(tmp_path / "none.jsonl").poll() == []


def test_a_tail_sees_lines_once_and_waits_for_their_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = JsonLinesTail(path)
    path.write_bytes(b'{"a":1}\n{"a":')
    assert tail.poll() == [{"a": 1}]
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(b"2}\n")
    assert tail.poll() == [{"a": 2}]
    path.write_bytes(b'{"b":1}\n')
    assert tail.poll() == [{"b": 1}], "a file that became shorter is read anew"


LINES = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30)), max_size=8)


@law(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=LINES, limit=st.integers(1, 40))
def test_a_tail_returns_everything_whatever_the_limit(tmp_path: Path, values: list, limit: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(encode(value) for value in values))
    tail, seen = JsonLinesTail(path), []
    while batch := tail.poll(limit):
        seen += batch
    assert seen == [json.loads(encode(value)) for value in values]


def test_any_value_becomes_one_line_of_strict_json() -> None:
    loop: dict = {"x": 1}
    loop["self"] = loop
    for value in (
        {"nan": float("nan"), "inf": [float("inf")], "np": np.float32(1.5), "array": np.arange(2)},
        {"set": {3}, "path": Path("/x"), "surrogate": "\ud800", ("a", 1): "tuple key", "object": object()},
        loop,
    ):
        line = encode(value)
        assert line.count(b"\n") == 1
        json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_dev_full_is_counted_told_once_and_never_raises() -> None:
    told: list[str] = []
    writer = JsonLinesWriter("/dev/full", on_warning=told.append)
    assert not writer.write({"step": 1})
    assert not writer.write({"step": 2})
    assert not writer.retry()
    assert writer.failed_writes == 3
    assert writer.waiting == 2
    assert len(told) == 1
    assert "/dev/full" in told[0]
    assert "No space left" in told[0]
    writer.close()


def test_lines_are_given_up_when_too_many_wait() -> None:
    told: list[str] = []
    writer = JsonLinesWriter("/dev/full", on_warning=told.append, limit=100)
    for step in range(50):
        writer.write({"step": step})
    assert 0 < writer.waiting < 15
    assert writer.dropped_lines == 50 - writer.waiting
    assert len(told) == 2
    writer.close()


def test_a_folder_that_comes_back_gets_all_lines(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "later" / "a.jsonl"
    writer = JsonLinesWriter(path, on_warning=told.append)
    assert not writer.write({"step": 1})
    path.parent.mkdir()
    assert writer.write({"step": 2})
    writer.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    assert "written again" in told[-1]


def test_a_line_cut_by_a_full_disk_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A file size limit makes the system write part of a line and refuse the rest, as a full disk does."""
    path = tmp_path / "a.jsonl"
    code = f"""
        import resource, signal
        from pods_cluster.telemetry.jsonl import JsonLinesWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        told = []
        writer = JsonLinesWriter({str(path)!r}, on_warning=told.append)
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
        for step in range(10):
            writer.write({{"step": step, "text": "x" * 80}})
        size = __import__("os").path.getsize({str(path)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        done = writer.write({{"step": 10}})
        writer.close()
        print(size, writer.failed_writes, writer.dropped_lines, done, len(told))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    size, failed, dropped, complete, told = done.stdout.split()
    assert size == "250", "the limit must cut a line in two for this test to mean anything"
    assert int(failed) > 0
    assert (dropped, complete, told) == ("0", "True", "2")
    assert [line["step"] for line in read_lines(path)] == list(range(11))


def test_a_killed_writer_leaves_readable_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = f"""
        import os, signal
        from pods_cluster.telemetry.jsonl import JsonLinesWriter
        writer = JsonLinesWriter({str(path)!r})
        for step in range(1000):
            writer.write({{"step": step}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert done.returncode == -9
    assert [line["step"] for line in read_lines(path)] == list(range(1000))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_really_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    try:
        filler = tmp_path / "filler"
        filler.write_bytes(b"x" * 40_000)
        told: list[str] = []
        writer = JsonLinesWriter(tmp_path / "a.jsonl", on_warning=told.append)
        for step in range(100):
            writer.write({"step": step, "text": "x" * 500})
        assert writer.failed_writes > 0
        assert len(told) == 1
        filler.unlink()
        assert writer.retry()
        writer.close()
        assert [line["step"] for line in read_lines(tmp_path / "a.jsonl")] == list(range(100))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
