"""New weights into a vLLM engine: a weight-transfer engine of ours in vLLM's registry, and what its workers add to it.

Named as `worker_extension_cls`, so that every vLLM worker process imports this module before it loads the model. The
transport is the one of all receivers (`Receiver`: gloo or NCCL, with deadlines, a watchdog and a way out from another
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
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from pods_cluster.weights.adapter import AdapterInbox
from pods_cluster.weights.receiver import Receiver, Sink
from pods_cluster.weights.shards import ShardSum
from pods_cluster.weights.transport import first_line
from pods_cluster.weights.types import (
    AdapterFactor,
    Invitation,
    TensorSpec,
    WeightLoadError,
    WeightTransferError,
    WeightUpdate,
)
from pods_cluster.weights.vllm_adapter import VllmAdapter
from pods_cluster.weights.vllm_direct import DirectLoader, Trial
from pods_cluster.weights.vllm_parameters import expected_names, held_sums, repack_tied_heads

BACKEND = "pods"
EXTENSION = f"{__name__}.WorkerExtension"

_open: dict[str, Any] = {}
_open_lock = threading.Lock()


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


class WorkerExtension:
    """Methods that vLLM's worker class inherits, called in every worker of an engine by `collective_rpc`.

    Failures come back as values, not exceptions: vLLM keeps only the text of an exception from another process.
    """

    def pods_connect(self: Any, token: str, info: dict[str, Any]) -> dict[str, Any]:
        def connect() -> None:
            with _open_lock:
                _open[token] = self.weight_transfer_engine
            self.init_weight_transfer_engine(info)

        return _outcome(connect)

    def pods_disconnect(self: Any, token: str) -> dict[str, Any]:
        return _outcome(lambda: close_transfer(token))

    def pods_receive(self: Any, info: dict[str, Any], loading: str) -> dict[str, Any]:
        """One full version. After a failure the model is unusable until the next full one."""
        return _outcome(lambda: _receive(self, info, loading))

    def pods_fingerprints(self: Any) -> dict[str, ShardSum]:
        return held_sums(self.model_runner.get_model())


def _receive(worker: Any, info: dict[str, Any], loading: str) -> None:
    model, engine = worker.model_runner.get_model(), worker.weight_transfer_engine
    update = PodsUpdateInfo(**info).update() if "factors" in info else None
    if update is not None and update.adapter:
        _receive_adapter(worker, update)
        return
    worker.pods_whole = True
    if getattr(worker, "pods_half_loaded", False):
        # The last update died midway: its layers lie on the meta device, and must be put back before a new start.
        with set_current_vllm_config(worker.vllm_config):
            worker.weight_transfer_engine.finish_weight_update()
        worker._weight_update_active = False
    _check_names(worker, model, info["names"])
    if update is not None and engine.direct:
        engine.receive_direct(update)
        repack_tied_heads(model)
        return
    if update is not None and loading == "auto":
        engine.begin_trial()
    worker.pods_half_loaded = True
    worker.start_weight_update()
    worker.update_weights(info)
    worker.finish_weight_update()
    repack_tied_heads(model)
    worker.pods_half_loaded = False
    if update is not None:
        engine.end_trial()


def _receive_adapter(worker: Any, update: WeightUpdate) -> None:
    if getattr(worker, "pods_whole", False):
        raise WeightLoadError(
            "an adapter came to an engine that took whole weights before, so that the adapter's base is gone; send one "
            "or the other (learner.lora.send)"
        )
    with set_current_vllm_config(worker.vllm_config):
        worker.weight_transfer_engine.receive_adapter(update)


def _check_names(worker: Any, model: torch.nn.Module, names: list[str]) -> None:
    """vLLM only warns of layers that got nothing: they would go on with old weights."""
    if not hasattr(worker, "pods_names"):
        worker.pods_names = expected_names(model)
    wanted: set[str] | None = worker.pods_names
    if wanted is None:
        return
    if missing := sorted(wanted.difference(names)):
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise WeightLoadError(
            f"{len(missing)} parameter(s) of the engine are not in the update: {shown}; learner and generators must "
            "load the same model.path"
        )


def _outcome(call: Any) -> dict[str, Any]:
    try:
        call()
    except WeightTransferError as error:
        kind = "load" if isinstance(error, WeightLoadError) else "transfer"
        return {"kind": kind, "message": error.message, "missing": list(error.missing)}
    except Exception as error:
        return {"kind": "load", "message": first_line(error), "missing": []}
    return {}


def raise_failure(outcomes: list[dict[str, Any]], what: str) -> None:
    """Raise the first failure among the workers' outcomes, as it was."""
    failures = [outcome for outcome in outcomes if outcome]
    if not failures:
        return
    # A load that failed on one worker makes the others' transfers fail: it is the cause.
    first = next((outcome for outcome in failures if outcome["kind"] == "load"), failures[0])
    kind = WeightLoadError if first["kind"] == "load" else WeightTransferError
    raise kind(f"{what}: {first['message']}", tuple(first["missing"]))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, PodsTransferEngine)
