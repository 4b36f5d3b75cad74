"""Cards and cores of this machine that runs of a sweep have to themselves (`isolate`)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from pods_cluster.config import ConfigError
from pods_cluster.config.sweep import Sweep, SweepRun
from pods_cluster.wording import counted

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Lane:
    """What one run has to itself at a time: one run after the other."""

    cards: tuple[str, ...]
    """Cards as CUDA_VISIBLE_DEVICES names them."""
    cores: tuple[int, ...]
    """Cores by their numbers; empty where the system binds no process to some."""

    def environment(self) -> dict[str, str]:
        """What a run on this lane is started with. Without cards nothing is said of them."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.cards)} if self.cards else {}

    def describe(self) -> str:
        parts = [counted(len(have), name) for have, name in ((self.cards, "card"), (self.cores, "core")) if have]
        return " and ".join(parts)


def named_cards() -> tuple[str, ...] | None:
    """The cards that CUDA_VISIBLE_DEVICES names (ids or UUIDs), up to a name that CUDA takes for none; None: it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    return tuple(takewhile(lambda card: card not in ("", "-1"), (part.strip() for part in named.split(","))))


def visible_cards() -> tuple[str, ...]:
    """This machine's cards, as CUDA_VISIBLE_DEVICES would name them: those that it names, where it is set."""
    named = named_cards()
    if named is not None:
        return named
    import torch

    return tuple(str(card) for card in range(torch.cuda.device_count()))


def own_cores() -> tuple[int, ...]:
    """The cores that this process may run on, those that share something next to each other: the threads of one physical
    core, then the cores of one socket. Empty where the system does not tell (macOS)."""
    return tuple(sorted(os.sched_getaffinity(0), key=_place)) if hasattr(os, "sched_getaffinity") else ()


def _place(core: int) -> tuple[int, int, int]:
    try:
        socket, physical = (
            int((TOPOLOGY / f"cpu{core}" / "topology" / name).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, core, core
    return socket, physical, core


def make_lanes(
    cards: Sequence[str],
    cores: Sequence[int],
    *,
    gpus: float,
    cpus: float,
    wanted: int | Literal["auto"],
    runs: int,
) -> list[Lane]:
    """Divide cards and cores into `wanted` lanes, or as many as hold a run (`auto`), but no more than there are runs. Pure.

    `gpus`, `cpus`: Ray GPUs and CPUs that the largest run asks for. A lane has whole cards, as few as hold the run, and an
    equal share of the cores, in the order given; what is over stays unused, so that no run has more than another. Raises
    ConfigError where not so many fit.
    """
    each = math.ceil(gpus - 1e-6)
    if each > len(cards):
        raise ConfigError(
            f"isolate: true: a run asks for {gpus:g} GPU(s), this machine shows {counted(len(cards), 'card')}; "
            "lower generator.gpus_per_worker, learner.gpus_per_worker or the pools' workers"
        )
    if each:
        most = auto = len(cards) // each
        room = f"{counted(len(cards), 'card')}, of which a run takes {each}"
    elif cores:
        # A run's CPUs are slots, which its processes need not fill: whoever asks for more runs than that may have them.
        most, auto = len(cores), max(1, len(cores) // max(1, math.ceil(cpus - 1e-6)))
        room = counted(len(cores), "core")
    else:
        raise ConfigError(
            "isolate: true has nothing to divide: no run asks for a card, and this system binds no process to cores; "
            "leave it out"
        )
    count = auto if wanted == "auto" else wanted
    if count > most:
        raise ConfigError(
            f"parallel: {count} runs with isolate: true do not fit on {room}; give {most} or less, or auto"
        )
    count = min(count, runs)
    share = len(cores) // count
    return [
        Lane(tuple(cards[at * each : (at + 1) * each]), tuple(sorted(cores[at * share : (at + 1) * share])))
        for at in range(count)
    ]


def isolated(sweep: Sweep) -> Sweep:
    """The sweep with a cluster of its own on this machine for each run. Raises ConfigError where another is asked for."""
    if given := {run.config.cluster.address for run in sweep.runs} - {"auto", "local"}:
        what, fix = f"cluster.address: {min(given)}", "cluster.address=local"
    elif given := os.environ.get("RAY_ADDRESS"):
        what, fix = f"RAY_ADDRESS={given}", "`unset RAY_ADDRESS`"
    else:
        return Sweep(sweep.config, [_on_its_own(run) for run in sweep.runs])
    raise ConfigError(
        f"isolate: true starts a cluster on this machine for each run, and {what} names another; {fix}, or --no-isolate"
    )


def _on_its_own(run: SweepRun) -> SweepRun:
    cluster = run.config.cluster.model_copy(update={"address": "local"})
    return SweepRun(run.arm, run.seed, run.config.model_copy(update={"cluster": cluster}))


def lanes_of(sweep: Sweep) -> list[Lane]:
    """A lane for each of the runs that go on at once. Raises ConfigError."""
    from pods_cluster.run.cluster import Demand

    cards = visible_cards()
    demands = [Demand.of(run.config, len(cards)) for run in sweep.runs]
    gpus, cpus = max(each.gpus for each in demands), max(each.cpus for each in demands)
    return make_lanes(cards, own_cores(), gpus=gpus, cpus=cpus, wanted=sweep.config.parallel, runs=len(sweep.runs))
