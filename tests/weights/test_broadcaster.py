"""The broadcaster over Ray actors: a learner of two ranks whose gathers are collectives, and workers that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import ray

from pods_cluster.config import WeightsConfig
from pods_cluster.stopped_process import Process
from pods_cluster.weights.broadcast import Broadcaster, LearnerFailed, PublishReport
from tests.weights.weight_cluster import PATIENT, SHORT, WAIT, alive, broadcaster, holds, publish, settings, step
from tests.weights.weight_parts import make_tensors


def test_a_version_reaches_all_and_the_group_is_kept(cluster):
    workers = cluster.workers("a", "b", "c")
    caster = broadcaster(cluster, verify=True, **PATIENT)
    first = publish(caster, cluster, 1, workers)
    assert (first.version, first.failed, first.rebuilt, first.attempts) == (1, {}, True, 1)
    assert first.nbytes == sum(tensor.nbytes for tensor in make_tensors(1).values())
    second = publish(caster, cluster, 2, workers)
    assert (second.failed, second.rebuilt, second.attempts) == ({}, False, 1)
    for worker in workers.values():
        holds(worker, 2)
    alive(cluster)
    cluster.give_back()


def test_members_that_leave_or_come_make_a_new_group(cluster):
    workers = cluster.workers("a", "b")
    caster = broadcaster(cluster)
    publish(caster, cluster, 1, workers)
    alone = {"b": workers["b"]}
    assert publish(caster, cluster, 2, alone).rebuilt
    assert not publish(caster, cluster, 3, alone).rebuilt
    holds(workers["b"], 3)
    assert ray.get(workers["a"].state.remote(), timeout=WAIT) == (1, False)
    # The same name with another actor behind it is another member.
    assert publish(caster, cluster, 4, {"b": workers["a"]}).rebuilt
    holds(workers["a"], 4)
    assert publish(caster, cluster, 5, {}).attempts == 0
    cluster.give_back()


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_killed_worker_is_reported_and_the_others_get_the_version(cluster, moment):
    workers = cluster.workers("a", "b", "c")
    caster = broadcaster(cluster)
    if moment == "after":
        assert publish(caster, cluster, 1, workers).failed == {}
    if moment == "during":
        ray.get(workers["b"].fault.remote(at=2, act="die", times=1), timeout=WAIT)
        cluster.taken.pop("b")
    else:
        cluster.kill("b")
    report = publish(caster, cluster, 2, workers)
    assert list(report.failed) == ["b"]
    assert "ActorDied" in report.failed["b"]
    assert report.attempts == 2
    rest = {name: worker for name, worker in workers.items() if name != "b"}
    for worker in rest.values():
        holds(worker, 2)
    later = publish(caster, cluster, 3, rest)
    assert (later.failed, later.rebuilt) == ({}, False), "the second group is the common one"
    alive(cluster)
    cluster.give_back()


@pytest.mark.parametrize("phase", ["rendezvous", "transfer"])
def test_a_worker_stopped_beyond_the_deadline_is_reported_and_the_others_recover(cluster, phase):
    workers = cluster.workers("a", "b", "c")
    caster = broadcaster(cluster, grace=2.0, **SHORT)
    if phase == "rendezvous":
        os.kill(cluster.taken["a"][1], signal.SIGSTOP)
    else:
        ray.get(workers["a"].fault.remote(at=1, act="stop", times=1), timeout=WAIT)
    report = publish(caster, cluster, 1, workers)
    assert list(report.failed) == ["a"]
    assert "did not answer within 2 s" in report.failed["a"]
    for name in "bc":
        holds(workers[name], 1)
    assert publish(caster, cluster, 2, {name: workers[name] for name in "bc"}).failed == {}
    alive(cluster)
    cluster.give_back(spent=("a",))


@pytest.mark.parametrize("phase", ["rendezvous", "transfer"])
def test_a_worker_that_is_stopped_is_waited_for_for_seconds_alone(cluster, phase):
    workers = cluster.workers("a", "b")
    here = ray.get_runtime_context().get_node_id()
    processes = {name: Process(pid, here) for name, (_, pid) in cluster.taken.items()}
    caster = broadcaster(
        cluster, grace=2.0, process_of=processes.get, rendezvous_timeout=10 * WAIT, transfer_timeout=10 * WAIT
    )
    if phase == "rendezvous":
        os.kill(cluster.taken["a"][1], signal.SIGSTOP)
    else:
        ray.get(workers["a"].fault.remote(at=1, act="stop", times=1), timeout=WAIT)
    report = publish(caster, cluster, 1, workers)
    assert list(report.failed) == ["a"]
    assert report.failed["a"].endswith("its process is stopped")
    holds(workers["b"], 1)
    # so it is for a newcomer alone, of which nobody else hears
    os.kill(cluster.taken["b"][1], signal.SIGSTOP)
    alone = asyncio.run(asyncio.wait_for(caster.catch_up(1, "b", workers["b"]), WAIT))
    os.kill(cluster.taken["b"][1], signal.SIGCONT)
    assert alone.failed["b"].endswith("its process is stopped")
    alive(cluster)
    cluster.give_back(spent=("a",))


def test_a_worker_that_wakes_up_again_serves_no_half_of_a_version(cluster):
    workers = cluster.workers("a", "b")
    caster = broadcaster(cluster, grace=1.0, **SHORT)
    assert publish(caster, cluster, 1, workers).failed == {}
    ray.get(workers["a"].fault.remote(at=1, act="stop", times=1), timeout=WAIT)
    assert list(publish(caster, cluster, 2, workers).failed) == ["a"]
    os.kill(cluster.taken["a"][1], signal.SIGCONT)
    assert ray.get(workers["a"].state.remote(), timeout=WAIT) == (1, True), "closed until a full version came"
    report = publish(caster, cluster, 3, workers)
    assert report.failed == {}
    holds(workers["a"], 3)
    cluster.give_back()


def test_one_failure_costs_a_second_attempt_and_nobody(cluster):
    workers = cluster.workers("a", "b")
    ray.get(workers["a"].fault.remote(at=3, act="raise", times=1), timeout=WAIT)
    report = publish(broadcaster(cluster), cluster, 1, workers)
    assert (report.failed, report.attempts) == ({}, 2)
    assert list(report.resent) == ["a"]
    assert "no room for this bucket" in report.resent["a"]
    for worker in workers.values():
        holds(worker, 1)
    cluster.give_back()


def test_two_failures_in_a_row_are_reported_with_their_cause(cluster):
    workers = cluster.workers("a", "b", "c")
    ray.get(workers["c"].fault.remote(at=0, act="raise", times=9), timeout=WAIT)
    report = publish(broadcaster(cluster), cluster, 1, workers)
    assert list(report.failed) == ["c"]
    assert "no room for this bucket" in report.failed["c"]
    for name in "ab":
        holds(workers[name], 1)
    assert ray.get(workers["c"].state.remote(), timeout=WAIT)[1], "stays closed"
    alive(cluster)
    cluster.give_back()


def test_two_who_fail_at_different_times_are_both_reported(cluster):
    workers = cluster.workers("a", "b", "c")
    cluster.kill("a")
    ray.get(workers["b"].fault.remote(at=2, act="raise", times=9), timeout=WAIT)
    report = publish(broadcaster(cluster), cluster, 1, workers)
    assert sorted(report.failed) == ["a", "b"]
    holds(workers["c"], 1)
    cluster.give_back()


def test_a_worker_that_never_comes_to_the_rendezvous_is_reported(cluster):
    workers = cluster.workers("a", "b")
    ray.get(workers["a"].fault.remote(act="absent"), timeout=WAIT)
    report = publish(broadcaster(cluster, grace=2.0, **SHORT), cluster, 1, workers)
    assert list(report.failed) == ["a"]
    assert "no network" in report.failed["a"]
    holds(workers["b"], 1)
    cluster.give_back()


def test_a_learner_that_gathers_what_it_did_not_announce_costs_no_worker(cluster):
    workers = cluster.workers("a", "b")
    caster = broadcaster(cluster)
    publish(caster, cluster, 1, workers)
    ray.get([rank.step.remote(2, odd=True) for rank in cluster.learner], timeout=WAIT)
    with pytest.raises(LearnerFailed, match=r"version 2: learner rank 0: .*up: the learner gathered float64\[77, 33\]"):
        asyncio.run(caster.publish(2, workers))
    alive(cluster)
    assert publish(caster, cluster, 3, workers).failed == {}
    for worker in workers.values():
        holds(worker, 3)
    cluster.give_back()


def test_nobody_left_ends_in_failed(cluster):
    workers = cluster.workers("a", "b")
    for worker in workers.values():
        ray.get(worker.fault.remote(at=0, act="raise", times=9), timeout=WAIT)
    caster = broadcaster(cluster)
    assert sorted(publish(caster, cluster, 1, workers).failed) == ["a", "b"]
    cluster.give_back()


def test_verification_finds_the_tensor_that_an_engine_holds_wrongly(cluster):
    workers = cluster.workers("a", "b")
    ray.get(workers["b"].fault.remote(at=0, act="corrupt", times=9), timeout=WAIT)
    report = publish(broadcaster(cluster, verify=True, **PATIENT), cluster, 1, workers)
    assert list(report.failed) == ["b"]
    assert report.failed["b"].startswith("1 tensor differs: embed: sent bfloat16[301,33]:")
    holds(workers["a"], 1)
    cluster.give_back()


def test_a_newcomer_catches_up_during_a_publish_and_joins_the_next(cluster):
    workers = cluster.workers("a", "b")
    newcomer = cluster.workers("c")["c"]
    caster = broadcaster(cluster)

    async def run() -> tuple[PublishReport, PublishReport]:
        step(cluster, 1, sleep=0.1)
        publishing = asyncio.ensure_future(caster.publish(1, workers))
        while not ray.get(workers["a"].groups.remote(), timeout=WAIT):
            await asyncio.sleep(0.02)
        assert not publishing.done()
        return await asyncio.gather(publishing, caster.catch_up(1, "c", newcomer))

    published, caught_up = asyncio.run(run())
    assert (published.failed, caught_up.failed, caught_up.version) == ({}, {}, 1)
    for worker in (*workers.values(), newcomer):
        holds(worker, 1)
    common = publish(caster, cluster, 2, workers | {"c": newcomer})
    assert (common.failed, common.rebuilt) == ({}, True)
    names = ray.get([worker.groups.remote() for worker in (*workers.values(), newcomer)], timeout=WAIT)
    assert len({joined[-1] for joined in names}) == 1, "one group for all"
    holds(newcomer, 2)
    cluster.give_back()


def test_a_cancelled_publish_leaves_nothing_that_is_used_again(cluster):
    workers = cluster.workers("a", "b")
    caster = broadcaster(cluster)
    publish(caster, cluster, 1, workers)

    async def run() -> None:
        step(cluster, 2, sleep=0.1)
        publishing = asyncio.ensure_future(caster.publish(2, workers))
        await asyncio.sleep(0.3)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing

    asyncio.run(run())
    report = publish(caster, cluster, 3, workers)
    assert (report.failed, report.rebuilt) == ({}, True)
    for worker in workers.values():
        holds(worker, 3)
    cluster.give_back()


def test_closing_frees_the_members(cluster):
    workers = cluster.workers("a")
    caster = broadcaster(cluster)
    publish(caster, cluster, 1, workers)
    asyncio.run(caster.close())
    assert publish(caster, cluster, 2, workers).rebuilt
    cluster.give_back()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="at least one learner rank"):
        Broadcaster([], settings(), "run")
    with pytest.raises(ValueError, match="ranks_per_worker: 0"):
        Broadcaster([None], settings(), "run", ranks_per_worker=0)
    assert Broadcaster([None], WeightsConfig(), "run", gpus=True).transport == "nccl"
    assert Broadcaster([None], WeightsConfig(), "run").transport == "gloo"


def test_a_killed_learner_is_an_error_and_its_successor_brings_everyone_back(cluster):
    """Last: the other rank of this learner waits for the dead one."""
    workers = cluster.workers("a", "b")
    caster = broadcaster(cluster, grace=2.0, **SHORT)
    assert publish(caster, cluster, 1, workers).failed == {}

    async def run() -> None:
        step(cluster, 2, sleep=0.2)
        publishing = asyncio.ensure_future(caster.publish(2, workers))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LearnerFailed, match=r"version 2: .*learner rank 0: Actor(Died|Unavailable)"):
            await publishing

    pid = ray.get(cluster.learner[0].pid.remote(), timeout=WAIT)
    asyncio.run(run())
    end = time.monotonic() + WAIT
    for worker in workers.values():
        assert ray.get(worker.state.remote(), timeout=end - time.monotonic()) == (1, True)
    ray.kill(cluster.learner[1])
    cluster.learner = cluster.start_learner()
    assert publish(broadcaster(cluster), cluster, 3, workers).failed == {}
    for worker in workers.values():
        holds(worker, 3)
    cluster.give_back()
