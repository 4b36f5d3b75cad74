"""Names that settings of TRL, verl and OpenRLHF have here, for the errors that their names give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LOSSES = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "dr_grpo",
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "dr_grpo",
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
          "torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32"}  # fmt: skip
ATTENTIONS = {"flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2", "fa2": "flash_attention_2",
              "fa3": "flash_attention_3", "kernels-community/vllm-flash-attn3": "flash_attention_3"}  # fmt: skip
SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine"}
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused", "fused_adamw": "adamw_fused",
              "adam": "adamw", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}  # fmt: skip
ENGINES = {"hf": "transformers", "huggingface": "transformers", "torch": "transformers"}

VALUES: dict[str, Mapping[str, str]] = {
    "learner.loss": LOSSES,
    "model.dtype": DTYPES,
    "model.attention": ATTENTIONS,
    "learner.schedule": SCHEDULES,
    "learner.optimizer": OPTIMIZERS,
    "generator.engine": ENGINES,
}
"""Other trainers' values of fields, by the field's path."""


@dataclass(frozen=True, slots=True)
class Field:
    """The field that means the same here. `note` is for a value that cannot be copied as it is."""

    path: str
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def own(self, value: Any) -> Any:
        """The value of our field that means the same; None where there is none."""
        return self.values.get(str(value).lower()) if self.values else value

    def text(self, value: Any) -> str:
        """The advice: what to set instead of `value`."""
        if self.note:
            return f"here it is {self.path}: {self.note}"
        meant = self.own(value)
        plain = meant is not None and isinstance(meant, str | int | float) and len(str(meant)) <= 80
        shown = str(meant).lower() if isinstance(meant, bool) else meant
        return f"here it is {self.path}" + (f": set {self.path}: {shown}" if plain else "")


_BY_FIELD: dict[str, str] = {
    "generator.rollouts_per_prompt": "num_generations n_samples_per_prompt num_samples_per_prompt rollout_n group_size "
    "num_return_sequences rollout.n",
    "generator.max_tokens": "max_completion_length max_new_tokens max_response_length response_length generate_max_len "
    "max_gen_toks",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "learner.learning_rate": "lr actor_learning_rate",
    "learner.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "learner.warmup_ratio": "lr_warmup_ratio lr_warmup_steps_ratio",
    "learner.mask_truncated": "mask_truncated_completions overlong_filter overlong_filtering",
    "learner.entropy_coefficient": "entropy_coef entropy_coeff entropy_loss_coef",
    "learner.importance": "importance_sampling_level",
    "model.revision": "model_revision",
    "model.chat_template_kwargs": "apply_chat_template_kwargs",
    "run.epochs": "num_train_epochs total_epochs num_episodes num_epochs",
    "learner.kl.coefficient": "beta kl_coef kl_coeff init_kl_coef kl_loss_coef kl_beta kl_ctrl.kl_coef kl.init_coef",
    "learner.kl.reference": "ref_model ref_model_path ref_pretrain",
    "learner.clip_low": "clip_ratio clip_ratio_low cliprange cliprange_low eps_clip clip_eps epsilon_low",
    "learner.clip_high": "clip_ratio_high cliprange_high eps_clip_high epsilon_high",
    "learner.max_grad_norm": "grad_clip max_norm clip_grad gradient_clipping",
    "learner.epsilon": "adam_epsilon",
    "learner.gradient_checkpointing": "enable_gradient_checkpointing gradient_checkpointing_enable",
    "learner.offload_optimizer": "adam_offload optimizer_offload",
    "learner.lora.rank": "lora_rank lora_r lora.rank",
    "learner.lora.alpha": "lora_alpha",
    "learner.lora.dropout": "lora_dropout",
    "learner.lora.target_modules": "lora_target_modules",
    "learner.advantage.normalize": "norm_adv_by_std_in_grpo",
    "learner.correction.cap": "tis_imp_ratio_cap vllm_importance_sampling_cap",
    "generator.stop_strings": "stop stop_sequences",
    "generator.stop_tokens": "stop_token_ids",
    "generator.tensor_parallel": "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size",
    "generator.workers": "vllm_num_engines num_engines",
    "generator.max_sequences": "max_num_seqs",
    "generator.engine_options.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "generator.engine_options.enforce_eager": "enforce_eager vllm_enforce_eager",
    "generator.engine_options.max_num_batched_tokens": "max_num_batched_tokens",
    "model.overrides": "override_config",
    "model.path": "model_name_or_path model_name model_id pretrain",
    "data.path": "dataset_name dataset_path prompt_data prompt_dataset train_files train_file dataset",
    "data.name": "dataset_config dataset_config_name",
    "data.prompt": "input_key prompt_key prompt_column",
    "data.answer": "label_key answer_key ground_truth_key",
    "data.split": "dataset_train_split prompt_split train_split",
    "data.eval.path": "val_files eval_dataset val_file",
    "data.eval.split": "dataset_test_split eval_split",
    "data.template": "input_template prompt_template",
    "data.chat": "apply_chat_template",
    "data.system": "system_prompt",
    "data.rows": "train_max_samples max_train_samples max_samples",
    "run.name": "run_name experiment_name wandb_run_name exp_name",
    "run.seed": "train.seed data.seed",
    "run.dir": "output_dir default_local_dir save_path ckpt_path logging_dir",
    "run.steps": "max_steps total_training_steps num_training_steps num_steps",
    "run.checkpoint.every": "save_steps save_freq save_interval",
    "run.checkpoint.keep": "save_total_limit max_ckpt_num ckpt.max_num max_actor_ckpt_to_keep",
    "run.eval.every": "eval_steps test_freq eval_freq eval_interval",
    "run.eval.samples": "eval_n_samples_per_prompt",
    "run.wandb": "use_wandb",
    "staleness": "max_staleness staleness_threshold off_policy_steps max_off_policy_steps",
}
_NOTES: tuple[tuple[str, str, str], ...] = (
    ("learner.tokens_per_microbatch",
     "micro-batches are filled by tokens, not by rows; it bounds a rank's memory and changes no result",
     "per_device_train_batch_size micro_rollout_batch_size micro_train_batch_size ppo_micro_batch_size "
     "ppo_micro_batch_size_per_gpu micro_batch_size micro_batch_size_per_gpu per_gpu_batch_size"),
    ("learner.prompts_per_step",
     "prompts of one step; each trains selector.keep rollouts, in as many micro-batches as they need",
     "train_batch_size rollout_batch_size generation_batch_size gen_batch_size gradient_accumulation_steps "
     "global_batch_size batch_size"),
    ("learner.updates_per_batch",
     "optimiser steps over one batch, each on its part of the prompts",
     "num_iterations ppo_epochs ppo_mini_batch_size max_epochs steps_per_generation mini_batch_size "
     "updates_per_iteration"),
    ("learner.betas", "both in a list, as in [0.9, 0.999]", "adam_beta1 adam_beta2 adam_betas adam_beta"),
    ("learner.advantage.normalize", "true divides by the deviation of the group, false does not (Dr. GRPO)",
     "scale_rewards"),
    ("learner.clip_low", "set it and learner.clip_high, a number each", "eps_clip_low_high epsilon"),
    ("learner.workers", "learner ranks; generators have GPUs of their own (generator.workers)",
     "n_gpus_per_node actor_num_gpus_per_node num_processes nproc_per_node n_gpus num_gpus"),
    ("cluster.address", "nodes are those of the Ray cluster that is connected to", "nnodes num_nodes num_machines"),
    ("learner.zero_stage", "1, 2 or 3; DeepSpeed's other settings follow from the section", "deepspeed "
     "deepspeed_config ds_config"),
    ("model.dtype", "bfloat16, float16 or float32", "bf16 fp16"),
    ("reward", "a list, as in reward: [{name: \"rewards.py:mine\"}]",
     "reward_funcs reward_fn reward_function remote_rm_url custom_reward_function reward_model_path "
     "reward_pretrain reward_manager"),
    ("reward.0.weight", "one weight at each reward", "reward_weights"),
    ("generator.engine", "vllm is the default", "use_vllm vllm_mode"),
    ("learner.correction.mode", "auto corrects wherever engine and learner can differ",
     "vllm_importance_sampling_correction use_tis enable_vllm_is_correction importance_sampling_correction"),
    ("selector.no_signal", "replace tries other prompts for groups without signal", "dynamic_sampling dynamic_filtering "
     "filter_groups filter_groups.enable"),
    ("learner.lora", "a section, as in learner.lora: {rank: 64}", "use_peft use_lora peft_config"),
    ("run.tensorboard", "and run.wandb, run.mlflow, run.trackio: true or false each", "report_to logger log_with"),
    ("run.samples_every", "whole groups are kept for people to read", "log_completions num_completions_to_print"),
    ("learner.kl.coefficient", "0 turns the penalty off", "use_kl_loss use_kl_in_reward"),
)  # fmt: skip
_VALUED: tuple[tuple[str, Mapping[str, str], str], ...] = (
    ("learner.loss", LOSSES, "loss_type loss_agg_mode policy_loss_type policy_loss"),
    ("model.dtype", DTYPES | {name: name for name in ("float32", "bfloat16", "float16")},
     "torch_dtype param_dtype precision mixed_precision"),
    ("model.attention", ATTENTIONS | {name: name for name in ("sdpa", "eager", "flash_attention_2", "flash_attention_3")},
     "attn_implementation attn_impl flash_attn use_flash_attn"),
    ("learner.schedule", SCHEDULES | {name: name for name in ("constant", "linear", "cosine")},
     "lr_scheduler_type lr_scheduler warmup_style"),
    ("learner.optimizer", OPTIMIZERS | {name: name for name in ("adamw", "adamw_fused", "adamw_8bit")}, "optim"),
)  # fmt: skip

FOREIGN: dict[str, Field] = {
    **{name: Field(path) for path, names in _BY_FIELD.items() for name in names.split()},
    **{name: Field(path, note) for path, note, names in _NOTES for name in names.split()},
    **{name: Field(path, values=values) for path, values, names in _VALUED for name in names.split()},
}
"""Other trainers' names (the last one, or the last two joined by a dot) and the field that means the same."""
SECTIONS = ("actor_rollout_ref", "actor", "rollout", "trainer", "algorithm", "ref", "critic", "training_args", "grpo",
            "grpo_config", "train", "training", "optim", "kl_ctrl", "filter_groups", "async_training", "vllm")  # fmt: skip
"""Other trainers' sections, in which names are looked up too."""


def foreign_fields(where: str, value: Any) -> list[tuple[str, Any, str]]:
    """(path as typed, value, what to set here) of an unknown field, or of those within an unknown section of another
    trainer; empty where none of them is known.
    """
    section = isinstance(value, Mapping) and where.rpartition(".")[2] in SECTIONS
    found = None if section else field_of(where)
    if found is not None:
        return [(where, value, found.text(value))]
    if not section:
        return []
    leaves = [(path, leaf, field_of(path)) for path, leaf in _leaves(where, value)]
    return [(path, leaf, known.text(leaf)) for path, leaf, known in leaves if known is not None]


def own_value(path: str, value: Any) -> str:
    """Our name of another trainer's value of a field; empty where there is none."""
    return VALUES.get(path, {}).get(str(value).lower(), "")


def field_of(path: str) -> Field | None:
    """Our field for another trainer's name, by its last part or its last two; None where none is known."""
    parts = path.split(".")
    if len(parts) > 1 and (found := FOREIGN.get(".".join(parts[-2:]))) is not None:
        return found
    return FOREIGN.get(parts[-1])


def _leaves(prefix: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}.{name}"
        if isinstance(value, Mapping) and (name in SECTIONS or field_of(path) is None):
            yield from _leaves(path, value)
        else:
            yield path, value
