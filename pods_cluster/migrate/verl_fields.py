"""A verl command line (hydra overrides) → fields of a configuration. verl itself is not needed.

Defaults are verl's (`ppo_trainer.yaml` of January 2026). Parquet files in verl's form are read as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pods_cluster.migrate.translation import LeftOut, Translation

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
GROUP = 8
"""n where the command line has one rollout a prompt, as PPO with a critic does: a group needs several."""
ESTIMATORS = {"grpo": True, "grpo_passk": True, "drgrpo": False, "rloo": False}
"""Estimators of an advantage within a group, and whether it is divided by the group's deviation."""

IGNORED: dict[str, str] = {
    name: reason
    for reason, names in {
        "micro-batches are filled by tokens: learner.tokens_per_microbatch": "log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu balance_batch",
        "micro-batches have no padding: learner.packing": "use_remove_padding use_prefix_grouper",
        "over-long prompts are left out and counted": "filter_overlong_prompts filter_overlong_prompts_workers truncation",
        "learner ranks are DeepSpeed's: learner.zero_stage, learner.offload_optimizer": "param_offload strategy fsdp_size "
        "wrap_policy ulysses_sequence_parallel_size reshard_after_forward forward_prefetch",
        "an evaluation comes before the first step": "val_before_train val_only",
        "there is no critic": "critic_warmup",
        "the run's metrics are in its folder": "log_val_generations rollout_data_dir validation_data_dir",
        "it changes no result here": "free_cache_engine layered_summon load_format hybrid_engine shm_size use_shm "
        "use_torch_compile return_raw_chat return_raw_input_ids return_full_prompt dataloader_num_workers "
        "val_batch_size device resume_mode nccl_timeout calculate_log_probs disable_log_stats enable_chunked_prefill "
        "use_legacy_worker_impl esi_redundant_time default_hdfs_dir image_key del_local_ckpt_after_load mode "
        "use_fused_kernels dtype",
        "the importance correction is per token: learner.correction": "rollout_rs rollout_rs_threshold bypass_mode",
    }.items()
    for name in names.split()
}  # fmt: skip

REWARDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"gsm8k", {"name": "math_answer", "options": {"where": "hash"}}),
    (r"math|aime|deepscaler|olympiad", {"name": "math_answer", "options": {"where": "boxed"}}),
)
"""Rewards of verl's `default_compute_score`, by a pattern of the rows' `data_source`."""


def translate_verl(given: Mapping[str, Any]) -> Translation:
    """The fields that verl's overrides become, verl's defaults for all others. Reads the number of rows and their
    `data_source` where the files are here."""
    told = Translation({**DEFAULTS, **given})
    fields, take, copy = told.fields, told.take, told.copy
    files, held_out = _files(take("data.train_files")), _files(take("data.val_files"))
    if len(files) > 1:
        fields["data.mix"] = [{"path": path} for path in files[1:]]
    if len(held_out) > 1:
        text = "a run evaluates on one dataset; join these files"
        told.left_out.append(LeftOut("data.val_files", held_out[1:], text))
    looks = [_look(path) for path in files]
    source = looks[0][1]
    rows = (
        sum(count for count, _ in looks if count is not None) if all(count is not None for count, _ in looks) else None
    )
    copy("actor_rollout_ref.model.path", "model.path")
    fields["data.path"] = files[0]
    copy("data.prompt_key", "data.prompt")
    copy("data.max_prompt_length", "data.max_prompt_tokens")
    copy("data.max_response_length", "generator.max_tokens")
    copy("data.shuffle", "data.shuffle")
    copy("data.apply_chat_template_kwargs", "model.chat_template_kwargs")
    longest = fields["data.max_prompt_tokens"] + fields["generator.max_tokens"]
    fields["learner.tokens_per_microbatch"] = max(
        16384, longest, int(take("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", default=0))
    )
    every = int(take("trainer.test_freq"))
    fields["run.eval.every"] = max(0, every)
    if every > 0:
        fields["data.eval.path"] = held_out[0]
    fields["reward"] = [_reward(told, source)]
    _group(told)
    _update(told)
    _kl(told)
    _length(told, rows)
    copy("actor_rollout_ref.rollout.temperature", "generator.temperature")
    copy("actor_rollout_ref.rollout.top_p", "generator.top_p")
    copy("actor_rollout_ref.rollout.top_k", "generator.top_k")
    engine = take("actor_rollout_ref.rollout.name")
    fields["generator.engine"] = "transformers" if engine == "hf" else "vllm"
    if engine not in ("vllm", "hf"):
        told.left_out.append(LeftOut("actor_rollout_ref.rollout.name", engine, "the engine is vllm here"))
    told.drop("data.sampler.class_path", "prompts are chosen by data.curriculum and data.revisit here")
    _pools(told)
    names = take("trainer.project_name"), take("trainer.experiment_name")
    fields["run.name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", str(names[1])).strip("-._") or "verl"
    folder = take("trainer.default_local_dir")
    fields["run.dir"] = str(Path(folder).parent) if folder else f"runs/{names[0]}"
    fields["run.checkpoint.every"] = max(0, int(take("trainer.save_freq")))
    sinks = take("trainer.logger", default=[])
    for sink in [sinks] if isinstance(sinks, str) else sinks:
        if sink in ("wandb", "tensorboard", "mlflow", "trackio"):
            fields[f"run.{sink}"] = True
        elif sink != "console":
            told.left_out.append(
                LeftOut("trainer.logger", sink, "is no sink of a run; its metrics are in metrics.jsonl")
            )
    for name in told.settings:
        if name.startswith(("critic.", "reward_model.", "algorithm.kl_ctrl.")):
            reason = (
                "without use_kl_in_reward it is not used" if "kl_ctrl" in name else "there is no critic or reward model"
            )
            told.drop(name, reason, matters=False)
    return told.finish(IGNORED)


def _files(value: Any) -> list[str]:
    return [str(Path(str(item)).expanduser()) for item in (value if isinstance(value, list) else [value])]


def _look(path: str) -> tuple[int | None, str]:
    """The number of rows of a parquet file and the `data_source` of its first; (None, "") where it is not here."""
    if not Path(path).is_file() or Path(path).suffix != ".parquet":
        return None, ""
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    if "data_source" not in file.schema_arrow.names:
        return file.metadata.num_rows, ""
    first = next(file.iter_batches(batch_size=1, columns=["data_source"]), None)
    return file.metadata.num_rows, str(first.column(0)[0]) if first is not None and len(first) else ""


def _reward(told: Translation, source: str) -> dict[str, Any]:
    path = told.take("custom_reward_function.path", "reward.custom_reward_function.path")
    name = told.take("custom_reward_function.name", "reward.custom_reward_function.name", default="compute_score")
    if path is not None:
        return {"name": f"{path}:{name}", "style": "verl"}
    for pattern, reward in REWARDS:
        if re.search(pattern, source, re.IGNORECASE):
            return dict(reward)
    if source:
        text = "verl's own reward for these rows; math_answer compares final answers: check that it fits, or name a function"
        told.left_out.append(LeftOut("data_source", source, text, True))
    return {"name": "math_answer"}


def _group(told: Translation) -> None:
    fields, n = told.fields, int(told.take("actor_rollout_ref.rollout.n"))
    estimator = str(told.take("algorithm.adv_estimator"))
    divided = told.take("algorithm.norm_adv_by_std_in_grpo")
    fields["learner.advantage.normalize"] = bool(divided) and ESTIMATORS.get(estimator, True)
    if estimator not in ESTIMATORS:
        text = "advantages are those of a group of rollouts here (GRPO), without a critic"
        told.left_out.append(LeftOut("algorithm.adv_estimator", estimator, text, True))
    if n < 2:
        text = f"a group needs several rollouts: generator.rollouts_per_prompt is {GROUP}"
        told.left_out.append(LeftOut("actor_rollout_ref.rollout.n", n, text, True))
        n = GROUP
    fields["generator.rollouts_per_prompt"] = fields["selector.keep"] = n
    fields["selector.no_signal"] = "replace" if told.take("algorithm.filter_groups.enable") else "keep"


def _update(told: Translation) -> None:
    """A batch there is a step here; a mini-batch is one optimiser step over a part of it."""
    fields, take = told.fields, told.take
    prompts = int(told.copy("data.train_batch_size", "learner.prompts_per_step"))
    mini = int(take("actor_rollout_ref.actor.ppo_mini_batch_size"))
    fields["learner.updates_per_batch"] = max(1, math.ceil(prompts / mini))
    told.drop(
        "actor_rollout_ref.actor.ppo_epochs",
        "a batch is trained once here; learner.updates_per_batch cuts it into several optimiser steps",
        unless=(None, 1),
    )
    told.copy("actor_rollout_ref.actor.optim.lr", "learner.learning_rate")
    told.copy("actor_rollout_ref.actor.optim.weight_decay", "learner.weight_decay")
    told.copy("actor_rollout_ref.actor.grad_clip", "learner.max_grad_norm")
    clip = take("actor_rollout_ref.actor.clip_ratio")
    fields["learner.clip_low"] = take("actor_rollout_ref.actor.clip_ratio_low", default=clip)
    fields["learner.clip_high"] = take("actor_rollout_ref.actor.clip_ratio_high", default=clip)
    told.copy("actor_rollout_ref.actor.entropy_coeff", "learner.entropy_coefficient")
    mode = take("actor_rollout_ref.actor.policy_loss.loss_mode", default="vanilla")
    if mode == "gspo":
        fields["learner.importance"] = "sequence"
        if "actor_rollout_ref.actor.loss_agg_mode" not in told.settings:
            fields["learner.loss"] = "sequence_mean"
    elif mode != "vanilla":
        text = "the objectives are learner.objective and learner.importance"
        told.left_out.append(LeftOut("actor_rollout_ref.actor.policy_loss.loss_mode", mode, text, True))
    told.drop("actor_rollout_ref.actor.clip_ratio_c", "there is no dual clip here", matters=False)


def _kl(told: Translation) -> None:
    fields, take = told.fields, told.take
    coefficient = take("actor_rollout_ref.actor.kl_loss_coef")
    if take("actor_rollout_ref.actor.use_kl_loss"):
        fields["learner.kl.coefficient"] = coefficient
        told.drop(
            "actor_rollout_ref.actor.kl_loss_type",
            "the KL term is the k3 estimate (low_var_kl)",
            unless=(None, "low_var_kl", "k3"),
        )
    else:
        take("actor_rollout_ref.actor.kl_loss_type")
    kind = take("algorithm.rollout_correction.rollout_is")
    cap = take("algorithm.rollout_correction.rollout_is_threshold", default=2.0)
    if kind is not None:
        fields["learner.correction.mode"], fields["learner.correction.cap"] = "on", cap
    told.drop("algorithm.use_kl_in_reward", "the KL term is in the loss here: learner.kl.coefficient")


def _length(told: Translation, rows: int | None) -> None:
    steps, epochs = told.take("trainer.total_training_steps"), int(told.take("trainer.total_epochs"))
    if steps is None and rows is not None:
        steps = max(1, rows // told.fields["learner.prompts_per_step"]) * epochs
    if steps is None:
        told.fields["run.epochs"] = epochs
    else:
        told.fields["run.steps"] = int(steps)
    warmup = told.take("actor_rollout_ref.actor.optim.lr_warmup_steps", default=-1)
    share = told.take("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", default=0.0)
    if warmup > 0:
        told.fields["learner.warmup_steps"] = int(warmup)
    elif share > 0:
        told.fields["learner.warmup_ratio"] = share


def _pools(told: Translation) -> None:
    """verl's GPUs do everything in turn; here the pools have cards of their own."""
    fields, take = told.fields, told.take
    cards = int(take("trainer.n_gpus_per_node")) * int(take("trainer.nnodes"))
    ranks = int(take("actor_rollout_ref.rollout.tensor_model_parallel_size", default=1))
    memory = take("actor_rollout_ref.rollout.gpu_memory_utilization")
    if cards == 1:
        fields["generator.gpus_per_worker"] = fields["learner.gpus_per_worker"] = 0.5
        fields["generator.tensor_parallel"] = 1
    else:
        learners = max(1, cards // 2)
        fields["learner.workers"] = learners
        fields["generator.tensor_parallel"] = min(ranks, cards - learners)
        fields["generator.workers"] = max(1, (cards - learners) // ranks)
    if fields["generator.engine"] == "vllm" and memory is not None:
        fields["generator.engine_options.gpu_memory_utilization"] = memory
