"""`pods sweep --isolate`: runs side by side have cards and cores to themselves."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.client.lanes import Lane, isolated, lanes_of, make_lanes, visible_cards
from pods_cluster.client.sweep import Runner, prepare
from pods_cluster.client.sweep_command import notes
from pods_cluster.config import ConfigError
from pods_cluster.config.sweep import load_sweep
from tests.client.test_sweep import sweep_file
from tests.law import law
from tests.tiny_run import Made


@law(100)
@given(
    cards=st.integers(0, 9),
    cores=st.integers(0, 20),
    gpus=st.sampled_from([0.0, 0.25, 0.99, 1.0, 1.5, 2.0, 3.0]),
    cpus=st.floats(0.1, 6),
    wanted=st.one_of(st.just("auto"), st.integers(1, 12)),
    runs=st.integers(1, 12),
)
def test_no_lane_has_anything_of_another_and_all_have_as_much(
    cards: int, cores: int, gpus: float, cpus: float, wanted: int, runs: int
) -> None:
    try:
        lanes = make_lanes(
            [str(card) for card in range(cards)], range(cores), gpus=gpus, cpus=cpus, wanted=wanted, runs=runs
        )
    except ConfigError:
        fits = cards // max(1, math.ceil(gpus)) if gpus else cores
        assert not fits or (wanted != "auto" and wanted > fits)
        return
    assert 1 <= len(lanes) <= runs
    for have in ([lane.cards for lane in lanes], [lane.cores for lane in lanes]):
        assert len({len(each) for each in have}) == 1
        flat = [one for each in have for one in each]
        assert len(set(flat)) == len(flat)
    assert len(lanes[0].cards) == math.ceil(gpus)
    assert len(lanes[0].cores) == cores // len(lanes)
    if wanted != "auto":
        assert len(lanes) == min(wanted, runs)
    elif gpus:
        assert len(lanes) == min(cards // len(lanes[0].cards), runs)


@pytest.mark.parametrize(
    ("cards", "cores", "gpus", "wanted", "told"),
    [
        (1, 8, 1.99, "auto", "isolate: true: a run asks for 1.99 GPU(s), this machine shows 1 card; lower"),
        (4, 8, 2.0, 3, "parallel: 3 runs with isolate: true do not fit on 4 cards, of which a run takes 2; give 2 or"),
        (0, 2, 0.0, 3, "parallel: 3 runs with isolate: true do not fit on 2 cores; give 2 or less, or auto"),
        (0, 0, 0.0, 1, "no run asks for a card, and this system binds no process to cores; leave it out"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    cards: int, cores: int, gpus: float, wanted: int, told: str
) -> None:
    names = [str(card) for card in range(cards)]
    with pytest.raises(ConfigError) as error:
        make_lanes(names, range(cores), gpus=gpus, cpus=1, wanted=wanted, runs=9)
    assert told in str(error.value)


def test_the_cards_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a, 3")
    assert visible_cards() == ("GPU-1a", "3")
    assert Lane(("GPU-1a", "3"), ()).environment() == {"CUDA_VISIBLE_DEVICES": "GPU-1a,3"}
    assert Lane((), (1,)).environment() == {}
    for none in ("", "-1", "-1,0"):  # as CUDA reads it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_cards() == ()


def test_runs_on_parts_of_cards_get_whole_ones_and_take_turns(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    parts = ["generator.gpus_per_worker=0.25", "learner.gpus_per_worker=0.5"]
    sweep = load_sweep(sweep_file(tmp_path, made, seeds=4, arms={"one": {}}, isolate=True, parallel=2), parts)
    lanes = lanes_of(sweep)
    assert [lane.cards for lane in lanes] == [("4",), ("5",)]
    sweep = isolated(sweep)
    assert {run.config.cluster.address for run in sweep.runs} == {"local"}
    jobs = prepare(sweep)
    runner = Runner(jobs, len(lanes), {}, {}, lanes)
    for job, lane in zip(jobs, lanes, strict=False):
        assert runner._free_lane() == lane
        job.state, job.lane = "running", lane
    assert not runner._fits(jobs[2].run.config)
    jobs[0].state = "finished"
    assert runner._free_lane() == lanes[0]
    assert not any("share cards" in note for note in notes(sweep))
    together = load_sweep(sweep_file(tmp_path, made, arms={"one": {}}, parallel=2), parts)
    assert any("isolate: true (--isolate) gives each its own" in note for note in notes(together))


def test_another_cluster_than_one_on_this_machine_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(tmp_path, made, arms={"one": {}}, isolate=True)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError) as error:
        isolated(load_sweep(path))
    assert "RAY_ADDRESS=10.0.0.1:6379 names another; `unset RAY_ADDRESS`, or --no-isolate" in str(error.value)
    with pytest.raises(ConfigError) as error:
        isolated(load_sweep(path, ["cluster.address=10.0.0.2:6379"]))
    assert "cluster.address: 10.0.0.2:6379 names another; cluster.address=local" in str(error.value)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
def test_each_run_is_started_on_a_card_and_cores_of_its_own(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core alone")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sweep = load_sweep(
        sweep_file(tmp_path, made, seeds=3, arms={"one": {}}, isolate=True, parallel="auto"),
        ["learner.gpus_per_worker=1"],
    )
    jobs, lanes = prepare(isolated(sweep)), lanes_of(sweep)
    runner = Runner(jobs, len(lanes), {}, {}, lanes)
    try:
        runner.step()
        assert [job.state for job in jobs] == ["running", "running", "waiting"]
        for job, lane in zip(jobs, lanes, strict=False):
            assert job.process is not None
            process, until = psutil.Process(job.process.pid), time.monotonic() + 120
            while tuple(process.cpu_affinity()) != lane.cores:
                assert time.monotonic() < until
                time.sleep(0.02)
            assert process.environ()["CUDA_VISIBLE_DEVICES"] == lane.cards[0]
    finally:
        runner.kill()
    assert {job.lane for job in jobs[:2]} == {*lanes}
