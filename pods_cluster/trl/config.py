"""A `GRPOConfig` of TRL's names, for scripts that run without TRL."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import Any

from pods_cluster.config.foreign_names import FOREIGN
from pods_cluster.migrate.trl_fields import DEFAULTS
from pods_cluster.migrate.trl_names import IGNORED, NO_COUNTERPART

OTHERS = """
output_dir run_name push_to_hub hub_model_id hub_private_repo max_prompt_length generation_batch_size
steps_per_generation top_p top_k min_p epsilon_high bf16 trust_remote_code model_init_kwargs warmup_steps warmup_ratio
lr_scheduler_kwargs save_total_limit eval_steps report_to vllm_gpu_memory_utilization vllm_tensor_parallel_size
vllm_max_model_length vllm_max_model_len vllm_importance_sampling_correction vllm_importance_sampling_cap
vllm_importance_sampling_clip_max generation_kwargs num_generations_eval reward_weights optim
chat_template_kwargs entropy_coef evaluation_strategy max_tool_calling_iterations
"""
NAMES = frozenset([*DEFAULTS, *NO_COUNTERPART, *IGNORED, *OTHERS.split()])
"""Names of TRL's `GRPOConfig` that are known here; those without a part in a run are told when the trainer is made."""


class GRPOConfig:
    """Settings by TRL's names. What is not given has TRL's default. Raises TypeError for a name that TRL has not."""

    def __init__(self, output_dir: str | None = None, **settings: Any) -> None:
        for name in settings:
            if name not in NAMES and name not in FOREIGN:
                close = difflib.get_close_matches(name, sorted(NAMES), 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"GRPOConfig has no setting {name!r}{hint}")
        self._given = {"output_dir": output_dir, **settings} if output_dir is not None else settings

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("_given", {})
        if name in given:
            return given[name]
        if name in DEFAULTS:
            return DEFAULTS[name]
        if name in NAMES:
            return None
        raise AttributeError(f"GRPOConfig has no setting {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The settings that were given."""
        return dict(self._given)

    def __repr__(self) -> str:
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"


def given_settings(args: Any) -> dict[str, Any]:
    """The settings of a `GRPOConfig`, TRL's or the one above, that differ from TRL's defaults.

    Any object with such attributes will do. Raises TypeError for one that has none.
    """
    if args is None:
        return {}
    if isinstance(args, GRPOConfig):
        return args.to_dict()
    if isinstance(args, Mapping):
        return GRPOConfig(**args).to_dict()
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        found = {}
        for each in dataclasses.fields(args):
            value, default = getattr(args, each.name), each.default
            if each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            if not each.init or value == default or _is_made(each.name, value, args):
                continue
            found[each.name] = value.value if isinstance(value, enum.Enum) else value
        return found
    found = {name: value for name, value in vars(args).items() if name in NAMES} if hasattr(args, "__dict__") else {}
    if not found:
        raise TypeError(f"args: {args!r} is no GRPOConfig; give pods_cluster.trl.GRPOConfig(...), or TRL's")
    return found


_WHATEVER = """
local_rank logging_dir debug distributed_state deepspeed_plugin fsdp fsdp_config accelerator_config include_for_metrics
optim_target_modules project disable_tqdm dataloader_pin_memory pad_to_multiple_of
"""
MADE_BY_TRL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_WHATEVER.split(), ()),
    "bf16": (True,),
    "report_to": ([], "none"),
    "output_dir": (None, "trainer_output"),
}
"""Settings that TRL and transformers fill in themselves when a `GRPOConfig` is made, with what they fill in (empty:
whatever it is)."""


def _is_made(name: str, value: Any, args: Any) -> bool:
    if name in ("generation_batch_size", "steps_per_generation"):
        steps, size = args.gradient_accumulation_steps, args.per_device_train_batch_size
        return value == (steps if name == "steps_per_generation" else steps * size)
    return name in MADE_BY_TRL and (not MADE_BY_TRL[name] or value in MADE_BY_TRL[name])
