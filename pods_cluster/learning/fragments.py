"""The training state of one rank as fragments of whole parameters: what it holds, and how it is set.

ZeRO gives each rank a piece of float32 weights and Adam moments. Here every piece is known by its parameter's name and
its place in the flattened parameter, which no longer depends on the number of ranks or the ZeRO stage. All that this
knows about the inside of DeepSpeed's optimisers (0.19: `DeepSpeedZeroOptimizer`, `BF16_Optimizer`,
`DeepSpeedZeroOptimizer_Stage3`) is in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


class FragmentError(Exception):
    """The optimiser keeps a state that cannot be cut by parameters."""


@dataclass(slots=True)
class Fragment:
    """Elements `start` to `start + numel` of the flattened parameter `name` of `shape`, as this rank holds them.

    `tensors` are views [numel] of the float32 weights (`master`) and, after the first optimiser step, of the moments.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    tensors: dict[str, Tensor]


class ShardedState:
    """The state of a `TrainingEngine` on this rank. `engine` is DeepSpeed's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._outer = engine.optimizer
        self._inner = self._outer.optimizer
        self._partitioned = hasattr(self._outer, "fp32_partitioned_groups_flat")
        if self._partitioned:
            self._flats: list[Tensor] = list(self._outer.fp32_partitioned_groups_flat)
        elif hasattr(self._outer, "single_partition_of_fp32_groups"):
            self._flats = list(self._outer.single_partition_of_fp32_groups)
        else:
            self._flats = list(self._outer.fp32_groups_flat_partition)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every trained parameter."""
        return {name: _shape(parameter) for name, parameter in self._trained()}

    @property
    def steps(self) -> int:
        """Optimiser steps taken. Raises FragmentError for an optimiser that keeps no Adam moments."""
        found = 0
        for flat in self._flats:
            state = self._inner.state.get(flat, {})
            if state and not all(isinstance(state.get(key), Tensor) for key in MOMENTS):
                raise FragmentError(f"{type(self._inner).__name__} keeps {', '.join(state)}, not Adam's moments")
            if state:
                found = max(found, int(state["step"]))
        return found

    def scaler(self) -> dict[str, float | bool]:
        """The numbers of float16's loss scale; empty for other types."""
        scaler = getattr(self._outer, "loss_scaler", None)
        if scaler is None or not getattr(scaler, "dynamic", False):
            return {}
        return {name: value for name, value in vars(scaler).items() if isinstance(value, (bool, int, float))}

    def set_scaler(self, values: dict[str, float | bool]) -> None:
        scaler = getattr(self._outer, "loss_scaler", None)
        if scaler is not None and values:
            vars(scaler).update({name: value for name, value in values.items() if name in vars(scaler)})

    def fragments(self) -> list[Fragment]:
        """What this rank holds now; the tensors are views of it."""
        return [
            fragment for name, parameter in self._trained() if (fragment := self._fragment(name, parameter)) is not None
        ]

    @torch.no_grad()
    def set(self, read: Callable[[Fragment, str], Tensor], steps: int) -> None:
        """Set all that this rank holds from `read(fragment, kind)` [numel]; all ranks call it.

        `steps`: optimiser steps taken (0: there are no moments). The weights that the model computes with follow.
        """
        if self._partitioned:
            self._outer.checkpoint_event_prologue()
        if steps or any(self._inner.state.get(flat) for flat in self._flats):
            self._make_moments(steps)  # zero; with a count of 0 that is as good as none
        for fragment in self.fragments():
            for kind, tensor in fragment.tensors.items():
                if steps or kind == MASTER:
                    tensor.copy_(read(fragment, kind))
        self._publish()

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]

    def _fragment(self, name: str, parameter: Any) -> Fragment | None:
        if self._partitioned:
            group, place, held = self._outer.grad_position[self._outer.get_param_id(parameter)]
            # All partitions are of one size; what lies beyond the parameter's end is padding.
            start = held * self._outer._get_param_partition_rank(parameter)
            numel = min(held, parameter.ds_numel - start)
        else:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            group, place = mapping.param_group_index, mapping.hp_fragment_address.start
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        if numel <= 0:
            return None
        flat = self._flats[group]
        tensors = {MASTER: flat.detach().narrow(0, place, numel)}
        state = self._inner.state.get(flat, {})
        tensors |= {key: state[key].narrow(0, place, numel) for key in MOMENTS if key in state}
        return Fragment(name, _shape(parameter), start, numel, tensors)

    def _make_moments(self, steps: int) -> None:
        for flat in self._flats:
            state = self._inner.state[flat]
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat)
            # Where the fused kernel runs, torch keeps the count on the device.
            fused = bool(self._inner.param_groups[0].get("fused"))
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=flat.device if fused else "cpu")

    def _publish(self) -> None:
        """Bring the float32 weights into the parameters that the model computes with."""
        if not self._partitioned:
            self._outer.update_lp_params()
            return
        outer = self._outer
        for group, flat in enumerate(self._flats):
            if flat.numel():
                outer.fp16_partitioned_groups_flat[group].data.copy_(flat)
            whole = outer.unflatten(outer.fp16_partitioned_groups_flat[group], outer.fp16_partitioned_groups[group])
            for partition, updated in zip(outer.fp16_partitioned_groups[group], whole, strict=True):
                partition.data = updated.data
        outer.checkpoint_event_epilogue()  # small parameters are whole on every rank all the time


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
