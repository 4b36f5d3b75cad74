"""New weights into a vLLM engine: a weight-transfer engine of ours in vLLM's registry (`vllm_extension` calls it).

The transport is the one of all receivers (`Receiver`: gloo or NCCL, with deadlines, a watchdog and a way out from another
thread, which vLLM's own "nccl" engine lacks); the lifecycle (start, update, finish) and the loading (layerwise reload:
each layer in the model's own format, copied into the storage that captured graphs read) are vLLM's, at the first update
and wherever the model does not keep its parameters as they come (`vllm_direct`). Holds for vLLM 0.25.1 to 0.33, on GPU
and CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from pods_cluster.generation.engines.vllm.adapter_layers import VllmAdapter
from pods_cluster.generation.engines.vllm.direct_load import DirectLoader, Trial
from pods_cluster.weights.adapter import AdapterInbox
from pods_cluster.weights.protocol import (
    AdapterFactor,
    Invitation,
    TensorSpec,
    WeightTransferError,
    WeightUpdate,
)
from pods_cluster.weights.receiver import Receiver, Sink

BACKEND = "pods"

_open: dict[str, Any] = {}
_open_lock = threading.Lock()


def open_transfer(token: str, engine: Any) -> None:
    """Remember the engine that connects with `token` in this process."""
    with _open_lock:
        _open[token] = engine


def close_transfer(token: str) -> None:
    """Leave the group of the engine that connected with `token` in this process; from any thread, at any time."""
    with _open_lock:
        engine = _open.pop(token, None)
    if engine is not None:
        _leave(engine)


def _leave(engine: Any) -> None:
    if isinstance(engine, PodsTransferEngine):
        engine.leave()
        return
    # vLLM's own: up to 0.27 its shutdown only drops the reference, and a stuck broadcast goes on for ever.
    group, engine.model_update_group = getattr(engine, "model_update_group", None), None
    if group is not None:
        group.destroy()


@dataclass
class PodsInitInfo(WeightTransferInitInfo):
    """An `Invitation` as a dictionary; `rank` is that of the engine's first worker."""

    transport: str
    host: str
    port: int
    world_size: int
    rank: int
    name: str
    timeout: float
    bucket_bytes: int
    hub: str
    followers: list[int]


@dataclass
class PodsUpdateInfo(WeightTransferUpdateInfo):
    """A `WeightUpdate` as plain lists, so that it can cross vLLM's process borders."""

    version: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    factors: list[dict[str, Any] | None]
    buckets: list[list[int]]
    timeout: float

    def update(self) -> WeightUpdate:
        rows = zip(self.names, self.shapes, self.dtypes, self.factors, strict=True)
        tensors = tuple(
            TensorSpec(name, tuple(shape), dtype, None if factor is None else AdapterFactor(**factor))
            for name, shape, dtype, factor in rows
        )
        return WeightUpdate(self.version, tensors, tuple((start, stop) for start, stop in self.buckets), self.timeout)


def init_info(invitation: Invitation) -> dict[str, Any]:
    return {**asdict(invitation), "followers": list(invitation.followers)}


def update_info(update: WeightUpdate) -> dict[str, Any]:
    return {
        "version": update.version,
        "names": [spec.name for spec in update.tensors],
        "dtypes": [spec.dtype for spec in update.tensors],
        "shapes": [list(spec.shape) for spec in update.tensors],
        "factors": [None if spec.factor is None else asdict(spec.factor) for spec in update.tensors],
        "buckets": [list(bucket) for bucket in update.buckets],
        "timeout": update.timeout,
    }


class PodsTransferEngine(WeightTransferEngine[PodsInitInfo, PodsUpdateInfo]):
    """One worker's end of the broadcast group; each tensor-parallel worker takes all tensors and keeps its share."""

    init_info_cls = PodsInitInfo
    update_info_cls = PodsUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._target = device
        self._cuda = device if device.type == "cuda" else None
        self._receiver: Receiver | None = None
        self._adapter: VllmAdapter | None = None
        self._trial: Trial | None = None
        self._direct: DirectLoader | None = None
        self._tried = False

    def init_transfer_engine(self, init_info: PodsInitInfo) -> None:
        self.leave()
        invitation = Invitation(
            transport=init_info.transport,
            host=init_info.host,
            port=init_info.port,
            world_size=init_info.world_size,
            rank=init_info.rank + self.parallel_config.rank,
            name=init_info.name,
            timeout=init_info.timeout,
            bucket_bytes=init_info.bucket_bytes,
            hub=init_info.hub,
            followers=tuple(init_info.followers),
        )
        # Kept before it connects, so that `leave` from another thread ends a rendezvous that hangs.
        self._receiver = receiver = Receiver(invitation, self._cuda)
        try:
            receiver.connect()
        except BaseException:
            self.leave()
            raise

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: PodsUpdateInfo) -> None:
        self._receive(update_info.update(), self._load)

    @property
    def direct(self) -> bool:
        """Whether updates go straight into the model's storage: known after the first one."""
        return self._direct is not None

    def begin_trial(self) -> None:
        """Before an update through vLLM's loaders: watch whether later ones can be direct, unless that is known."""
        self._trial = None if self._tried else Trial(self.model)

    def end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            self._tried, self._direct = True, trial.outcome()

    def receive_direct(self, update: WeightUpdate) -> None:
        assert self._direct is not None
        self._direct.check(spec.name for spec in update.tensors)
        self._receive(update, self._direct.load)
        if self._cuda is not None:
            # The model may compute on another stream than this one.
            torch.cuda.synchronize(self._cuda)

    def receive_adapter(self, update: WeightUpdate) -> None:
        """An adapter, merged into the weights of `model.path`; the model is as before until all of it has come."""
        inbox = AdapterInbox()
        self._receive(update, inbox.take)
        config = self.vllm_config.model_config
        if self._adapter is None:
            self._adapter = VllmAdapter(self.model, config.model, config.dtype)
        self._adapter.load(list(inbox), self._target, config)

    def _receive(self, update: WeightUpdate, sink: Sink) -> None:
        receiver = self._receiver
        if receiver is None:
            raise WeightTransferError(f"version {update.version}: no broadcast group is open here; connect first")
        receiver.receive(update, sink)

    def _load(self, rows: list[tuple[TensorSpec, torch.Tensor]]) -> None:
        # Copies: layerwise reload keeps a fused layer's tensors until the last of them came, perhaps a bucket later.
        model: Any = self.model
        if self._trial is not None:
            self._trial.see(rows)
        model.load_weights([(spec.name, tensor.clone()) for spec, tensor in rows])

    def leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def shutdown(self) -> None:
        self.leave()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Abstract up to vLLM 0.27; the learner sends through `WeightSender`."""
        raise NotImplementedError("the learner's WeightSender sends")


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, PodsTransferEngine)
