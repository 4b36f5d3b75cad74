"""Our weight-transfer engine in vLLM's registry: one worker's end of a broadcast group (`worker_extension` calls it).

The transport is the one of all receivers (`Receiver`: gloo or NCCL, with deadlines, a watchdog and a way out from another
thread, which vLLM's own "nccl" engine lacks); the lifecycle (start, update, finish) and the loading (layerwise reload:
each layer in the model's own format, copied into the storage that captured graphs read) are vLLM's, at the first update
and wherever the model does not keep its parameters as they come (`direct_load`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from pods_cluster.generation.engines.vllm import compat
from pods_cluster.generation.engines.vllm.adapter_layers import VllmAdapter
from pods_cluster.generation.engines.vllm.compat import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from pods_cluster.generation.engines.vllm.direct_load import DirectLoadCheck, DirectLoader
from pods_cluster.weights.adapter import AdapterCollector
from pods_cluster.weights.protocol import (
    AdapterFactor,
    Invitation,
    TensorSpec,
    WeightUpdate,
)
from pods_cluster.weights.receiver import Sink
from pods_cluster.weights.staging import GroupEnd

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
        if isinstance(engine, PodsTransferEngine):
            engine.leave()
        else:
            compat.leave_native_group(engine)


def stage_transfer(token: str, update: WeightUpdate, *, check_memory: bool) -> bool:
    """`PodsTransferEngine.stage` of the engine that connected with `token` in this process; from any thread."""
    with _open_lock:
        engine = _open.get(token)
    return isinstance(engine, PodsTransferEngine) and engine.stage(update, check_memory=check_memory)


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
        self._group = GroupEnd(device)
        self._adapter: VllmAdapter | None = None
        self._check: DirectLoadCheck | None = None
        self._direct: DirectLoader | None = None
        self._checked = False

    def init_transfer_engine(self, init_info: PodsInitInfo) -> None:
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
        self._group.connect(invitation)

    def stage(self, update: WeightUpdate, *, check_memory: bool) -> bool:
        """Take `update` while the model computes, for the call that loads it. False: the memory does not allow it, or it
        has to go through vLLM's loaders, which take a version as it arrives."""
        if not self._group.connected or not (self.direct or update.adapter):
            return False
        return self._group.stage(update, check_memory=check_memory)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: PodsUpdateInfo) -> None:
        self._receive(update_info.update(), self._load)

    @property
    def direct(self) -> bool:
        """Whether updates go straight into the model's storage: known after the first one."""
        return self._direct is not None

    def begin_direct_check(self) -> None:
        """Before an update through vLLM's loaders: watch whether later ones can be direct, unless that is known."""
        self._check = None if self._checked else DirectLoadCheck(self.model)

    def end_direct_check(self) -> None:
        """After that update."""
        check, self._check = self._check, None
        if check is not None:
            self._checked, self._direct = True, check.loader()

    def receive_direct(self, update: WeightUpdate) -> None:
        assert self._direct is not None
        self._direct.check(spec.name for spec in update.tensors)
        self._receive(update, self._direct.load)
        if self._cuda is not None:
            # The model may compute on another stream than this one.
            torch.cuda.synchronize(self._cuda)

    def receive_adapter(self, update: WeightUpdate, *, direct: bool = True) -> None:
        """An adapter, merged into the weights of `model.path`; the model is as before until all of it has come. `direct`:
        past vLLM's loaders where the model allows it."""
        collector = AdapterCollector()
        self._receive(update, collector.add)
        config = self.vllm_config.model_config
        if self._adapter is None:
            self._adapter = VllmAdapter(self.model, config.model, config.dtype, config.revision)
        self._adapter.load(list(collector), self._target, config, direct=direct)
        if self._cuda is not None:
            # The model may compute on another stream than this one.
            torch.cuda.synchronize(self._cuda)

    def _receive(self, update: WeightUpdate, sink: Sink) -> None:
        self._group.source_of(update)(sink)

    def _load(self, rows: list[tuple[TensorSpec, Shaped[Tensor, ...]]]) -> None:
        # Copies: layerwise reload keeps a fused layer's tensors until the last of them came, perhaps a bucket later.
        model: Any = self.model
        if self._check is not None:
            self._check.record(rows)
        model.load_weights([(spec.name, tensor.clone()) for spec, tensor in rows])

    def leave(self) -> None:
        self._group.disconnect()

    def shutdown(self) -> None:
        self.leave()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Abstract up to vLLM 0.27; the learner sends through `WeightSender`."""
        raise NotImplementedError("the learner's WeightSender sends")


compat.register_transfer_engine(BACKEND, PodsTransferEngine)
