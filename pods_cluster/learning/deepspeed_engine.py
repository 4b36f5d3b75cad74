"""DeepSpeed engine of one rank, whose gradients are those of one big batch however a step is cut up.

DeepSpeed divides gradients by the accumulation steps and averages them over ranks. Here a step's loss is a weighted
sum that is already normalised, so both divisions are undone: `scale_wrt_gas=False` leaves the first out, and the loss
is multiplied by the world size against the second. The caller says which pass ends an optimiser step; DeepSpeed does
not count.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, cast

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from pods_cluster.config import LearnerConfig
from pods_cluster.learning.forward import Policy, PolicyOutput
from pods_cluster.learning.fused_loss import TokenLoss
from pods_cluster.learning.policy_model import ModelError, hidden_size, parameter_groups
from pods_cluster.learning.token_batch import TokenBatch

log = logging.getLogger(__name__)

_LARGEST_BUCKET = 200_000_000


class TrainingEngine:
    """Forward, backward and optimiser steps of a `Policy` under ZeRO 1, 2 or 3.

    Every method that computes is a collective: all ranks call it the same number of times, and a rank without work
    passes a dummy batch. float16 is trained with DeepSpeed's dynamic loss scale; bfloat16 and float16 keep float32 master
    weights and sum gradients in float32.
    """

    def __init__(self, policy: Policy, config: LearnerConfig, *, world_size: int, seed: int = 0) -> None:
        import deepspeed

        self.world_size = world_size
        self.config = config
        dtype = next(policy.parameters()).dtype
        groups = parameter_groups(policy, config.weight_decay)
        if not groups:
            raise ModelError("learner.lora: no parameter is left to train")
        torch.manual_seed(seed)
        engine, *_ = deepspeed.initialize(
            model=policy,
            optimizer=_optimizer(groups, config),
            config=deepspeed_config(policy, config, dtype, world_size),
            dist_init_required=False,
        )
        self.engine: Any = engine
        if dtype == torch.bfloat16 and config.zero_stage < 3 and not config.offload_optimizer:
            # A gradient that is not finite makes the norm so, which is checked too; a look at every gradient before it
            # costs as much as the rest of the step.
            self.engine.optimizer.check_overflow = lambda partition_gradients=True: None  # noqa: ARG005
        self.device = torch.device(cast(Any, engine).device)
        self.dropouts = [module for module in policy.modules() if isinstance(module, nn.Dropout) and module.p > 0]
        """Dropout of training passes: that on the input of adapters, as `load_model` turns off the model's own."""

    @property
    def policy(self) -> Policy:
        """The trained policy; under ZeRO-3 its parameters are partitioned."""
        return cast(Policy, self.engine.module)

    @torch.no_grad()
    def log_probs(self, batch: TokenBatch, temperature: float) -> Float32[Tensor, " tokens"]:
        """Log-probabilities of the completion tokens, without gradient and without dropout: the policy itself."""
        for module in self.dropouts:
            module.eval()
        try:
            return self.engine(batch, temperature)[0]
        finally:
            for module in self.dropouts:
                module.train()

    def forward(self, batch: TokenBatch, temperature: float, token_loss: TokenLoss) -> PolicyOutput:
        """Log-probabilities and entropies of the completion tokens, and the sum of their losses with its gradient."""
        return self.engine(batch, temperature, token_loss)

    def backward(self, loss: Float32[Tensor, ""], *, last: bool) -> None:
        """Add the gradient of this rank's part of the loss; the `last` pass of an optimiser step reduces it over ranks."""
        self.engine.set_gradient_accumulation_boundary(last)
        # A loss that is not finite may leave a finite gradient behind (a clipped token has none). Times NaN it has none on
        # any rank, and all of them skip the step alike, without a collective of its own.
        scale = torch.where(torch.isfinite(loss.detach()), float(self.world_size), float("nan"))
        self.engine.backward(loss * scale, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient; returns the gradient's norm before clipping.

        Where the loss or the gradient of any rank is not finite, no rank takes the step (`applied`): weights and optimiser
        stay as they are, the gradient is cleared, and the norm is NaN.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        if not self.applied:
            return float("nan")
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    @property
    def applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self.engine.was_step_applied()

    def optimizer_bytes(self) -> int:
        """Bytes of this rank's optimiser states and float32 master weights."""
        optimizer = self.engine.optimizer
        inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
        # ZeRO-3 keeps its float32 weights beside the optimiser's groups, which hold them only during a step.
        tensors: list[Tensor] = list(getattr(optimizer, "fp32_partitioned_groups_flat", ()))
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}.values())

    def save(self, folder: str, tag: str) -> None:
        """Write this rank's part of weights and optimiser below `folder/tag`; all ranks call it."""
        self.engine.save_checkpoint(
            folder, tag=tag, save_latest=False, exclude_frozen_parameters=self.config.lora is not None
        )

    def load(self, folder: str, tag: str) -> None:
        """Read what `save` wrote. Raises FileNotFoundError."""
        path, _ = self.engine.load_checkpoint(
            folder, tag=tag, load_module_strict=self.config.lora is None, load_lr_scheduler_states=False
        )
        if path is None:
            raise FileNotFoundError(f"{folder}/{tag} holds no learner checkpoint")

    def close(self) -> None:
        """Free what DeepSpeed holds."""
        destroy = getattr(self.engine, "destroy", None)
        if callable(destroy):
            destroy()


def _optimizer(groups: list[dict[str, Any]], config: LearnerConfig) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.epsilon}
    if config.optimizer == "adamw_8bit":
        if importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available():
            raise ModelError(
                "learner.optimizer: adamw_8bit needs a GPU and the package bitsandbytes (pip install bitsandbytes); "
                "install it or set learner.optimizer: adamw"
            )
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        return bitsandbytes.optim.AdamW8bit(groups, **settings)
    if config.optimizer == "adamw_fused" or (torch.cuda.is_available() and not config.offload_optimizer):
        settings["fused"] = True
    return torch.optim.AdamW(groups, **settings)


def deepspeed_config(policy: nn.Module, config: LearnerConfig, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """Translate a run's learner section into DeepSpeed's configuration."""
    gpu = torch.cuda.is_available()
    numel = sum(parameter.numel() for parameter in policy.parameters())
    bucket = max(min(numel, _LARGEST_BUCKET), 1000)
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        # Overlapped reduction makes the host wait for the GPU after every backward pass; alone, a rank reduces nothing.
        "overlap_comm": gpu and world_size > 1,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * (bucket // 2),
    }
    if config.zero_stage == 3:
        width = hidden_size(policy.model if isinstance(policy, Policy) else policy)
        zero |= {
            "stage3_prefetch_bucket_size": width * width,
            "stage3_param_persistence_threshold": 10 * width,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    if config.offload_optimizer and gpu:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # More than 1, so that DeepSpeed keeps what accumulation needs (offloaded gradients); it divides by it nowhere
        # here.
        "gradient_accumulation_steps": 2,
        "train_batch_size": 2 * world_size,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": config.optimizer == "adamw_8bit",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        # Sums over ranks and micro-batches are in float32, whatever the weights compute in.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if dtype == torch.bfloat16:
        tree["bf16"] = {"enabled": True}
    elif dtype == torch.float16:
        tree["fp16"] = {"enabled": True}
    return tree
