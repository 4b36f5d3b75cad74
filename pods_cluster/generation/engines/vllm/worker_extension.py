"""Methods that vLLM's workers get for new weights, called by `collective_rpc`.

Named as `worker_extension_cls`, so that every vLLM worker process imports this module, and with it the transfer engine,
before it loads the model; an engine's own processes begin to watch their owner then.
"""

from __future__ import annotations

from typing import Any

import torch

from pods_cluster.generation.engines.vllm import process_owner
from pods_cluster.generation.engines.vllm.compat import set_current_vllm_config
from pods_cluster.generation.engines.vllm.parameters import expected_names, local_sums, repack_tied_heads
from pods_cluster.generation.engines.vllm.weight_transfer import PodsUpdateInfo, close_transfer, open_transfer
from pods_cluster.weights.protocol import WeightLoadError, WeightTransferError, WeightUpdate
from pods_cluster.weights.sharded_fingerprint import ShardSum
from pods_cluster.weights.transport import first_line

EXTENSION = f"{__name__}.WorkerExtension"

process_owner.end_with_owner()


class WorkerExtension:
    """Methods that vLLM's worker class inherits, called in every worker of an engine by `collective_rpc`.

    Failures come back as values, not exceptions: vLLM keeps only the text of an exception from another process.
    """

    def pods_connect(self: Any, token: str, info: dict[str, Any]) -> dict[str, Any]:
        def connect() -> None:
            open_transfer(token, self.weight_transfer_engine)
            self.init_weight_transfer_engine(info)

        return _outcome(connect)

    def pods_disconnect(self: Any, token: str) -> dict[str, Any]:
        return _outcome(lambda: close_transfer(token))

    def pods_receive(self: Any, info: dict[str, Any], loading: str) -> dict[str, Any]:
        """One full version. After a failure the model is unusable until the next full one."""
        return _outcome(lambda: _receive(self, info, loading))

    def pods_fingerprints(self: Any) -> dict[str, ShardSum]:
        return local_sums(self.model_runner.get_model())


def _receive(worker: Any, info: dict[str, Any], loading: str) -> None:
    model, engine = worker.model_runner.get_model(), worker.weight_transfer_engine
    update = PodsUpdateInfo(**info).update() if "factors" in info else None
    if update is not None and update.adapter:
        _receive_adapter(worker, update, loading)
        return
    worker.pods_whole = True
    if getattr(worker, "pods_half_loaded", False):
        # The last update died midway: its layers lie on the meta device, and must be put back before a new start.
        with set_current_vllm_config(worker.vllm_config):
            engine.finish_weight_update()
        worker._weight_update_active = False
    _check_names(worker, model, info["names"])
    if update is not None and engine.direct:
        engine.receive_direct(update)
        repack_tied_heads(model)
        return
    if update is not None and loading == "auto":
        engine.begin_direct_check()
    worker.pods_half_loaded = True
    worker.start_weight_update()
    worker.update_weights(info)
    worker.finish_weight_update()
    repack_tied_heads(model)
    worker.pods_half_loaded = False
    if update is not None:
        engine.end_direct_check()


def _receive_adapter(worker: Any, update: WeightUpdate, loading: str) -> None:
    if getattr(worker, "pods_whole", False):
        raise WeightLoadError(
            "an adapter came to an engine that took whole weights before, so that the adapter's base is gone; send one "
            "or the other (learner.lora.send)"
        )
    with set_current_vllm_config(worker.vllm_config):
        worker.weight_transfer_engine.receive_adapter(update, direct=loading == "auto")


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
