"""A Ray cluster to run on: the one that is there, or a local one that the command starts itself."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from pods_cluster.actor_names import NAMESPACE
from pods_cluster.config import Config
from pods_cluster.config.labels import describe_labels, has_labels
from pods_cluster.run.gcs_keeper import start_keeper, table_settings
from pods_cluster.run.leftovers import end_leftovers, forget_session, note_session
from pods_cluster.run.ray_access import check_reachable, loopback_cluster, reaching, token_hint, without_onlookers
from pods_cluster.sizing.moves import Sizes
from pods_cluster.wording import counted

SPARE_SLOTS = 8
"""CPU slots of a local cluster beyond those that the pools start with, so that they can grow while the run goes on."""

log = logging.getLogger(__name__)


class ClusterError(Exception):
    """The cluster cannot be reached, or is too small; the text says what is needed and what there is."""


@dataclass(frozen=True, slots=True)
class Demand:
    """CPUs and GPUs that the two pools ask of the cluster."""

    cpus: float
    gpus: float

    @classmethod
    def of(cls, config: Config, gpus_in_cluster: float) -> Demand:
        generator, learner = config.generator, config.learner
        return cls(
            cpus=generator.workers * generator.cpus_per_worker + learner.workers * learner.cpus_per_worker,
            gpus=generator.workers * config.generator.gpus(gpus_in_cluster)
            + learner.workers * config.learner.gpus(gpus_in_cluster),
        )


def nccl_can_reach(config: Config, gpus_in_cluster: float) -> bool:
    """Whether both pools compute on GPUs that NCCL reaches: on whole cards, or on parts of one whose neighbours pass
    the weights on to each other. `weights.relay: node` asks for gloo: a neighbour on another card has no such way."""
    parts = min(config.generator.gpus(gpus_in_cluster), config.learner.gpus(gpus_in_cluster))
    relay = config.weights.relay
    return relay != "node" and (parts >= 1 or (parts > 0 and relay == "auto"))


def hint_autoscaler(config: Config, sizes: Sizes | None) -> None:
    """Ask Ray's autoscaler for nodes on which pools of these sizes fit; None: no longer.

    Done where the cluster offers `pods_generator` and `pods_learner`, by which its worker groups are told apart; a
    later hint replaces an earlier one. A cluster without an autoscaler ignores it.
    """
    from ray.autoscaler.sdk import request_resources

    from pods_cluster.generation.placement import RESOURCE as GENERATOR
    from pods_cluster.generation.placement import worker_demand
    from pods_cluster.learning.rank_actors import RESOURCE as LEARNER
    from pods_cluster.learning.rank_actors import rank_demand

    there = ray.cluster_resources()
    if not (there.get(GENERATOR) or there.get(LEARNER)):
        return
    bundles: list[dict[str, float]] = []
    labels: list[dict[str, str]] = []
    if sizes is not None:
        bundles = [worker_demand(config, there)] * sizes.generators + [rank_demand(config, there)] * sizes.learners
        labels = [config.generator.place] * sizes.generators + [config.learner.place] * sizes.learners
    try:
        request_resources(bundles=bundles, bundle_label_selectors=labels if any(labels) else None)
    except Exception as error:  # a hint that is not heard costs waiting, no more
        log.warning("the autoscaler could not be told what the run wants: %s", error)


def connect(config: Config, *, quiet: bool = True, runs: int = 1) -> dict[str, Any]:
    """Connect to Ray and check that the pools fit. Returns the cluster's total resources.

    A local cluster is made for so many `runs` of this size side by side.

    Inside a Ray job or with RAY_ADDRESS set, that cluster is used; else a local one is started with as many CPU slots
    as the pools ask for (slots, not cores: on a laptop the pools take turns).
    Raises ClusterError.
    """
    if not ray.is_initialized():
        _initialise(config, quiet=quiet, runs=runs)
    resources = ray.cluster_resources()
    demand = Demand.of(config, resources.get("GPU", 0.0))
    for kind, needed, unit in (("CPU", demand.cpus, "CPUs"), ("GPU", demand.gpus, "GPUs")):
        there = resources.get(kind, 0.0)
        if needed > there + 1e-6:
            raise ClusterError(
                f"the pools need {needed:g} {unit if needed != 1 else unit[:-1]}, the cluster has {there:g} "
                f"({counted(config.generator.workers, 'generator')}, {counted(config.learner.workers, 'learner rank')}); "
                f"lower generator.workers or learner.workers, or join more nodes to the cluster"
            )
    for problem in lacking_places(config, [node for node in ray.nodes() if node["Alive"]]):
        raise ClusterError(problem)
    return resources


def _unread_off() -> dict[str, int]:
    """Settings with which Ray's GCS keeps no record of each call, up to hundreds of megabytes of them: they are shown by
    Ray's dashboard alone, which a local cluster does not have."""
    name = "task_events_report_interval_ms"
    return {} if f"RAY_{name}" in os.environ else {name: 0}


def _note_own_session() -> None:
    """Note the session of the cluster that this process has started, so that the next start can end what a kill leaves."""
    with contextlib.suppress(OSError, LookupError):  # it is a convenience
        session = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parent.parent
        atexit.register(forget_session, note_session(session))


def lacking_places(config: Config, nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a complaint for each pool whose nodes (`place`) lack or have too little room; `nodes` as `ray.nodes` gives them."""
    gpus_in_cluster = sum(node["Resources"].get("GPU", 0.0) for node in nodes)
    for name, pool in (("generator", config.generator), ("learner", config.learner)):
        if not pool.place:
            continue
        there = [node["Resources"] for node in nodes if has_labels(pool.place, node.get("Labels", {}))]
        where = f"{name}.place: {describe_labels(pool.place)}"
        if not there:
            known = sorted({f"{key}: {value}" for node in nodes for key, value in node.get("Labels", {}).items()
                            if not key.startswith("ray.io/")})  # fmt: skip
            yield (
                f"{where} is on none of the cluster's {counted(len(nodes), 'node')}, whose labels are "
                f"{', '.join(known) or 'none'}; start nodes with `ray start --labels`, or change the labels"
            )
            continue
        needs = {"CPU": pool.cpus_per_worker, "GPU": pool.gpus(gpus_in_cluster)}
        room = sum(
            min(int(resources.get(kind, 0.0) / amount + 1e-6) for kind, amount in needs.items() if amount)
            for resources in there
        )
        if room < pool.workers:
            yield (
                f"{where}: the {len(there)} node(s) have room for {room} of {name}.workers: {pool.workers} "
                f"({needs['CPU']:g} CPU(s) and {needs['GPU']:g} GPU(s) each); lower {name}.workers or join more nodes"
            )


def _initialise(config: Config, *, quiet: bool, runs: int) -> None:
    address = config.cluster.address
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": not quiet,
        "logging_level": "error",
        "configure_logging": True,
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    remote = address not in ("auto", "local") or (address == "auto" and bool(os.environ.get("RAY_ADDRESS")))
    try:
        if remote:
            check_reachable(os.environ["RAY_ADDRESS"] if address == "auto" else address)
            with reaching(address):
                ray.init(address=None if address == "auto" else address, **options)
            return
        # A cluster of its own must not be joined by, or join, one that a variable points to.
        os.environ.pop("RAY_ADDRESS", None)
        slots = max(os.cpu_count() or 1, int(runs * Demand.of(config, 0.0).cpus + 0.999) + SPARE_SLOTS)
        # Ray would start an idle process for each of them.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        if ended := end_leftovers():
            log.warning("%d process(es) that a killed run had left of its Ray cluster were ended", ended)
        with loopback_cluster(), without_onlookers() if quiet else contextlib.nullcontext():
            settings = table_settings() | _unread_off()
            ray.init(address="local", num_cpus=slots, include_dashboard=False, _system_config=settings, **options)
        _note_own_session()
        start_keeper()
    except Exception as error:  # ray raises many kinds here; each means the same to the user
        where = address if remote else "a local cluster"
        hint = "check free memory and disk, or set cluster.address"
        if "timed out during startup" in str(error):
            hint = "Ray gives a node 30 s for it: start again when the machine has less to do, or set cluster.address"
        if remote:
            hint = token_hint(error) or (
                "check the address, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH where the cluster asks for a token"
            )
        raise ClusterError(f"cluster.address: {where} cannot be used ({error}); {hint}") from error
