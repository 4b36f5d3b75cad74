"""Names of TRL's `GRPOConfig` that have no part in a run: those that change what is computed there, and those that do not."""

from __future__ import annotations

from typing import Any

NO_COUNTERPART: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_iterations": ("a batch is trained once here; learner.updates_per_batch cuts it into several optimiser steps", (None, 1)),
    "delta": ("there is no two-sided clip here", (None,)),
    "repetition_penalty": ("it changes the sampled distribution, which the learner does not know", (None, 1.0)),
    "sync_ref_model": ("the reference model stays the same here", (None, False)),
    "top_entropy_quantile": ("all tokens are trained here", (None, 1.0)),
    "use_adaptive_entropy": ("the weight of the entropy stays the same here", (None, False)),
    "multi_objective_aggregation": ("rewards are summed, then normalised", (None, "sum_then_normalize")),
    "cache_implementation": ("the engine has its own cache", (None,)),
    "auto_find_batch_size": ("learner.tokens_per_microbatch bounds the memory", (None, False)),
    "off_policy_mask_threshold": ("sequences are not masked by their divergence here", (None,)),
    "use_bias_correction_kl": ("the KL term is not weighted by the importance ratio here", (None, False)),
    "label_smoothing_factor": ("there are no labels", (None, 0.0)),
    "neftune_noise_alpha": ("embeddings are not disturbed here", (None,)),
    "tools": ("functions are given to the trainer, as GRPOTrainer(tools=[f])", (None,)),
}  # fmt: skip
"""Settings that change what is computed there and have no counterpart: reason, and the values that change nothing."""

HELD_BACK = ("use_cache", "device_map", "low_cpu_mem_usage", "max_memory", "offload_folder")
"""Arguments of from_pretrained that say where a model lies, which the pools decide."""

IGNORED: dict[str, str] = {
    name: reason
    for reason, names in {
        "each step is written to the run's metrics": "logging_steps logging_strategy logging_first_step logging_dir "
        "logging_nan_inf_filter log_level log_on_each_node disable_tqdm log_unique_prompts include_tokens_per_second",
        "whole groups are kept for people to read: run.samples_every": "log_completions num_completions_to_print",
        "rows are rendered in the run's controller": "dataloader_num_workers dataloader_pin_memory dataloader_drop_last "
        "dataloader_persistent_workers dataloader_prefetch_factor remove_unused_columns group_by_length data_seed "
        "accelerator_config full_determinism",
        "the pools are sized by generator and learner (docs/operations.md)": "vllm_mode vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_enable_sleep_mode vllm_model_impl "
        "ds3_gather_for_generation ddp_find_unused_parameters ddp_timeout ddp_backend fsdp fsdp_config deepspeed "
        "local_rank use_cpu parallelism_config",
        "it changes no result here": "per_device_eval_batch_size eval_accumulation_steps torch_empty_cache_steps "
        "gradient_checkpointing_kwargs use_liger_kernel use_liger_loss torch_compile torch_compile_backend "
        "torch_compile_mode tf32 pad_to_multiple_of disable_dropout average_tokens_across_devices jit_mode_eval "
        "optim_args cast_lm_head_to_fp32 do_train do_eval do_predict overwrite_output_dir prediction_loss_only "
        "include_for_metrics label_names eval_on_start eval_delay save_safetensors save_only_model enable_jit_checkpoint "
        "skip_memory_metrics batch_eval_metrics project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "bf16_full_eval fp16_full_eval liger_kernel_config use_cache include_num_input_tokens_seen eval_do_concat_batches "
        "eval_use_gather_object save_on_each_node dataloader_multiprocessing_context dataloader_in_order "
        "train_sampling_strategy length_column_name ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "log_level_replica log_multimodal log_completions_hub_repo use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config "
        "hub_strategy hub_token hub_always_push "
        "hub_revision gradient_as_bucket_view ignore_data_skip load_best_model_at_end metric_for_best_model "
        "greater_is_better router_aux_loss_coef resume_from_checkpoint torchdynamo restore_callback_states_from_checkpoint",
        "loss_type says so": "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg "
        "vespo_lambda_neg",
        "the coefficient of the entropy stays the same here": "entropy_coef_min entropy_coef_max entropy_coef_delta "
        "entropy_target",
        "the importance correction is per token here: learner.correction": "vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_min",
        "sync_ref_model is off": "ref_model_mixup_alpha ref_model_sync_steps",
        "the engine's answers are free text": "vllm_structured_outputs_regex",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Settings that have no part here and change no result."""
