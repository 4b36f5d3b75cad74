"""Settings that cannot hold together, or at all, are refused with the field, its value and the fix."""

from __future__ import annotations

import re

import pytest

from pods_cluster.config import ConfigError, parse_config

BASE = """
model: {path: some/model}
data: {path: rows.jsonl}
reward: [{name: math_answer}]
run: {name: test}
"""


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(BASE, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "field", "value", "fix"),
    [
        (["selector.keep=65"], "selector.keep", "65", "lower selector.keep or raise generator.rollouts_per_prompt"),
        (["selector.keep=1"], "selector.keep", "1", "greater than or equal to 2"),
        (["generator.rollouts_per_prompt=1"], "generator.rollouts_per_prompt", "1", "greater than or equal to 2"),
        (["selector.min_valid=17"], "selector.min_valid", "17", "lower it or leave it out"),
        (["selector.min_valid=1"], "selector.min_valid", "1", "greater than or equal to 2"),
        (["selector.max_replacements=-1"], "selector.max_replacements", "-1", "greater than or equal to 0"),
        (["learner.tokens_per_microbatch=1000"], "learner.tokens_per_microbatch", "1000", "raise it to 1024 or more"),
        (["learner.tokens_per_microbatch=-5"], "learner.tokens_per_microbatch", "-5", "greater than or equal to 1"),
        (
            ["learner.workers=300"],
            "learner.prompts_per_step x selector.keep",
            "256",
            "raise prompts_per_step or lower the others",
        ),
        (["learner.updates_per_batch=17"], "learner.updates_per_batch", "17", "lower one or raise the other"),
        (["learner.warmup_steps=101"], "learner.warmup_steps", "101", "lower it"),
        (["learner.advantage.scope=batch"], "learner.advantage.scope", "'batch'", "'kept' or 'group'"),
        (["learner.zero_stage=0"], "learner.zero_stage", "0", "1, 2 or 3"),
        (["learner.betas=[0.9, 1.0]"], "learner.betas", "1.0", "must both lie in [0, 1)"),
        (["learner.betas=[-0.1, 0.9]"], "learner.betas", "-0.1", "must both lie in [0, 1)"),
        (["learner.clip_low=1"], "learner.clip_low", "1", "less than 1"),
        (["learner.learning_rate=0"], "learner.learning_rate", "0", "greater than 0"),
        (
            ["learner.kl.reference=other"],
            "learner.kl.reference",
            "'other'",
            "set a coefficient or leave the reference out",
        ),
        (["learner.kl.coefficient=-1"], "learner.kl.coefficient", "-1", "greater than or equal to 0"),
        (["learner.correction.mask=[1.5, 2]"], "learner.correction.mask", "[1.5, 2.0]", "must hold 1 inside"),
        (["learner.correction.cap=0"], "learner.correction.cap", "0", "greater than 0"),
        (
            ["learner.lora.dropout=0.2", "learner.updates_per_batch=2"],
            "learner.lora.dropout",
            "0.2",
            "set dropout: 0 or updates_per_batch: 1",
        ),
        (["learner.lora.target_modules=5"], "learner.lora.target_modules", "5", "valid tuple"),
        (
            ["learner.lora={send: adapter}", "generator.engine=paced"],
            "learner.lora.send",
            "adapter",
            "use send: merged",
        ),
        (
            ["learner.lora={send: adapter}", "generator.engine_options={transfer: native}"],
            "learner.lora.send",
            "engine_options.transfer: native",
            "use send: merged",
        ),
        (
            ["generator.engine=transformers", "generator.engine_options={gpu_memory_utilization: 0.9}"],
            "generator.engine_options.gpu_memory_utilization",
            "0.9",
            "it has device, kv_cache_gb, prefill_tokens",
        ),
        (
            ["generator.engine_options={max_num_seqs: 4}"],
            "generator.engine_options.max_num_seqs",
            "4",
            "set generator.max_sequences",
        ),
        (
            ["generator.engine_options={logprobs_mode: raw_logits}"],
            "generator.engine_options.logprobs_mode",
            "raw_logits",
            "at the sampling temperature",
        ),
        (
            ["generator.engine_options={logprobs: always}"],
            "generator.engine_options.logprobs",
            "always",
            "one of engine, rescore, none",
        ),
        (
            ["generator.engine_options={process: 'yes'}"],
            "generator.engine_options.process",
            "yes",
            "one of True, False",
        ),
        (
            ["generator.engine_options={loading: fast}"],
            "generator.engine_options.loading",
            "fast",
            "one of auto, reload",
        ),
        (["generator.engine_options={kv_cache_gb: 0}"], "generator.engine_options.kv_cache_gb", "0", "above 0"),
        (
            ["generator.engine_options={kv_cache_gb: 1, kv_cache_memory_bytes: 9}"],
            "generator.engine_options",
            "kv_cache_memory_bytes",
            "leave one out",
        ),
        (
            ["generator.engine_options={logprobs: rescore}", "generator.temperature=0.7"],
            "generator.engine_options.logprobs",
            "0.7",
            "use engine or none",
        ),
        (
            ["learner.gpus_per_worker=0.5", "learner.workers=2"],
            "learner.gpus_per_worker",
            "0.5",
            "use more than half a card",
        ),
        (
            ["generator.gpus_per_worker=1", "generator.tensor_parallel=2"],
            "generator.gpus_per_worker",
            "1",
            "leave it out or set tensor_parallel: 1",
        ),
        (
            ["generator.gpus_per_worker=0.5", "generator.engine_options={transfer: native}"],
            "generator.engine_options.transfer",
            "'native'",
            "use transfer: pods, or whole cards",
        ),
        (
            ["generator.gpus_per_worker=0.5", "weights={transport: nccl, relay: off}"],
            "weights.relay",
            "'off'",
            "use relay: auto, or transport: gloo",
        ),
        (["weights={transport: nccl, relay: node}"], "weights.relay", "'node'", "use relay: auto, or transport: gloo"),
        (["data.streaming=true", "data.mix=[{path: b.jsonl}]"], "data.mix", "streaming", "set streaming: false"),
        (["run.max_seconds=0"], "run.max_seconds", "0", "greater than 0"),
        (["run.eval.every=5"], "run.eval.every", "5", "add data.eval (path or split), or set run.eval.every: 0"),
        (
            ["run.eval.minutes=0.5"],
            "run.eval.minutes",
            "0.5",
            "add data.eval (path or split), or set run.eval.minutes: 0",
        ),
        (
            ["data.revisit_target=0.25"],
            "data.revisit_target",
            "0.25",
            "set data.revisit: 0.5, or leave revisit_target out",
        ),
        (["run.steps=0"], "run.steps", "0", "greater than or equal to 1"),
        (["run.seed=-1"], "run.seed", "-1", "greater than or equal to 0"),
        (["run.name=a/b"], "run.name", "'a/b'", "use letters, digits"),
        (["run.name=.."], "run.name", "'..'", "use letters, digits"),
        (["staleness=-1"], "staleness", "-1", "greater than or equal to 0"),
        (["generator.top_p=0.9", "learner.correction.mode=off"], "generator.top_p", "0.9", "use auto or leave it out"),
        (["generator.top_k=50", "learner.correction.mode=off"], "generator.top_k", "50", "use auto or leave it out"),
        (["generator.min_p=0.1", "learner.correction.mode=off"], "generator.min_p", "0.1", "use auto or leave it out"),
        (
            ["generator.top_p=0.9", "generator.engine=vllm", "generator.engine_options={logprobs: none}"],
            "generator.top_p",
            "0.9",
            "use logprobs: engine or leave it out",
        ),
        (["generator.top_p=0.9", "generator.engine=paced"], "generator.top_p", "0.9", "leave it out"),
        (["generator.top_p=0"], "generator.top_p", "0", "greater than 0"),
        (["generator.top_k=0"], "generator.top_k", "0", "or -1 for all"),
        (["generator.min_p=1"], "generator.min_p", "1", "less than 1"),
        (["generator.stop_strings=[a, '']"], "generator.stop_strings", "['a', '']", "leave it out"),
        (["generator.temperature=0"], "generator.temperature", "0", "greater than 0"),
        (
            ["generator.engine=transformers", "generator.tensor_parallel=2"],
            "generator.tensor_parallel",
            "2",
            "needs engine: vllm",
        ),
        (
            ["selector.settle=abort", "selector.rule=random"],
            "selector.settle",
            "abort",
            "use rule: max_variance or settle: off",
        ),
        (
            ["selector.settle=waves", "learner.advantage.scope=group"],
            "selector.settle",
            "waves",
            "use scope: kept or settle: off",
        ),
        (
            ["selector.settle=waves", "selector.waves=65"],
            "selector.waves",
            "65",
            "lower selector.waves to 64 or less",
        ),
        (["data.template='{x}'"], "data.template", "'{x}'", "add it where the row's prompt goes"),
        (["data.max_prompt_tokens=0"], "data.max_prompt_tokens", "0", "greater than or equal to 1"),
        (["data.rows=0"], "data.rows", "0", "greater than or equal to 1"),
        (["data.path=''"], "data.path", "''", "at least 1 character"),
        (["reward=[]"], "reward", "[]", "at least 1 item"),
        (["reward.0.range=[1, 0]"], "reward.0.range", "[1.0, 0.0]", "swap or widen it"),
        (["reward.0.timeout=0"], "reward.0.timeout", "0", "greater than 0"),
        (["reward.0.style=other"], "reward.0.style", "'other'", "'auto', 'trl' or 'verl'"),
    ],
    ids=lambda value: value[0].replace("=", ":") if isinstance(value, list) else "",
)
def test_refused(overrides: list[str], field: str, value: str, fix: str) -> None:
    told = problem(*overrides)
    assert re.search(rf"(?m)^  - {re.escape(field)}\b", told), told
    assert value in told
    assert fix in told


def test_limits_themselves_are_allowed() -> None:
    config = parse_config(
        BASE,
        [
            "generator.rollouts_per_prompt=2",
            "selector.keep=2",
            "selector.min_valid=2",
            "selector.settle=waves",
            "selector.waves=2",
            "learner.tokens_per_microbatch=1024",
            "learner.prompts_per_step=4",
            "learner.updates_per_batch=4",
            "learner.workers=2",
            "learner.warmup_steps=100",
        ],
    )
    assert config.selector.keep == config.generator.rollouts_per_prompt == 2


def test_without_held_out_rows_there_is_no_evaluation() -> None:
    assert parse_config(BASE).run.eval.every == 0
    assert parse_config(BASE, ["run.eval.samples=4"]).run.eval.every == 0
    assert parse_config(BASE, ["data.eval.split=test"]).run.eval.every == 10


@pytest.mark.parametrize(
    ("overrides", "adapter"),
    [
        ([], False),
        (["learner.lora={}"], True),
        (["learner.lora={}", "generator.engine=transformers"], True),
        (["learner.lora={send: merged}"], False),
        (["learner.lora={}", "generator.engine=paced"], False),
        (["learner.lora={}", "generator.engine_options={transfer: native}"], False),
        (["learner.lora={send: adapter}"], True),
    ],
)
def test_the_adapter_alone_is_sent_where_the_engine_can_take_it(overrides: list[str], adapter: bool) -> None:
    assert parse_config(BASE, overrides).sends_adapter is adapter
