"""`pods plan`: what it measures, what it answers from given rates, and the memory of a shared card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen2Config
from typer.testing import CliRunner

from pods_cluster.client.calibrate import calibration_config
from pods_cluster.client.cli import app
from pods_cluster.run.cluster import ClusterError
from tests.run.parts import YAML, loop_config


def test_a_calibration_trains_a_few_steps_in_turn_and_saves_nothing(tmp_path: Path) -> None:
    config = loop_config(
        "staleness=2",
        "selector.settle=waves",
        "selector.waves=2",
        "learner.warmup_steps=3",
        "generator.rollouts_range=[4, 16]",
    )
    short = calibration_config(config, tmp_path, steps=2, groups=3)
    assert (short.staleness, short.selector.settle, short.selector.no_signal) == (0, "off", "keep")
    assert (short.run.steps, short.learner.prompts_per_step, short.learner.warmup_steps) == (2, 3, 2)
    assert short.run.name == "loop-plan"
    assert short.generator.rollouts_per_prompt == config.generator.rollouts_per_prompt
    assert calibration_config(config, tmp_path, steps=2, groups=None).learner.prompts_per_step == 4


def test_the_command_answers_from_given_rates_and_asks_for_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    given = ["--generate-rate", "1000", "--update-rate", "500", "--sync-seconds", "0.5", "--length", "100"]
    result = CliRunner().invoke(app, ["plan", str(path), "staleness=1", "--gpus", "3", "--json", *given])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["now"]["generate_seconds"] == pytest.approx(3.2)
    assert answer["now"]["balanced_rollouts_per_prompt"] == 8
    assert {(split["generators"], split["learners"]) for split in answer["splits"]} == {(1, 2), (2, 1)}
    assert answer["in_flight"] == {"fills_engines": 288, "out_at_most": 64}
    assert answer["memory"] is None
    shown = CliRunner().invoke(app, ["plan", str(path), "staleness=1", "--gpus", "3", *given])
    assert "keeps both pools busy" in shown.output.replace("\n", " ")
    assert "288 rollouts fill the engines" in shown.output.replace("\n", " ")
    missing = CliRunner().invoke(app, ["plan", str(path), "--length", "100"])
    assert "--generate-rate: left out" in str(missing.exception)
    nothing = CliRunner().invoke(app, ["plan", str(path), "--run", str(tmp_path)])
    assert "no config.yaml" in str(nothing.exception)


def test_the_command_plans_the_memory_of_a_shared_card(tmp_path: Path) -> None:
    model = tmp_path / "model"
    Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ).save_pretrained(model)
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    shared = [f"model.path={model}", "learner.gpus_per_worker=0.5", "generator.gpus_per_worker=0.5", "staleness=1"]
    given = ["--generate-rate", "1000", "--update-rate", "500", "--sync-seconds", "0.5", "--length", "100"]
    command = ["plan", str(path), *shared, *given, "--gpus", "1", "--card-gb", "80"]
    result = CliRunner().invoke(app, [*command, "--learner-gb", "35", "--json"])
    assert result.exit_code == 0, result.output
    memory = json.loads(result.stdout)["memory"]
    # keys and values of 2 layers, 2 heads of 16 numbers, in bfloat16; 256 rollouts of 8 + 8 tokens
    assert memory["cache_bytes"] == 2 * 2 * 2 * 16 * 2 * 256 * 16
    assert memory["weights_bytes"] == 2 * (
        1000 * 64 + 2 * (64 * 64 * 2 + 64 + 2 * (32 * 64 + 32) + 3 * 64 * 128 + 2 * 64) + 64
    )
    assert memory["left_bytes"] == 80e9 - 35e9 - memory["cache_bytes"] - memory["weights_bytes"]
    shown = CliRunner().invoke(app, [*command, "--learner-gb", "35"])
    assert "the learner's peak 35.0 GB" in shown.output.replace("\n", " ")
    alone = ["plan", str(path), *shared, "--card-gb", "80", "--learner-gb", "35"]
    result = CliRunner().invoke(app, [*alone, "--json"])
    assert json.loads(result.stdout) == {"in_flight": {"fills_engines": 288, "out_at_most": 64}, "memory": memory}
    shown = CliRunner().invoke(app, alone)
    assert "the learner's peak 35.0 GB" in shown.output.replace("\n", " ")
    for options, told in (
        ([], "--learner-gb: left out"),
        (["--learner-gb", "0"], "--learner-gb: 0 must be"),
        (["learner.gpus_per_worker=1", "--learner-gb", "35", "--gpus", "2"], "no card is shared"),
    ):
        refused = CliRunner().invoke(app, [*command, *options])
        assert refused.exit_code != 0
        assert told in f"{refused.output} {refused.exception}"


def test_a_cluster_that_is_too_small_names_the_ways_that_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(*_: object, **__: object) -> None:
        raise ClusterError("the pools need 1 GPU, the cluster has 0")

    monkeypatch.setattr("pods_cluster.client.calibrate.calibrate", too_small)
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    refused = CliRunner().invoke(app, ["plan", str(path)])
    assert refused.exit_code != 0
    told = str(refused.exception)
    assert "the pools need 1 GPU, the cluster has 0; or measure nothing here: give --generate-rate" in told
    assert "--run of a run elsewhere, or --card-gb and --learner-gb" in told
