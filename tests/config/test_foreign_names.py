"""Names that users of TRL, verl and OpenRLHF type are answered with the field that means the same here."""

from __future__ import annotations

import pytest

from pods_cluster.config import ConfigError, parse_config
from pods_cluster.config.foreign_names import FOREIGN, SECTIONS, VALUES
from pods_cluster.config.problems import field_paths
from pods_cluster.wording import counted

BASE = """
model: {path: some/model}
data: {path: rows.jsonl}
reward: [{name: math_answer}]
run: {name: test}
"""


def problems(*overrides: str, text: str = BASE) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_config(text, overrides)
    head, *lines = str(error.value).splitlines()
    assert head == f"configuration: {counted(len(lines), 'problem')}"
    return [line.removeprefix("  - ") for line in lines]


def test_every_name_leads_to_a_field_that_is_there() -> None:
    options = "generator.engine_options."
    there = {path for path in (field.path for field in FOREIGN.values()) if not path.startswith(options)}
    assert there <= set(field_paths())
    assert not set(FOREIGN) & set(field_paths()), "our own names at the top: they would never be looked up"


def test_every_value_is_one_of_its_field() -> None:
    for path, values in VALUES.items():
        assert path in field_paths()
        for foreign, own in values.items():
            told = [text for text in _said(f"{path}={own}") if text.startswith(f"{path}: ")]
            assert told == [], "a value that the field itself refuses"
            if foreign != own:
                assert f"did you mean {own}?" in problems(f"{path}={foreign}")[0]


def _said(override: str) -> list[str]:
    try:
        parse_config(BASE, [override])
    except ConfigError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("num_generations=8", "(value 8); here it is generator.rollouts_per_prompt: set generator.rollouts_per_prompt: 8"),
        ("generator.n_samples_per_prompt=8", "set generator.rollouts_per_prompt: 8"),
        ("actor_rollout_ref.rollout.n=8", "set generator.rollouts_per_prompt: 8"),
        ("beta=0.04", "set learner.kl.coefficient: 0.04"),
        ("learner.init_kl_coef=0.01", "set learner.kl.coefficient: 0.01"),
        ("learner.lr=1e-6", "set learner.learning_rate: 1e-06"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "set learner.learning_rate: 1e-06"),
        ("loss_type=dapo", "set learner.loss: token_mean"),
        ("learner.loss_type=grpo", "set learner.loss: sequence_mean"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "set learner.loss: dr_grpo"),
        ("loss_type=sapo", "here it is learner.loss"),
        ("max_completion_length=1024", "set generator.max_tokens: 1024"),
        ("data.max_response_length=1024", "set generator.max_tokens: 1024"),
        ("generate_max_len=1024", "set generator.max_tokens: 1024"),
        ("per_device_train_batch_size=8", "here it is learner.tokens_per_microbatch: micro-batches are filled by tokens"),
        ("learner.micro_rollout_batch_size=8", "here it is learner.tokens_per_microbatch"),
        ("rollout_batch_size=128", "here it is learner.prompts_per_step"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "here it is learner.updates_per_batch"),
        ("num_train_epochs=3", "set run.epochs: 3"),
        ("reward_funcs=[a]", "here it is reward: a list"),
        ("trainer.save_freq=20", "set run.checkpoint.every: 20"),
        ("model.torch_dtype=bf16", "set model.dtype: bfloat16"),
        ("gpu_memory_utilization=0.8", "set generator.engine_options.gpu_memory_utilization: 0.8"),
        ("learning_rate=1e-6", "it belongs to learner: write learner.learning_rate"),
        ("run.zero_stage=2", "it belongs to learner: write learner.zero_stage"),
        ("run.max_tokens=5", "it belongs to generator or run.eval: write generator.max_tokens or run.eval.max_tokens"),
    ],
)  # fmt: skip
def test_what_is_typed_is_answered(override: str, told: str) -> None:
    (line,) = problems(override)
    assert line.startswith(f"{override.partition('=')[0]}: unknown field (value ")
    assert told in line


def test_a_whole_section_of_another_trainer() -> None:
    text = BASE + "actor_rollout_ref: {rollout: {n: 8, name: vllm}, actor: {optim: {lr: 1e-6}, clip_ratio: 0.2}}\n"
    assert [line.partition(":")[0] for line in problems(text=text)] == [
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.clip_ratio",
    ]
    assert "known here: model, data" in problems(text=BASE + "trainer: {zzz: 1}\n")[0]
    assert "optim" in SECTIONS


def test_rules_between_fields_are_told_beside_refused_fields() -> None:
    lines = problems("learner.zero_stage=9", "selector.keep=65", "learner.warmup_steps=101", "generator.top_k=0",
                     "generator.stop_strings=['']", "run.nmae=x", "nonsense")  # fmt: skip
    starts = ["'nonsense'", "learner.zero_stage: 9", "run.nmae", "generator.top_k: 0", "generator.stop_strings: ['']"]
    starts += ["selector.keep: 65", "learner.warmup_steps: 101"]
    assert len(lines) == len(starts)
    for start in starts:
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.parametrize(
    "overrides",
    [
        ["generator.max_tokens=many", "learner.tokens_per_microbatch=1000"],  # 1000 may be enough for what was meant
        ["num_generations=128", "selector.keep=100"],
        ["generator.rollouts_per_prompt=many", "selector.keep=100"],
        ["run.steps=-1", "learner.warmup_steps=101"],
    ],
)
def test_a_rule_that_hangs_on_a_refused_field_waits_for_it(overrides: list[str]) -> None:
    assert len(problems(*overrides)) == 1


def test_missing_sections_do_not_hide_the_rest() -> None:
    lines = problems("selector.keep=65", text="reward: [{name: a}, {name: a}]\n")
    assert [line.partition(":")[0] for line in lines] == ["model", "data", "run", "reward.1.name", "selector.keep"]
