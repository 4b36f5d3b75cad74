"""One learner rank as a Ray actor: takes its rollouts, trains its part of the plan, sends weights, saves and loads."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray

from pods_cluster.config import Config
from pods_cluster.learning.reports import CopyReport, FetchReport, RankInfo, RankMemory, RankResult, Written
from pods_cluster.telemetry.process_memory import process_memory
from pods_cluster.types import Locator, Rollout
from pods_cluster.weights.relay_plan import WorkerLocation

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from pods_cluster.learning.fetch_rollouts import RolloutFetcher
    from pods_cluster.learning.state_copy import StateCopier
    from pods_cluster.learning.step_plan import RankPlan
    from pods_cluster.learning.token_batch import TokenPair
    from pods_cluster.learning.trainer import Trainer
    from pods_cluster.weights.protocol import TensorSpec, WeightUpdate
    from pods_cluster.weights.sender import WeightSender

T = TypeVar("T")


class LearnerRank:
    """One data-parallel rank of the learner, run as a Ray actor.

    Its methods run one at a time, except `weights_close` and `ping`, which answer also while another one hangs.
    """

    def __init__(self, config: Config, threads: int) -> None:
        self.config = config
        self.threads = threads
        self.rank = -1
        self.world_size = 0
        self._store: TCPStore | None = None
        self._trainer: Trainer | None = None
        self._sender: WeightSender | None = None
        self._fetcher: RolloutFetcher | None = None
        self._copier: StateCopier | None = None
        self._rollouts: dict[Locator, Rollout] = {}

    @property
    def trainer(self) -> Trainer:
        """The rank's trainer. Raises RuntimeError before `start`."""
        return _started(self._trainer)

    @property
    def sender(self) -> WeightSender:
        """The rank's end of the weight broadcast. Raises RuntimeError before `start`."""
        return _started(self._sender)

    def prepare(self) -> None:
        """Import what `start` needs, which raises where that fails."""
        with contextlib.suppress(Exception):
            from pods_cluster.learning import trainer  # noqa: F401

    def open_store(self, world_size: int, timeout: float) -> tuple[str, int]:
        """Open the store at which the ranks meet (rank 0). Returns its host and port."""
        from pods_cluster.learning.process_group import open_store

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, world_size, timeout)
        return host, self._store.port

    def start(self, rank: int, world_size: int, host: str, port: int, timeout: float) -> RankInfo:
        """Meet the other ranks and build model and optimiser; all ranks call it at the same time."""
        import torch

        self.rank, self.world_size = rank, world_size
        torch.set_num_threads(self.threads)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        from pods_cluster.learning import process_group
        from pods_cluster.learning.fetch_rollouts import RolloutFetcher
        from pods_cluster.learning.trainer import Trainer
        from pods_cluster.weights.sender import WeightSender

        began = time.monotonic()
        process_group.join(
            self.rank,
            self.world_size,
            host,
            port,
            store=self._store,
            timeout=timeout,
            collective_timeout=self.config.learner.step_timeout,
        )
        met = time.monotonic()
        from pods_cluster.learning.state_copy import StateCopier

        trainer = self._trainer = Trainer(self.config, self.rank, self.world_size)
        self._copier = StateCopier()
        self._fetcher = RolloutFetcher()
        device = trainer.engine.device
        self._sender = WeightSender(
            trainer.sent_weights,
            self.rank,
            ray.util.get_node_ip_address(),
            device if device.type == "cuda" else None,
            computed=trainer.model_weights,
        )
        return RankInfo(
            rank=self.rank,
            node=socket.gethostname(),
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            device=str(device),
            parameters=trainer.parameters,
            trainable=trainer.trainable,
            chunked_head=trainer.chunked_head,
            kernels=trainer.kernels,
            packed=trainer.packed,
            choices=tuple(trainer.choices),
            rendezvous_seconds=met - began,
            model_seconds=time.monotonic() - met,
        )

    def fetch(self, locators: Sequence[Locator], timeout: float) -> FetchReport:
        """Take these rollouts from their workers and hold them for `train`; the report names those that are missing."""
        found, report = _started(self._fetcher).fetch(locators, timeout)
        self._rollouts.update(found)
        return report

    def train(self, plan: RankPlan, learning_rate: float) -> RankResult:
        """Train this rank's part of the plan, then drop the rollouts. Collective."""
        try:
            result = self.trainer.train(plan, self._rollouts, learning_rate)
            if self.config.copies_every:
                _started(self._copier).prepare(self.trainer, self.world_size)
            result.memory = process_memory()
            return result
        finally:
            self._rollouts.clear()

    def drop_rollouts(self) -> None:
        """Drop fetched rollouts that will not be trained."""
        self._rollouts.clear()

    def score(self, sequences: Sequence[TokenPair], temperature: float) -> list[list[float]]:
        """Log-probabilities of given completions under the current weights. All ranks call it."""
        return self.trainer.score(sequences, temperature)

    # weights: see pods_cluster/weights/sender.py

    def weights_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors that every weight version is sent as."""
        return self.trainer.sent_weights.specs()

    def weights_location(self) -> WorkerLocation:
        """The node and card of this rank."""
        return WorkerLocation.current()

    def weights_open(
        self,
        transport: str,
        name: str,
        receivers: int,
        timeout: float,
        hub: str = "",
        followers: tuple[int, ...] = (),
    ) -> tuple[str, int]:
        """Rank 0 listens for the receivers of a new broadcast group; host and port."""
        return self.sender.open(transport, name, receivers, timeout, hub, followers)

    def weights_connect(self, timeout: float) -> None:
        """Rank 0 meets the receivers."""
        self.sender.connect(timeout)

    def weights_send(self, update: WeightUpdate) -> None:
        """Send one version. All ranks call it: they gather bucket by bucket, rank 0 sends."""
        self.sender.send(update)

    @ray.method(concurrency_group="control")
    def weights_close(self) -> None:
        """Leave the broadcast group, also while a transfer hangs."""
        if self._sender is not None:
            self._sender.close()

    def weights_fingerprints(self) -> dict[str, str]:
        """Fingerprint of every parameter that an engine computes with after `weights_send`. All ranks call it."""
        return self.sender.fingerprints()

    # states on disk

    def save(self, folder: str) -> Written:
        """Write this rank's part of a checkpoint; all ranks call it."""
        from pods_cluster.learning import rank_checkpoint

        return _written(lambda: rank_checkpoint.save(self.trainer, Path(folder), self.world_size))

    def commit(self, partial: str, final: str) -> Written:
        """Rename a checkpoint that all ranks have written to its final path (rank 0)."""
        from pods_cluster.learning import rank_checkpoint

        return _written(lambda: rank_checkpoint.commit(Path(partial), Path(final)))

    def discard(self, folder: str) -> None:
        """Remove what is left of a checkpoint that could not be written (rank 0)."""
        shutil.rmtree(folder, ignore_errors=True)

    def copy_state(self, folder: str) -> CopyReport:
        """Copy the training state to memory; it is written into `folder` while the rank goes on. All ranks call it."""
        return _started(self._copier).begin(self.trainer, Path(folder), self.world_size)

    @ray.method(concurrency_group="control")
    def copy_report(self) -> CopyReport:
        """Report on the newest light copy; answered also while the rank trains."""
        return _started(self._copier).report()

    def load(self, folder: str) -> None:
        """Read a checkpoint; all ranks call it."""
        from pods_cluster.learning import rank_checkpoint

        rank_checkpoint.load(self.trainer, Path(folder), self.world_size)

    def export(self, folder: str) -> Written:
        """Write the model in Hugging Face format (rank 0 writes; all ranks call it)."""
        from pods_cluster.learning.model_export import export

        return _written(lambda: export(self.trainer, Path(folder)))

    def memory(self) -> RankMemory:
        """Memory that this rank holds."""
        return RankMemory(peak=self.trainer.peak_bytes(), optimizer=self.trainer.engine.optimizer_bytes())

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """Answer as long as the process lives. Returns the rank, -1 before `start`."""
        return self.rank

    def shutdown(self) -> None:
        """Leave the process group; the actor is killed afterwards."""
        from pods_cluster.learning import process_group

        if self._sender is not None:
            self._sender.close()
        if self._trainer is not None:
            self._trainer.engine.close()
        process_group.leave()


def _written(write: Callable[[], list[str] | None]) -> Written:
    """Call `write`; what a disk does not take is answered, any other failure is raised."""
    from pods_cluster.learning.rank_checkpoint import storage_fault

    try:
        return Written(notes=write() or [])
    except Exception as error:
        fault = storage_fault(error)
        if fault is None:
            raise
        return Written(fault=fault)


def _started(part: T | None) -> T:
    if part is None:
        raise RuntimeError("this learner rank has not started; call start on all ranks first")
    return part
