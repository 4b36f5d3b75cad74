"""Command lines of verl and OpenRLHF as a run's YAML: their own quick starts, word by word, and what is left out."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from typer.testing import CliRunner

from pods_cluster.client.cli import app
from pods_cluster.client.import_command import imported
from pods_cluster.config import Config, ConfigError, parse_config
from pods_cluster.data.layout import recognise
from pods_cluster.data.source import load_source
from pods_cluster.migrate.command_lines import parse_flags, parse_overrides
from pods_cluster.migrate.translation import Translation

# docs/start/quickstart.rst of verl, January 2026
VERL_QUICK_START = r"""
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
 data.train_files=$DATA/train.parquet \
 data.val_files=$DATA/test.parquet \
 data.train_batch_size=256 \
 data.max_prompt_length=512 \
 data.max_response_length=512 \
 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
 actor_rollout_ref.actor.optim.lr=1e-6 \
 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
 actor_rollout_ref.rollout.name=vllm \
 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
 critic.optim.lr=1e-5 \
 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \
 critic.ppo_micro_batch_size_per_gpu=4 \
 algorithm.kl_ctrl.kl_coef=0.001 \
 trainer.logger=console \
 trainer.val_before_train=False \
 trainer.n_gpus_per_node=1 \
 trainer.nnodes=1 \
 trainer.save_freq=10 \
 trainer.test_freq=10 \
 trainer.total_epochs=15 2>&1 | tee verl_demo.log
"""

# examples/grpo_trainer/run_qwen2-7b.sh of verl, January 2026
VERL_GRPO = r"""
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA/train.parquet \
    data.val_files=$DATA/test.parquet \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='verl_grpo_example_gsm8k' \
    trainer.experiment_name='qwen2_7b_function_rm' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15
"""

# README.md of OpenRLHF, August 2026
OPENRLHF_QUICK_START = r"""
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref.num_nodes 1 \
   --ref.num_gpus_per_node 8 \
   --reward.num_nodes 1 \
   --reward.num_gpus_per_node 8 \
   --critic.num_nodes 1 \
   --critic.num_gpus_per_node 8 \
   --actor.num_nodes 1 \
   --actor.num_gpus_per_node 8 \
   --vllm.num_engines 4 \
   --vllm.tensor_parallel_size 2 \
   --train.colocate_all \
   --vllm.gpu_memory_utilization 0.5 \
   --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
   --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k \
   --ckpt.output_dir /openrlhf/examples/test_scripts/final/llama3-8b-rlhf \
   --ckpt.path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf \
   --ckpt.save_hf \
   --train.batch_size 128 \
   --rollout.batch_size 1024 \
   --train.dynamic_batch_enable \
   --rollout.n_samples_per_prompt 1 \
   --train.max_epochs 1 \
   --prompt_max_len 1024 \
   --data.max_samples 100000 \
   --generate_max_len 1024 \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --actor.adam.lr 5e-7 \
   --critic.adam.lr 9e-6 \
   --algo.kl.init_coef 0.01 \
   --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 \
   --data.input_key context_messages \
   --data.apply_chat_template \
   --reward.normalize_enable \
   --actor.gradient_checkpointing_enable \
   --ds.packing_samples \
   --vllm.sync_backend nccl \
   --vllm.enforce_eager \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --logger.wandb.key {wandb_token}
"""


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """Rows as verl's examples/data_preprocess/gsm8k.py writes them."""
    for split, count in (("train", 2000), ("test", 4)):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f'{n}? output the final answer after "####".'}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(n)},
                "extra_info": {"split": split, "index": n, "answer": f"#### {n}", "question": f"{n}?"},
            }
            for n in range(count)
        ]
        Dataset.from_list(rows).to_parquet(tmp_path / f"{split}.parquet")
    return tmp_path


def words_of(command: str, data: Path | str = "") -> list[str]:
    return shlex.split(command.replace("$DATA", str(data)).replace("\\\n", " "))


def import_of(trainer: str, command: str, data: Path | str = "") -> tuple[Config, Translation]:
    text, told = imported(trainer, words_of(command, data))
    return parse_config(text), told


def matter(told: Translation) -> set[str]:
    return {item.name for item in told.left_out if item.matters}


def test_verls_quick_start_reads_its_parquet_unchanged(gsm8k: Path) -> None:
    config, told = import_of("verl", VERL_QUICK_START, gsm8k)
    assert (config.learner.prompts_per_step, config.learner.updates_per_batch) == (256, 4)
    assert (config.data.max_prompt_tokens, config.generator.max_tokens, config.learner.learning_rate) == (
        512,
        512,
        1e-6,
    )
    assert config.run.steps == 2000 // 256 * 15
    assert (config.run.checkpoint.every, config.run.eval.every) == (10, 10)
    assert (config.generator.gpus_per_worker, config.learner.gpus_per_worker) == (0.5, 0.5), "one card for both pools"
    assert config.generator.engine_options == {"gpu_memory_utilization": 0.4}
    assert config.learner.kl.coefficient == 0, "use_kl_in_reward is off, as is use_kl_loss"
    assert (config.reward[0].name, config.reward[0].options) == ("math_answer", {"where": "hash"})
    assert matter(told) == {"algorithm.adv_estimator", "actor_rollout_ref.rollout.n"}, "PPO with a critic becomes GRPO"
    source = load_source(config.data.path, None, config.data.split)
    layout = recognise(source.rows.column_names, source.rows[7], config.data)
    assert (layout.kind, layout.answer_of(source.rows[7])) == ("verl", "7")
    assert config.data.eval is not None
    assert config.data.eval.path == str(gsm8k / "test.parquet")


def test_verls_grpo_example_carries_over_whole(gsm8k: Path) -> None:
    config, told = import_of("verl", VERL_GRPO, gsm8k)
    assert matter(told) == set()
    assert (config.generator.rollouts_per_prompt, config.selector.keep) == (5, 5)
    assert (config.learner.prompts_per_step, config.learner.updates_per_batch) == (1024, 4)
    assert (config.learner.kl.coefficient, config.learner.loss) == (0.001, "token_mean")
    assert (config.learner.workers, config.generator.workers, config.generator.tensor_parallel) == (4, 2, 2)
    assert config.learner.gradient_checkpointing
    assert not config.learner.offload_optimizer
    assert config.run.wandb
    assert (config.run.dir, config.run.name) == ("runs/verl_grpo_example_gsm8k", "qwen2_7b_function_rm")


def test_openrlhfs_quick_start() -> None:
    config, told = import_of("openrlhf", OPENRLHF_QUICK_START)
    assert (config.model.path, config.data.path) == (
        "OpenRLHF/Llama-3-8b-sft-mixture",
        "OpenRLHF/prompt-collection-v0.1",
    )
    assert (config.data.prompt, config.data.answer, config.data.rows) == ("context_messages", None, 100_000)
    assert (config.learner.prompts_per_step, config.learner.updates_per_batch, config.run.epochs) == (1024, 8, 1)
    assert (config.learner.workers, config.generator.workers, config.generator.tensor_parallel) == (8, 4, 2)
    assert (config.learner.zero_stage, config.learner.learning_rate, config.learner.kl.coefficient) == (3, 5e-7, 0.01)
    assert config.learner.gradient_checkpointing
    assert config.model.dtype == "bfloat16"
    assert config.generator.engine_options == {"gpu_memory_utilization": 0.5, "enforce_eager": True}
    assert (config.run.dir, config.run.name) == ("/openrlhf/examples/test_scripts/final", "llama3-8b-rlhf")
    assert config.run.wandb
    assert matter(told) == {
        "rollout.n_samples_per_prompt",
        "reward.model_name_or_path",
        "algo.advantage.estimator",
    }


def test_a_reward_of_ones_own_and_what_is_not_known() -> None:
    command = """algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.total_training_steps=100
      custom_reward_function.path=my/reward.py +custom_reward_function.name=score actor_rollout_ref.actor.ppo_epochs=2
      actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum trainer.magic=1 data.train_files='[a.parquet,b.parquet]'
      actor_rollout_ref.actor.clip_ratio_high=0.28"""
    config, told = import_of("verl", command)
    assert (config.reward[0].name, config.reward[0].style) == ("my/reward.py:score", "verl")
    assert (config.run.steps, config.learner.clip_low, config.learner.clip_high) == (100, 0.2, 0.28)
    assert matter(told) == {
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.actor.loss_agg_mode",
        "trainer.magic",
    }
    assert (config.data.path, [part.path for part in config.data.mix]) == ("a.parquet", ["b.parquet"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no override was given"),
        (["python3", "-m", "verl.trainer.main_ppo"], "no override was given"),
        (["data.train_batch_size=4", "nonsense"], "'nonsense': is no override of verl"),
        (["data.train_files=[a"], "the value cannot be read"),
    ],
)
def test_words_that_are_no_command_line_of_verl(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_overrides(words)


def test_flags_of_openrlhf() -> None:
    found = parse_flags(["python3", "--a.b", "--c=1e-6", "--d", "1", "2", "--e", "x", "2>&1", "tail"])
    assert found == {"a.b": True, "c": 1e-6, "d": [1, 2], "e": "x"}
    with pytest.raises(ConfigError, match="no flag was given"):
        parse_flags(["python3"])
    with pytest.raises(ConfigError, match=r"--actor\.model_name_or_path is missing"):
        imported("openrlhf", ["--data.input_key", "x"])


def test_the_command_writes_a_file_and_lists_the_rest(gsm8k: Path) -> None:
    file = gsm8k / "run.yaml"
    done = CliRunner().invoke(app, ["import", "verl", "-o", str(file), *words_of(VERL_QUICK_START, gsm8k)])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(file.read_text())["learner"]["prompts_per_step"] == 256
    assert "did not carry over, and changes the run:" in done.output
    assert "  - critic.optim.lr: 1e-05: there is no critic or reward model" in done.output
    again = CliRunner().invoke(app, ["import", "verl", "-o", str(file), "data.train_batch_size=4"])
    assert isinstance(again.exception, ConfigError)
    assert "exists already" in str(again.exception)
    unknown = CliRunner().invoke(app, ["import", "ppo", "a.b=1"])
    assert "it reads verl and openrlhf" in str(unknown.exception)
