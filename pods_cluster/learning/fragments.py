"""Training state of one rank as fragments of whole parameters: reading and setting it.

ZeRO gives each rank a piece of float32 weights and Adam moments. Here every piece is identified by its parameter's name
and its range in the flattened parameter, which do not depend on the number of ranks or the ZeRO stage. All knowledge of
the internals of DeepSpeed's optimisers (0.19: `DeepSpeedZeroOptimizer`, `BF16_Optimizer`,
`DeepSpeedZeroOptimizer_Stage3`) is in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


class FragmentError(Exception):
    """An optimiser whose state cannot be cut by parameters."""


@dataclass(slots=True)
class Fragment:
    """Elements `start` to `start + numel` of the flattened parameter `name` of `shape`, as this rank holds them.

    `tensors` are views [numel] of the float32 weights (`master`) and, after the first optimiser step, of the moments.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    tensors: dict[str, Float[Tensor, " numel"]]

    def piece(self, kind: str) -> str:
        """Name of one of the tensors among all that a run's ranks hold."""
        return f"{kind} {self.start} {self.name}"


class ShardedState:
    """Training state of DeepSpeed's `engine` on this rank."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._zero_optimizer = engine.optimizer
        self._adam = self._zero_optimizer.optimizer
        self._partitioned = hasattr(self._zero_optimizer, "fp32_partitioned_groups_flat")
        if self._partitioned:
            self._flat_weights: list[Float[Tensor, " partition"]] = list(
                self._zero_optimizer.fp32_partitioned_groups_flat
            )
        elif hasattr(self._zero_optimizer, "single_partition_of_fp32_groups"):
            self._flat_weights = list(self._zero_optimizer.single_partition_of_fp32_groups)
        else:
            self._flat_weights = list(self._zero_optimizer.fp32_groups_flat_partition)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every trained parameter."""
        return {name: _shape(parameter) for name, parameter in self._trainable()}

    @property
    def steps(self) -> int:
        """Optimiser steps taken. Raises FragmentError for an optimiser that keeps no Adam moments."""
        found = 0
        for flat in self._flat_weights:
            state = self._adam.state.get(flat, {})
            if state and not all(isinstance(state.get(key), Tensor) for key in MOMENTS):
                raise FragmentError(f"{type(self._adam).__name__} keeps {', '.join(state)}, not Adam's moments")
            if state:
                found = max(found, int(state["step"]))
        return found

    def loss_scale(self) -> dict[str, float | bool]:
        """State of float16's dynamic loss scale; empty for other dtypes."""
        scaler = getattr(self._zero_optimizer, "loss_scaler", None)
        if scaler is None or not getattr(scaler, "dynamic", False):
            return {}
        return {name: value for name, value in vars(scaler).items() if isinstance(value, (bool, int, float))}

    def set_loss_scale(self, values: dict[str, float | bool]) -> None:
        """Restore what `loss_scale` returned."""
        scaler = getattr(self._zero_optimizer, "loss_scaler", None)
        if scaler is not None and values:
            vars(scaler).update({name: value for name, value in values.items() if name in vars(scaler)})

    def fragments(self) -> list[Fragment]:
        """Fragments that this rank holds; their tensors are views of its state."""
        return [
            fragment
            for name, parameter in self._trainable()
            if (fragment := self._fragment(name, parameter)) is not None
        ]

    @torch.no_grad()
    def set(self, read: Callable[[Fragment, str], Float[Tensor, " numel"]], steps: int) -> None:
        """Set all fragments that this rank holds from `read(fragment, kind)`; all ranks call it.

        `steps`: optimiser steps taken (0: there are no moments). The weights that the model computes with are updated.
        """
        if self._partitioned:
            self._zero_optimizer.checkpoint_event_prologue()
        if steps or any(self._adam.state.get(flat) for flat in self._flat_weights):
            self._make_moments(steps)  # zeros with a count of 0 equal a fresh optimiser
        for fragment in self.fragments():
            for kind, tensor in fragment.tensors.items():
                if steps or kind == MASTER:
                    tensor.copy_(read(fragment, kind))
        self._update_model_weights()

    def _trainable(self) -> list[tuple[str, Any]]:
        return [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]

    def _fragment(self, name: str, parameter: Any) -> Fragment | None:
        if self._partitioned:
            group, offset, held = self._zero_optimizer.grad_position[self._zero_optimizer.get_param_id(parameter)]
            # All partitions are of one size; the elements beyond the parameter's end are padding.
            start = held * self._zero_optimizer._get_param_partition_rank(parameter)
            numel = min(held, parameter.ds_numel - start)
        else:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            group, offset = mapping.param_group_index, mapping.hp_fragment_address.start
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        if numel <= 0:
            return None
        flat = self._flat_weights[group]
        tensors = {MASTER: flat.detach().narrow(0, offset, numel)}
        state = self._adam.state.get(flat, {})
        tensors |= {key: state[key].narrow(0, offset, numel) for key in MOMENTS if key in state}
        return Fragment(name, _shape(parameter), start, numel, tensors)

    def _make_moments(self, steps: int) -> None:
        for flat in self._flat_weights:
            state = self._adam.state[flat]
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat)
            # Where the fused kernel runs, torch keeps the count on the device.
            fused = bool(self._adam.param_groups[0].get("fused"))
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=flat.device if fused else "cpu")

    def _update_model_weights(self) -> None:
        """Copy the float32 weights into the parameters that the model computes with."""
        if not self._partitioned:
            self._zero_optimizer.update_lp_params()
            return
        outer = self._zero_optimizer
        for group, flat in enumerate(self._flat_weights):
            if flat.numel():
                outer.fp16_partitioned_groups_flat[group].data.copy_(flat)
            whole = outer.unflatten(outer.fp16_partitioned_groups_flat[group], outer.fp16_partitioned_groups[group])
            for partition, updated in zip(outer.fp16_partitioned_groups[group], whole, strict=True):
                partition.data = updated.data
        outer.checkpoint_event_epilogue()  # small parameters are whole on every rank all the time


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
