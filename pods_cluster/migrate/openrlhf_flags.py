"""An OpenRLHF command line (`train_ppo_ray`) → fields of a configuration. OpenRLHF itself is not needed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pods_cluster.config import ConfigError
from pods_cluster.migrate.translation import LeftOut, Translation
from pods_cluster.migrate.verl_fields import GROUP

IGNORED: dict[str, str] = {
    name: reason
    for reason, names in {
        "micro-batches are filled by tokens: learner.tokens_per_microbatch": "train.micro_batch_size "
        "rollout.micro_batch_size train.dynamic_batch_enable rollout.max_tokens_per_gpu",
        "micro-batches have no padding: learner.packing": "ds.packing_samples packing_samples",
        "the pools have cards of their own": "train.colocate_all ref.num_nodes ref.num_gpus_per_node reward.num_nodes "
        "reward.num_gpus_per_node vllm.enable_sleep ds.enable_sleep vllm.sync_backend colocate_all_models "
        "train.colocate_actor_ref",
        "the trained model is written at the end: run.export": "ckpt.save_hf",
        "pods train --resume goes on": "ckpt.load_enable",
        "it changes no result here": "logger.logging_steps ds.ring_attn_head_stride data.dataloader_num_workers",
    }.items()
    for name in names.split()
}  # fmt: skip
ESTIMATORS = {"group_norm": True, "dr_grpo": False, "reinforce_baseline": True, "rloo": False}


def translate_openrlhf(given: Mapping[str, Any]) -> Translation:
    """The fields that OpenRLHF's flags become, those of its main branch (August 2026) and of its releases before 0.10."""
    told = Translation(given)
    fields, take, copy = told.fields, told.take, told.copy
    fields["model.path"] = take("actor.model_name_or_path", "pretrain")
    fields["data.path"] = take("data.prompt_dataset", "prompt_data")
    for name, path in (("model.path", "--actor.model_name_or_path"), ("data.path", "--data.prompt_dataset")):
        if fields[name] is None:
            raise ConfigError(f"pods import openrlhf: {path} is missing; add it")
    fields["data.prompt"] = take("data.input_key", "input_key", default="input")
    fields["data.answer"] = take("data.label_key", "label_key")
    fields["data.chat"] = bool(take("data.apply_chat_template", "apply_chat_template", default=False))
    template = take("data.input_template", "input_template")
    if template:
        fields["data.template"] = str(template).replace("{}", "{prompt}")
    new = int(take("rollout.max_new_tokens", "generate_max_len", default=1024))
    whole = take("data.max_len", "max_len")
    prompt = take("data.prompt_max_len", "prompt_max_len", default=int(whole) - new if whole else 1024)
    fields["data.max_prompt_tokens"], fields["generator.max_tokens"] = int(prompt), new
    tokens = int(take("train.max_tokens_per_gpu", default=0))
    fields["learner.tokens_per_microbatch"] = max(16384, int(prompt) + new, tokens)
    fields["reward"] = [_reward(told)]
    _steps(told)
    copy("actor.adam.lr", "learner.learning_rate", default=take("actor_learning_rate"))
    copy("actor.adam.weight_decay", "learner.weight_decay", default=take("l2"))
    copy("rollout.temperature", "generator.temperature", default=take("temperature"))
    copy("rollout.top_p", "generator.top_p", default=take("top_p"))
    clip = take("actor.eps_clip", "eps_clip", default=0.2)
    bounds = take("actor.eps_clip_low_high", "eps_clip_low_high", default=[clip, clip])
    fields["learner.clip_low"], fields["learner.clip_high"] = bounds
    loss = take("actor.policy_loss_type", "policy_loss_type", default="ppo")
    if loss == "gspo":
        fields["learner.importance"] = "sequence"
    elif loss != "ppo":
        told.left_out.append(
            LeftOut("actor.policy_loss_type", loss, "the losses are learner.loss and learner.objective", True)
        )
    _estimator(told)
    fields["learner.kl.coefficient"] = float(take("algo.kl.init_coef", "init_kl_coef", default=0.01))
    told.drop("algo.kl.estimator", "the KL term is the k3 estimate", unless=(None, "k3"))
    told.drop("algo.kl.use_loss", "the KL term is in the loss here", unless=(None, True, False))
    told.drop("actor.optim", "AdamW is the optimiser", unless=(None, "adam"))
    folder = take("ckpt.output_dir", "save_path")
    take("ckpt.path", "ckpt_path")
    path = Path(str(folder)) if folder else Path("runs") / "openrlhf"
    fields["run.name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._") or "openrlhf"
    fields["run.dir"] = str(path.parent)
    every = take("eval.steps", "eval_steps", default=-1)
    held_out = take("eval.dataset", "eval_dataset")
    if held_out and every > 0:
        fields["data.eval.path"] = held_out
        fields["run.eval.every"] = every
    fields["run.checkpoint.every"] = max(0, int(take("ckpt.save_steps", "save_steps", default=-1)))
    copy("ckpt.max_num", "run.checkpoint.keep", default=take("max_ckpt_num"))
    if take("logger.wandb.key", "use_wandb"):
        fields["run.wandb"] = True  # the key itself is read from WANDB_API_KEY
    if take("logger.tensorboard_dir", "use_tensorboard"):
        fields["run.tensorboard"] = True
    _pools(told)
    _correction(told)
    for name in told.settings:
        if name.startswith("critic."):
            told.drop(name, "there is no critic", matters=False)
    return told.finish(IGNORED)


def _reward(told: Translation) -> dict[str, Any]:
    path = told.take("reward.remote_url", "remote_rm_url")
    model = told.take("reward.model_name_or_path", "reward_pretrain")
    told.drop("reward.normalize_enable", "rewards are normalised in their group", matters=False)
    agent = told.take("train.agent_func_path", "agent_func_path")
    if isinstance(path, str) and path.endswith(".py"):
        return {"name": f"{path}:reward_func"}
    for name, value, text in (
        ("reward.remote_url", path, "a judge is called from a reward function of yours"),
        ("reward.model_name_or_path", model, "rewards are functions here; wrap the model into one"),
        ("train.agent_func_path", agent, "write it as an environment (docs/environments.md)"),
    ):
        if value is not None:
            told.left_out.append(LeftOut(name, value, f"{text}; math_answer stands in its place", True))
    return {"name": "math_answer"}


def _steps(told: Translation) -> None:
    """A rollout batch there is a step here; a train batch is one optimiser step over a part of it."""
    fields, take = told.fields, told.take
    prompts = int(take("rollout.batch_size", "rollout_batch_size", default=1024))
    n = int(take("rollout.n_samples_per_prompt", "n_samples_per_prompt", default=1))
    batch = int(take("train.batch_size", "train_batch_size", default=128))
    fields["learner.prompts_per_step"] = prompts
    fields["learner.updates_per_batch"] = max(1, min(prompts, math.ceil(prompts * n / batch)))
    if n < 2:
        text = f"a group needs several rollouts: generator.rollouts_per_prompt is {GROUP}"
        told.left_out.append(LeftOut("rollout.n_samples_per_prompt", n, text, True))
        n = GROUP
    fields["generator.rollouts_per_prompt"] = fields["selector.keep"] = n
    filters = take("algo.dynamic_filtering_enable", "dynamic_filtering")
    take("algo.dynamic_filtering_range", "dynamic_filtering_reward_range")
    fields["selector.no_signal"] = "replace" if filters else "keep"
    rows, episodes = take("data.max_samples", "max_samples"), int(take("train.num_episodes", "num_episodes", default=1))
    told.drop("train.max_epochs", "a batch is trained once here", unless=(None, 1))
    if rows is not None:
        fields["data.rows"] = int(rows)
    fields["run.epochs"] = episodes


def _estimator(told: Translation) -> None:
    estimator = told.take("algo.advantage.estimator", "advantage_estimator", default="gae")
    told.fields["learner.advantage.normalize"] = ESTIMATORS.get(estimator, True)
    if estimator not in ESTIMATORS:
        text = "advantages are those of a group of rollouts here (GRPO), without a critic"
        told.left_out.append(LeftOut("algo.advantage.estimator", estimator, text, True))


def _pools(told: Translation) -> None:
    fields, take = told.fields, told.take
    fields["learner.workers"] = int(take("actor.num_nodes", "actor_num_nodes", default=1)) * int(
        take("actor.num_gpus_per_node", "actor_num_gpus_per_node", default=1)
    )
    fields["generator.workers"] = int(take("vllm.num_engines", "vllm_num_engines", default=1))
    fields["generator.tensor_parallel"] = int(take("vllm.tensor_parallel_size", "vllm_tensor_parallel_size", default=1))
    stage = take("ds.zero_stage", "zero_stage", default=2)
    fields["learner.zero_stage"] = int(stage)
    take("ds.tensor_parallel_size", "ds_tensor_parallel_size")
    told.drop("ds.ring_attn_size", "a sequence is computed by one rank", unless=(None, 1), matters=False)
    if take("actor.gradient_checkpointing_enable", "gradient_checkpointing"):
        fields["learner.gradient_checkpointing"] = True


def _correction(told: Translation) -> None:
    fields, take = told.fields, told.take
    kind, bounds = take("algo.advantage.is_correction_type"), take("algo.advantage.is_correction_threshold")
    if take("algo.advantage.is_correction_enable", "enable_vllm_is_correction"):
        fields["learner.correction.mode"] = "on"
        if kind == "icepop":
            fields["learner.correction.mask"] = bounds if isinstance(bounds, list) else [0.5, 5.0]
        elif isinstance(bounds, list):
            fields["learner.correction.cap"] = bounds[1]
