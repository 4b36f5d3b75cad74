"""One learner rank as a Ray actor: takes its rollouts, trains its part of the plan, sends weights, saves and loads."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from pods_cluster.config import Config
from pods_cluster.types import Locator, Rollout
from pods_cluster.weights.relay_plan import Place

if TYPE_CHECKING:
    from pods_cluster.learning.fetch_rollouts import FetchReport
    from pods_cluster.learning.forward import TokenPair
    from pods_cluster.learning.step_plan import RankPlan
    from pods_cluster.learning.step_sums import RankResult
    from pods_cluster.weights.protocol import TensorSpec, WeightUpdate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a started rank says of itself. `chunked_head`: logits are made chunk by chunk (see `head.py`)."""

    rank: int
    node: str
    pid: int
    device: str
    parameters: int
    trainable: int
    chunked_head: bool
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes: peak of the process (of the GPU where there is one), and optimiser states with float32 master weights."""

    peak: int
    optimizer: int


class LearnerRank:
    """The actor. Its methods run one at a time, but `weights_close` and `ping` answer also while another hangs."""

    def __init__(self, config: Config, threads: int) -> None:
        self.config = config
        self.threads = threads
        self.rank = -1
        self.world_size = 0
        self._store: Any = None
        self._trainer: Any = None
        self._sender: Any = None
        self._fetcher: Any = None
        self._rollouts: dict[Locator, Rollout] = {}

    def open_store(self, world_size: int, timeout: float) -> tuple[str, int]:
        """Rank 0 opens the ranks' meeting point; host and port."""
        from pods_cluster.learning.process_group import open_store

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, world_size, timeout)
        return host, self._store.port

    def start(self, rank: int, world_size: int, host: str, port: int, timeout: float) -> RankInfo:
        """Become one of the ranks: meet the others and build model and optimiser; all ranks at the same time."""
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
            op_timeout=self.config.learner.step_timeout,
        )
        met = time.monotonic()
        self._trainer = Trainer(self.config, self.rank, self.world_size)
        self._fetcher = RolloutFetcher()
        device = self._trainer.engine.device
        self._sender = WeightSender(
            self._trainer.sent,
            self.rank,
            ray.util.get_node_ip_address(),
            device if device.type == "cuda" else None,
            computed=self._trainer.weights,
        )
        return RankInfo(
            rank=self.rank,
            node=socket.gethostname(),
            pid=os.getpid(),
            device=str(self._trainer.engine.device),
            parameters=self._trainer.parameters,
            trainable=self._trainer.trainable,
            chunked_head=self._trainer.chunked,
            seconds={"rendezvous": met - began, "model": time.monotonic() - met},
        )

    def fetch(self, locators: Sequence[Locator], timeout: float) -> FetchReport:
        """Take these rollouts from their workers and hold them for `train`; what could not be had is in the report."""
        found, report = self._fetcher.fetch(locators, timeout)
        self._rollouts.update(found)
        return report

    def train(self, plan: RankPlan, learning_rate: float) -> RankResult:
        """Train this rank's part and forget the rollouts. Collective."""
        try:
            return self._trainer.train(plan, self._rollouts, learning_rate)
        finally:
            self._rollouts.clear()

    def forget(self) -> None:
        """Drop fetched rollouts that will not be trained."""
        self._rollouts.clear()

    def score(self, sequences: Sequence[TokenPair], temperature: float) -> list[list[float]]:
        """Log-probabilities of given completions under the current weights. All ranks call it."""
        return self._trainer.score(sequences, temperature)

    # weights: see pods_cluster/weights/sender.py

    def weights_specs(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every tensor that a version is sent as."""
        return self._trainer.sent.specs()

    def weights_place(self) -> Place:
        """The node and card of this rank."""
        return Place.here()

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
        return self._sender.open(transport, name, receivers, timeout, hub, followers)

    def weights_connect(self, timeout: float) -> None:
        """Rank 0 meets the receivers."""
        self._sender.connect(timeout)

    def weights_send(self, update: WeightUpdate) -> Any:
        """Send one version. All ranks call it: they gather bucket by bucket, rank 0 sends."""
        return self._sender.send(update)

    @ray.method(concurrency_group="control")
    def weights_close(self) -> None:
        """Leave the broadcast group, also while a transfer hangs."""
        if self._sender is not None:
            self._sender.close()

    def weights_fingerprints(self) -> dict[str, str]:
        """Fingerprint of every parameter that an engine computes with after `weights_send`. All ranks call it."""
        return self._sender.fingerprints()

    # states on disk

    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint; all ranks call it."""
        from pods_cluster.learning import rank_checkpoint

        rank_checkpoint.save(self._trainer, Path(folder), self.world_size)

    def commit(self, partial: str, final: str) -> None:
        """Put a checkpoint that all ranks have written in its place (rank 0)."""
        from pods_cluster.learning import rank_checkpoint

        rank_checkpoint.commit(Path(partial), Path(final))

    def load(self, folder: str) -> None:
        """Read a checkpoint; all ranks call it."""
        from pods_cluster.learning import rank_checkpoint

        rank_checkpoint.load(self._trainer, Path(folder), self.world_size)

    def export(self, folder: str) -> None:
        """Write the model in Hugging Face format (rank 0 writes; all ranks call it)."""
        from pods_cluster.learning import rank_checkpoint

        rank_checkpoint.export(self._trainer, Path(folder))

    def memory(self) -> RankMemory:
        return RankMemory(peak=self._trainer.peak_bytes(), optimizer=self._trainer.engine.optimizer_bytes())

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """Answers as long as the process lives: its rank, -1 before `start`."""
        return self.rank

    def shutdown(self) -> None:
        """Leave the process group; the actor is killed afterwards."""
        from pods_cluster.learning import process_group

        if self._sender is not None:
            self._sender.close()
        if self._trainer is not None:
            self._trainer.engine.close()
        process_group.leave()
