"""Fields of TRL's `GRPOConfig` → fields of a configuration. TRL itself is not needed.

Defaults are TRL's (its main branch of July 2026), so that a script means here what it means there: plain GRPO on all
generations. PODS is one setting more, `selector.keep` below `num_generations`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pods_cluster.config import ConfigError
from pods_cluster.migrate.translation import Translation
from pods_cluster.migrate.trl_names import HELD_BACK, IGNORED, NO_COUNTERPART

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "temperature": 1.0,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "mask_truncated_completions": False,
    "scale_rewards": "group",
    "use_vllm": False,
    "gradient_checkpointing": True,
    "fp16": False,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "shuffle_dataset": True,
    "num_iterations": 1,
}
"""Values that a setting has where it is not given, of those that are read one by one below."""


def translate_trl(given: Mapping[str, Any], *, rows: int, conversational: bool, has_gpu: bool) -> Translation:
    """The fields that the settings `given` of a `GRPOConfig` become, TRL's defaults for all others.

    rows: of the training dataset. conversational: whether its prompts are lists of messages. has_gpu: where the run will
    be. Raises ConfigError for settings that contradict each other.
    """
    told = Translation({**DEFAULTS, **given})
    fields, take, copy = told.fields, told.take, told.copy
    _folder(told)
    _lengths(told, rows)
    copy("learning_rate", "learner.learning_rate")
    copy("max_completion_length", "generator.max_tokens")
    longest = take("max_prompt_length", default=max(512, 16384 - int(fields["generator.max_tokens"])))
    fields["data.max_prompt_tokens"] = longest
    fields["learner.tokens_per_microbatch"] = max(16384, longest + int(fields["generator.max_tokens"]))
    fields["data.chat"] = conversational
    copy("temperature", "generator.temperature")
    copy("top_p", "generator.top_p")
    fields["generator.top_k"] = take("top_k", default=0) or -1
    fields["generator.min_p"] = take("min_p", default=0.0)
    copy("beta", "learner.kl.coefficient")
    low = copy("epsilon", "learner.clip_low")
    fields["learner.clip_high"] = take("epsilon_high", default=low)
    scale = take("scale_rewards")
    if scale == "batch":
        told.drop("scale_rewards", "rewards are scaled in their group here: True, or False for none")
    fields["learner.advantage.normalize"] = scale not in (False, "none", "False")
    _sampling(told, has_gpu)
    copy("importance_sampling_level", "learner.importance")
    copy("mask_truncated_completions", "learner.mask_truncated")
    copy("chat_template_kwargs", "model.chat_template_kwargs")
    if told.settings["loss_type"] == "cispo":  # its epsilon_high is the bound itself
        take("loss_type")
        fields["learner.loss"], fields["learner.objective"] = "token_mean", "cispo"
        fields["learner.clip_high"] = max(take("epsilon_high", default=5.0) - 1.0, 1e-6)
    copy("gradient_checkpointing", "learner.gradient_checkpointing")
    half = take("fp16")
    wide = take("bf16")
    fields["model.dtype"] = "float16" if half else "float32" if wide is False or not (has_gpu or wide) else "bfloat16"
    _model(told)
    copy("weight_decay", "learner.weight_decay")
    fields["learner.betas"] = [take("adam_beta1"), take("adam_beta2")]
    copy("adam_epsilon", "learner.epsilon")
    copy("max_grad_norm", "learner.max_grad_norm")
    fields["learner.schedule"] = _schedule(told)
    _warmup(told)
    copy("seed", "run.seed")
    _saving(told)
    fields["data.shuffle"] = bool(take("shuffle_dataset"))
    sinks = take("report_to", default=[])
    sinks = [sinks] if isinstance(sinks, str) else list(sinks)
    for sink in ("tensorboard", "wandb", "mlflow", "trackio"):
        if sink in sinks:
            fields[f"run.{sink}"] = True
    for sink in sinks:
        if sink not in ("tensorboard", "wandb", "mlflow", "trackio", "none", "all"):
            told.drop("report_to", f"{sink} is no sink of a run; its metrics are in metrics.jsonl")
    for name, (reason, harmless) in NO_COUNTERPART.items():
        told.drop(name, reason, unless=harmless)
    return told.finish(IGNORED)


def _folder(told: Translation) -> None:
    """TRL writes into `output_dir`: it becomes the run's folder."""
    output = told.take("output_dir")
    told.take("reward_weights", "run_name")
    repository, private = told.take("hub_model_id"), told.take("hub_private_repo")
    if told.take("push_to_hub"):
        if repository is not None and "/" in repository:
            told.fields["run.push_to_hub"], told.fields["run.hub_private"] = repository, private is not False
        else:
            told.drop("push_to_hub", "give the repository in hub_model_id, as in owner/name", matters=False)
    if output is None:
        return
    path = Path(output)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._") or "grpo"
    told.fields["run.name"], told.fields["run.dir"] = name, str(path.parent)


def _lengths(told: Translation, rows: int) -> None:
    """Batch sizes there count completions of one optimiser step, here prompts of one step."""
    fields = told.fields
    generations = int(told.copy("num_generations", "generator.rollouts_per_prompt"))
    fields["selector.keep"] = generations
    accumulated = int(told.take("gradient_accumulation_steps"))
    per_update = int(told.take("per_device_train_batch_size")) * accumulated
    per_batch = told.take("generation_batch_size")
    steps = told.take("steps_per_generation")
    if per_batch is None:
        per_batch = per_update if steps is None else int(told.settings["per_device_train_batch_size"]) * int(steps)
    if per_batch % generations or per_batch < generations:
        raise ConfigError(
            f"num_generations: {generations} does not divide the {per_batch} completions of a batch "
            f"(per_device_train_batch_size x gradient_accumulation_steps); change one of them"
        )
    prompts = per_batch // generations
    fields["learner.prompts_per_step"] = prompts
    fields["learner.updates_per_batch"] = max(1, min(prompts, round(per_batch / per_update)))
    fields["selector.no_signal"] = "keep"  # as TRL does: a group without signal takes its place in the batch
    steps = int(told.take("max_steps"))
    epochs = float(told.take("num_train_epochs"))
    fields["run.steps"] = steps if steps > 0 else max(1, math.ceil(rows * epochs / prompts))


def _sampling(told: Translation, has_gpu: bool) -> None:
    fields = told.fields
    wanted = told.take("use_vllm")
    memory, ranks = told.take("vllm_gpu_memory_utilization"), told.take("vllm_tensor_parallel_size")
    context = told.take("vllm_max_model_length", "vllm_max_model_len")
    if wanted:
        fields["generator.engine"] = "vllm"
        fields["generator.tensor_parallel"] = ranks or 1
        if memory is not None and has_gpu:
            fields["generator.engine_options.gpu_memory_utilization"] = memory
        if context is not None:
            fields["generator.engine_options.max_model_len"] = context
    correction, cap = (
        told.take("vllm_importance_sampling_correction"),
        told.take("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    )
    if correction is False:
        fields["learner.correction.mode"] = "off"
    if cap is not None:
        fields["learner.correction.cap"] = cap
    told.take("generation_kwargs")  # arguments of vLLM's SamplingParams, or of transformers' generate
    inner = Translation(told.settings.get("generation_kwargs") or {})
    for names in (("stop", "stop_strings"), ("stop_token_ids",)):
        if (texts := inner.take(*names)) is not None:
            field = "generator.stop_tokens" if names == ("stop_token_ids",) else "generator.stop_strings"
            fields[field] = [texts] if isinstance(texts, str | int) else list(texts)
    inner.copy("include_stop_str_in_output", "generator.include_stop_str_in_output")
    inner.finish({})
    fields.update(inner.fields)
    told.left_out += [
        type(item)(f"generation_kwargs.{item.name}", item.value, item.reason, item.matters) for item in inner.left_out
    ]
    evaluated = told.take("num_generations_eval")
    if evaluated is not None:
        fields["run.eval.samples"] = evaluated


def _model(told: Translation) -> None:
    """`model_init_kwargs` are arguments of from_pretrained."""
    fields = told.fields
    if told.take("trust_remote_code"):
        fields["model.trust_remote_code"] = True
    told.take("model_init_kwargs")
    inner = Translation(told.settings.get("model_init_kwargs") or {})
    dtype = inner.take("dtype", "torch_dtype")
    if dtype not in (None, "auto"):
        name = str(dtype).removeprefix("torch.")
        fields["model.dtype"] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    inner.copy("revision", "model.revision")
    inner.take(*HELD_BACK)
    given = [name for name in inner.settings if name not in ("attn_implementation", "dtype", "torch_dtype", "revision",
                                                             "trust_remote_code", *HELD_BACK)]  # fmt: skip
    if given:
        fields["model.overrides"] = {name: inner.take(name) for name in given}
    inner.finish({})
    fields.update(inner.fields)
    told.left_out += [
        type(item)(f"model_init_kwargs.{item.name}", item.value, item.reason, item.matters) for item in inner.left_out
    ]


def _schedule(told: Translation) -> str:
    kind = str(getattr(told.take("lr_scheduler_type"), "value", told.settings["lr_scheduler_type"]))
    own = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(kind, kind)
    if own not in ("constant", "linear", "cosine"):
        told.drop("lr_scheduler_type", "there are constant, linear and cosine")
        return "linear"
    told.drop("lr_scheduler_kwargs", "the shapes of the schedules are fixed", unless=(None, {}))
    return own


def _warmup(told: Translation) -> None:
    steps, share = told.take("warmup_steps"), told.take("warmup_ratio")
    if steps and steps < 1:  # TRL and transformers take a share there too
        steps, share = None, steps
    if steps:
        told.fields["learner.warmup_steps"] = int(steps)
    elif share:
        told.fields["learner.warmup_steps"] = math.ceil(told.fields["run.steps"] * share)


def _saving(told: Translation) -> None:
    fields, total = told.fields, told.fields["run.steps"]
    strategy = str(getattr(told.take("save_strategy"), "value", told.settings["save_strategy"]))
    every = told.take("save_steps")
    fields["run.checkpoint.every"] = _steps(every, total) if strategy == "steps" else 0
    kept = told.take("save_total_limit")
    if kept is not None:
        fields["run.checkpoint.keep"] = kept
    strategy = str(getattr(told.take("eval_strategy", "evaluation_strategy"), "value", told.settings["eval_strategy"]))
    every = told.take("eval_steps", default=10)
    if strategy != "no":
        fields["run.eval.every"] = _steps(every, total) if strategy == "steps" else max(1, total)


def _steps(value: float, total: int) -> int:
    """transformers takes a number below 1 as a share of all steps."""
    return max(1, math.ceil(value * total) if value < 1 else int(value))
