"""TRL's scripts: what `GRPOTrainer` of `pods_cluster.trl` makes of them, before anything is started."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig

from pods_cluster.config import Config, ConfigError
from pods_cluster.environments import ToolEnvironment
from pods_cluster.migrate.trl_fields import DEFAULTS
from pods_cluster.trl import GRPOConfig, GRPOTrainer
from pods_cluster.trl.config import given_settings
from pods_cluster.trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

CHAT = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}?"}], "solution": "$1$"} for n in range(100)])
TEXT = Dataset.from_list([{"prompt": f"{n}?", "solution": "1"} for n in range(100)])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and inputs go into a folder of the test; there is no card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for name in ("RAY_ADDRESS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def config_of(dataset: Dataset = CHAT, config: Any = None, **settings: Any) -> Config:
    return GRPOTrainer("some/model", accuracy_reward, GRPOConfig(**settings), dataset, config=config).config


def test_the_first_example_of_trl() -> None:
    """README.md and docs/source/grpo_trainer.md of TRL; the dataset is one of its form."""
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=CHAT,
    )
    config = trainer.config
    assert trainer.left_out == []
    assert (config.model.path, config.run.name) == ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct-GRPO")
    assert (config.generator.rollouts_per_prompt, config.selector.keep, config.learner.prompts_per_step) == (8, 8, 1)
    assert config.run.steps == 300, "three epochs of a hundred prompts"
    assert (config.learner.learning_rate, config.learner.schedule, config.run.seed) == (1e-6, "linear", 42)
    assert (config.learner.loss, config.generator.max_tokens) == ("token_mean", 512)
    assert config.data.answer is None
    assert config.data.chat
    (reward,) = config.reward
    assert (reward.name, reward.none, reward.timeout) == ("pods_cluster.trl.rewards:accuracy_reward", "skip", 60.0)


def test_every_setting_that_is_read_becomes_its_field() -> None:
    config = config_of(
        TEXT,
        output_dir="out/my run",
        learning_rate=1e-5,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        max_completion_length=64,
        max_prompt_length=128,
        max_steps=50,
        temperature=0.9,
        beta=0.04,
        epsilon=0.1,
        epsilon_high=0.3,
        loss_type="dr_grpo",
        importance_sampling_level="sequence",
        mask_truncated_completions=True,
        chat_template_kwargs={"enable_thinking": False},
        scale_rewards=False,
        bf16=False,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        optim="adamw_torch_fused",
        seed=7,
        save_steps=0.2,
        save_total_limit=2,
        shuffle_dataset=False,
        report_to=["wandb"],
        push_to_hub=True,
        hub_model_id="me/model",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float16", "attn_implementation": "eager"},
    )
    assert (config.run.dir, config.run.name) == ("out", "my-run")
    assert (config.learner.prompts_per_step, config.learner.updates_per_batch) == (8, 1)
    assert (config.generator.temperature, config.generator.max_tokens, config.data.max_prompt_tokens) == (0.9, 64, 128)
    learner = config.learner
    assert (learner.kl.coefficient, learner.clip_low, learner.clip_high, learner.loss) == (0.04, 0.1, 0.3, "dr_grpo")
    assert (learner.schedule, learner.warmup_steps, learner.weight_decay, learner.betas) == (
        "cosine",
        5,
        0.1,
        (0.9, 0.95),
    )
    assert (learner.max_grad_norm, learner.optimizer, learner.gradient_checkpointing) == (0.5, "adamw_fused", False)
    assert not learner.advantage.normalize
    assert (learner.importance, learner.mask_truncated) == ("sequence", True)
    assert config.model.chat_template_kwargs == {"enable_thinking": False}
    assert (config.model.dtype, config.model.attention) == ("float16", "eager")
    assert (config.run.steps, config.run.seed, config.run.wandb, config.data.shuffle) == (50, 7, True, False)
    assert (config.run.push_to_hub, config.run.hub_private) == ("me/model", True)
    assert (config.run.checkpoint.every, config.run.checkpoint.keep) == (10, 2)
    assert not config.data.chat, "TRL gives plain prompts to the model as they are"


def test_a_batch_that_is_generated_at_once_and_trained_in_parts() -> None:
    config = config_of(num_generations=4, per_device_train_batch_size=8, steps_per_generation=4)
    assert (config.learner.prompts_per_step, config.learner.updates_per_batch) == (8, 4)
    with pytest.raises(ConfigError, match="num_generations: 8 does not divide the 12 completions"):
        config_of(num_generations=8, per_device_train_batch_size=12)


def test_cispo_bounds_the_ratio_itself() -> None:
    learner = config_of(loss_type="cispo", epsilon_high=5.0).learner
    assert (learner.objective, learner.loss, learner.clip_high) == ("cispo", "token_mean", 4.0)


def test_cuts_of_the_distribution_and_stop_strings() -> None:
    generator = config_of(
        top_p=0.9, top_k=50, min_p=0.01, generation_kwargs={"stop": ["</answer>"], "include_stop_str_in_output": True}
    ).generator
    assert (generator.top_p, generator.top_k, generator.min_p) == (0.9, 50, 0.01)
    assert (generator.stop_strings, generator.include_stop_str_in_output) == (["</answer>"], True)
    generator = config_of(generation_kwargs={"stop": "END", "stop_token_ids": [5]}).generator
    assert (generator.stop_strings, generator.stop_tokens) == (["END"], [5])


def test_pods_is_one_setting_more() -> None:
    config = config_of(
        num_generations=16, per_device_train_batch_size=16, config={"selector": {"keep": 4}, "run.steps": 7}
    )
    assert (config.generator.rollouts_per_prompt, config.selector.keep, config.run.steps) == (16, 4, 7)


def test_what_has_no_part_is_told_and_what_changes_the_run_is_refused() -> None:
    with pytest.warns(UserWarning, match=r"2 settings without a part in a run\n  - logging_steps: 5: .*metrics"):
        config_of(logging_steps=5, dataloader_num_workers=4)
    with pytest.raises(ConfigError) as refused:
        config_of(loss_type="sapo", num_iterations=4, delta=1.5, repetition_penalty=1.0, generation_kwargs={"x": 1})
    text = str(refused.value)
    assert text.startswith("GRPOConfig: 4 problems")
    assert "loss_type: 'sapo': learner.loss has no such value" in text
    assert "num_iterations: 4: a batch is trained once here" in text
    with pytest.raises(ConfigError, match=r"generator\.top_p: 0\.9 cuts the distribution"):
        config_of(top_p=0.9, vllm_importance_sampling_correction=False)
    with pytest.raises(TypeError, match="no setting 'num_generation'; did you mean 'num_generations'"):
        GRPOConfig(num_generation=4)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ({"reward_funcs": "org/reward-model"}, r"reward_funcs\.0: 'org/reward-model' is a model"),
        ({"train_dataset": None}, "train_dataset: missing"),
        ({"train_dataset": "trl-lib/DeepMath-103K"}, "train_dataset: a text"),
        ({"rollout_func": print}, "rollout_func: has no counterpart here"),
        ({"callbacks": [3]}, "callbacks: 3 is neither a function"),
        ({"peft_config": SimpleNamespace(peft_type="IA3")}, "peft_config: IA3 has no counterpart"),
        ({"args": GRPOConfig(reward_weights=[1.0, 2.0])}, "reward_weights: 2 weights for 1 reward_funcs"),
    ],
)
def test_arguments_that_cannot_be_used(argument: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        GRPOTrainer("some/model", **{"reward_funcs": accuracy_reward, "train_dataset": CHAT, **argument})


def test_a_script_under_a_launcher_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="WORLD_SIZE: 8 processes were launched, and each would start a run"):
        config_of()


def test_adapters_weights_and_callbacks() -> None:
    calls: list[int] = []

    class Stops:
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            calls.append(logs["step"])
            control.should_training_stop = state.global_step >= 2

    trainer = GRPOTrainer(
        "some/model",
        [accuracy_reward, think_format_reward],
        GRPOConfig(reward_weights=[1.0, 0.5]),
        CHAT,
        callbacks=[Stops()],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj"]),
    )
    assert [reward.weight for reward in trainer.config.reward] == [1.0, 0.5]
    lora = trainer.config.learner.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16.0, ("k_proj", "q_proj"))
    (callback,) = trainer._callbacks
    callback({"step": 1})
    with pytest.raises(StopIteration):
        callback({"step": 2})
    assert calls == [1, 2]
    with pytest.raises(RuntimeError, match="call train"):
        trainer.save_model("somewhere")


def test_an_object_of_trl_is_read_by_what_differs_from_its_defaults() -> None:
    @dataclasses.dataclass
    class Theirs:
        """Fields and defaults as TRL and transformers have them, and what they fill in when one is made."""

        output_dir: str | None = None
        learning_rate: float = 1e-6
        num_generations: int = 8
        per_device_train_batch_size: int = 8
        gradient_accumulation_steps: int = 1
        logging_steps: float = 10
        bf16: bool | None = None
        beta: float = 0.0
        steps_per_generation: int | None = None
        generation_batch_size: int | None = None
        report_to: list[str] = dataclasses.field(default_factory=list)

        def __post_init__(self) -> None:
            self.bf16 = True
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = self.per_device_train_batch_size * self.steps_per_generation

    assert given_settings(Theirs()) == {}
    given = given_settings(
        Theirs(output_dir="out", beta=0.1, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    )
    assert given == {
        "output_dir": "out",
        "beta": 0.1,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = GRPOTrainer("some/model", accuracy_reward, Theirs(beta=0.1, steps_per_generation=4), CHAT).config
    assert (config.learner.kl.coefficient, config.learner.prompts_per_step, config.learner.updates_per_batch) == (
        0.1,
        4,
        4,
    )
    with pytest.raises(TypeError, match="is no GRPOConfig"):
        given_settings(3)
    assert GRPOConfig(beta=0.1).learning_rate == DEFAULTS["learning_rate"]
    assert GRPOConfig().top_p is None


def test_a_second_run_of_a_script_gets_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs" / "model-GRPO").mkdir(parents=True)
    assert config_of().run.name == "model-GRPO-2"


def test_rewards_of_trl() -> None:
    boxed = [[{"role": "assistant", "content": text}] for text in (r"so \boxed{\frac{1}{3}}", r"\boxed{2}", "none")]
    assert accuracy_reward(boxed, [r"\frac{1}{3}", "3", None]) == [1.0, 0.0, None]
    reasoned = [r"<think>\boxed{1}</think> it is \boxed{2}", r"<think>\boxed{2}"]
    assert reasoning_accuracy_reward(reasoned, ["2", "2"]) == [1.0, 0.0]
    assert think_format_reward(["<think>a</think>b", "a", "<think>a<think>b</think>"]) == [1.0, 0.0, 0.0]
    assert get_soft_overlong_punishment(10, 4)(completion_ids=[[0] * 6, [0] * 8, [0] * 12]) == [0.0, -0.5, -1.0]


def test_tools_and_environments_are_taken() -> None:
    args = GRPOConfig(max_tool_calling_iterations=3)
    config = GRPOTrainer("some/model", accuracy_reward, args, train_dataset=CHAT, tools=[accuracy_reward]).config
    assert config.environment is not None
    assert config.environment.name == "pods_cluster.environments:ToolEnvironment"
    assert config.environment.code
    assert config.environment.max_turns == 4
    given = {"environment": {"name": ToolEnvironment, "max_turns": 3}}
    config = GRPOTrainer("some/model", accuracy_reward, train_dataset=CHAT, config=given).config
    assert config.environment is not None
    assert config.environment.name == "pods_cluster.environments.tool_environment:ToolEnvironment"
    assert (config.environment.code, config.environment.max_turns) == (None, 3)
