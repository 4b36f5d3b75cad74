"""A sweep's file: arms, seeds and grids become runs; all problems of all runs are told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods_cluster.config import ConfigError
from pods_cluster.config.sweep import load_sweep

BASE = """
model: {path: model}
data: {path: rows.jsonl, eval: {path: rows.jsonl}}
reward: [{name: exact_match}]
generator: {engine: transformers, rollouts_per_prompt: 16}
selector: {keep: 4, no_signal: drop}
learner: {prompts_per_step: 8}
run: {name: base, dir: runs, steps: 10}
"""


def sweep_file(folder: Path, text: str) -> Path:
    (folder / "base.yaml").write_text(BASE)
    path = folder / "sweep.yaml"
    path.write_text(f"base: base.yaml\nname: s\n{text}")
    return path


def test_three_arms_make_and_train_what_the_paper_says(tmp_path: Path) -> None:
    found = load_sweep(sweep_file(tmp_path, "seeds: 2\nthree_arms: {n: 64, m: 16}\noverrides: {run.steps: 5}\n"))
    sizes = {
        arm: (runs[0].config.generator.rollouts_per_prompt, runs[0].config.selector.keep)
        for arm, runs in found.arms.items()
    }
    assert sizes == {"grpo": (16, 16), "grpo-ga": (64, 64), "grpo-pods": (64, 16)}
    assert found.config.baseline_arm == "grpo-ga"
    for runs in found.arms.values():
        assert [run.seed for run in runs] == [run.config.run.seed for run in runs] == [0, 1]
        for run in runs:
            assert run.config.learner.prompts_per_step == 8
            assert run.config.run.steps == 5
            assert run.config.selector.min_valid == 16
            assert run.folder == Path("runs/s") / f"s-{run.arm}-s{run.seed}"
    # seed by seed: a sweep that is cut short has whole seeds
    assert [run.seed for run in found.runs] == [0, 0, 0, 1, 1, 1]


def test_a_target_and_a_gain_are_one_too_many(tmp_path: Path) -> None:
    assert load_sweep(sweep_file(tmp_path, "three_arms: {n: 8, m: 4}\ngain: 0.03\n")).config.gain == 0.03
    with pytest.raises(ConfigError, match=r"target: 0.4 and gain: 0.03 both say what is to be reached; leave one out"):
        load_sweep(sweep_file(tmp_path, "three_arms: {n: 8, m: 4}\ntarget: 0.4\ngain: 0.03\n"))


def test_a_grid_is_crossed_with_the_arms(tmp_path: Path) -> None:
    text = """
arms: {pods: {}, none: {selector: {rule: random}}}
grid: {generator.rollouts_per_prompt: [8, 32], learner.learning_rate: [1e-4]}
"""
    found = load_sweep(sweep_file(tmp_path, text), ["run.steps=3"])
    assert list(found.arms) == [
        f"{arm}-rollouts_per_prompt{n}-learning_rate0.0001" for arm in ("pods", "none") for n in (8, 32)
    ]
    assert [run.config.selector.rule for run in found.runs] == ["max_variance"] * 2 + ["random"] * 2
    assert {run.config.run.steps for run in found.runs} == {3}


def test_the_problems_of_all_runs_are_told_at_once(tmp_path: Path) -> None:
    text = "seeds: 3\narms: {a: {selector.keep: 99}, b: {learner.rate: 1}, c: {}}\noverrides: {run.stepz: 1}\n"
    with pytest.raises(ConfigError) as error:
        load_sweep(sweep_file(tmp_path, text))
    lines = str(error.value).splitlines()
    assert lines[0].endswith("3 problems")
    assert any("run.stepz: unknown field" in line and line.endswith("(all arms)") for line in lines)
    assert any("selector.keep: 99 rollouts cannot be kept" in line and line.endswith("(arm a)") for line in lines)
    assert any("learner.rate: unknown field" in line and line.endswith("(arm b)") for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a sweep needs arms: give three_arms, arms or grid"),
        ("arms: {a: {}}\nbaseline: b\n", "baseline: 'b' is none of the arms a"),
        ("arms: {a: {}}\nseeds: 0\n", "seeds: 0 seeds make no run"),
        ("arms: {a: {}}\nseeds: [1, 1]\n", "names the seed 1 twice"),
        ("arms: {a b: {}}\n", "'a b' cannot name a folder"),
        ("arms: {a: {}}\nparallel: 0\n", "parallel: 0 runs at once make nothing"),
        ("arms: {a: {}}\nparalel: 2\n", "paralel: unknown field (value 2); known here: base, name"),
        ("three_arms: {n: 4, m: 4}\n", "m: 4 must be below n: 4"),
        ("grid: {selector.keep: []}\n", "grid: 'selector.keep' has no values"),
    ],
)
def test_a_wrong_file_is_refused_with_the_fix(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_sweep(sweep_file(tmp_path, text))
    assert message in str(error.value)


def test_a_base_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("base: nowhere.yaml\nname: s\narms: {a: {}, b: {}}\n")
    with pytest.raises(ConfigError, match=r"1 problem\n.*nowhere.yaml: cannot be read"):
        load_sweep(path)


def test_an_arm_of_three_may_have_settings_on_top_and_some_may_be_left_for_later(tmp_path: Path) -> None:
    path = sweep_file(
        tmp_path, "seeds: [4, 7]\nthree_arms: {n: 8, m: 4}\narms: {grpo: {run.eval.every: 2}, other: {}}\n"
    )
    found = load_sweep(path, arms=["other", "grpo"], seeds=1)
    assert [(run.arm, run.seed) for run in found.runs] == [("grpo", 4), ("other", 4)]
    grpo = found.runs[0].config
    assert (grpo.run.eval.every, grpo.generator.rollouts_per_prompt) == (2, 4)
    with pytest.raises(ConfigError, match="arms: 'ppo' is none of the arms grpo, grpo-ga, grpo-pods, other"):
        load_sweep(path, arms=["ppo"])


def test_a_local_cluster_is_shared_by_all_runs(tmp_path: Path) -> None:
    found = load_sweep(sweep_file(tmp_path, "arms: {a: {}}\n"), ["cluster.address=local"])
    assert found.runs[0].config.cluster.address == "auto"
