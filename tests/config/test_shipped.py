"""Every configuration that is shipped can be run: its plan offline, and in full with a model and data at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pods_cluster.client.check import check, plan_of
from pods_cluster.client.demo import CONFIG as QUICKSTART
from pods_cluster.client.sweep_command import notes
from pods_cluster.config import Config, load_config
from pods_cluster.config.sweep import load_sweep
from pods_cluster.data.errors import DataError
from pods_cluster.sizing.balance import StepShape
from pods_cluster.sizing.card_splits import cards_needed

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
CONFIGS = sorted(set((ROOT / "configs").rglob("*.yaml")) - set(SWEEPS))
PAPER = {path.stem: path for path in CONFIGS if path.parent.name == "paper"}
# The quickstart's data is made by itself, d's does not exist.
LOCAL = [path for path in CONFIGS if path.name.startswith("gsm8k") or (path in PAPER.values() and path.stem[0] != "d")]

# n, m, prompts a step of the three arms; the paper's settings table (d's are not public).
LORA_ARMS = {"pods": (64, 16, 1), "grpo": (16, 16, 1), "grpo-ga": (64, 64, 1)}
FULL_ARMS = {"pods": (128, 32, 32), "grpo": (32, 32, 32), "grpo-ga": (32, 32, 128)}
ARMS = {
    "a": LORA_ARMS,
    "b": LORA_ARMS,
    "c": {"pods": (32, 8, 1), "grpo": (8, 8, 1), "grpo-ga": (32, 32, 1)},
    "d": LORA_ARMS,
    "e": FULL_ARMS,
    "f": FULL_ARMS,
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*CONFIGS, QUICKSTART], ids=name_of)
def test_passes_the_offline_check(path: Path) -> None:
    found = check(load_config(path), offline=True)
    assert found.rows is None


@pytest.mark.parametrize("path", SWEEPS, ids=name_of)
def test_every_run_of_a_sweep_passes_the_offline_check(path: Path) -> None:
    sweep = load_sweep(path)
    for runs in sweep.arms.values():
        check(runs[0].config, offline=True, rewards=False)
    assert notes(sweep) == []


def test_names_differ() -> None:
    names = [load_config(path).run.name for path in CONFIGS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("setting", ARMS)
def test_the_papers_settings_have_its_numbers(setting: str) -> None:
    configs = {arm: load_config(PAPER[f"{setting}-{arm}"]) for arm in ARMS[setting]}
    for arm, (n, m, prompts) in ARMS[setting].items():
        config = configs[arm]
        assert (config.generator.rollouts_per_prompt, config.selector.keep) == (n, m)
        assert config.learner.prompts_per_step == prompts
        assert (config.selector.rule, config.selector.no_signal) == ("max_variance", "keep")
        assert config.learner.advantage.scope == "kept"
        assert config.generator.temperature == 0.9
        assert config.staleness == 0
        lora = config.learner.lora
        assert (lora is None) == (setting in "ef")
        assert lora is None or (lora.rank, lora.alpha, lora.target_modules) == (64, 64.0, "all-linear")
        assert config.sends_adapter == (lora is not None)
    plans = {arm: plan_of(config) for arm, config in configs.items()}
    # GRPO trains as many rollouts as PODS, GRPO-GA generates as many.
    assert plans["grpo"].trained == plans["pods"].trained
    assert plans["grpo-ga"].generated == plans["pods"].generated
    assert plans["grpo-ga"].trained == plans["grpo-ga"].generated


def test_the_arms_of_a_setting_differ_in_nothing_else() -> None:
    arm = {("generator", "rollouts_per_prompt"), ("selector", "keep"), ("learner", "prompts_per_step"), ("run", "name")}
    horizon = {("run", "steps"), ("learner", "warmup_steps"), ("run", "eval"), ("run", "checkpoint")}
    for setting in ARMS:
        pods = load_config(PAPER[f"{setting}-pods"])
        for other in ("grpo", "grpo-ga"):
            differ = set(_differences(pods, load_config(PAPER[f"{setting}-{other}"])))
            assert differ <= arm | (horizon if setting in "ef" and other == "grpo-ga" else set())


def _differences(one: Config, other: Config) -> list[tuple[str, str]]:
    left, right = one.model_dump(), other.model_dump()
    return [
        (section, field)
        for section in left
        if isinstance(left[section], dict)
        for field in left[section]
        if left[section][field] != right[section][field]
    ] + [(section, "") for section in left if not isinstance(left[section], dict) and left[section] != right[section]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of its own (bytes) and a model of one small layer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<end>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def math(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MATH problems in two files: every tenth is held out."""
    folder = tmp_path_factory.mktemp("math")
    rows = [json.loads(line) for line in (SHARED / "math" / "problems.jsonl").read_text().splitlines()]
    for name, kept in (("train", lambda row: row["idx"] % 10), ("test", lambda row: row["idx"] % 10 == 0)):
        lines = [json.dumps(row) for row in rows if kept(row)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets do not lie beside this repository")
@pytest.mark.parametrize("path", LOCAL, ids=name_of)
def test_passes_the_full_check_with_a_local_model_and_data(path: Path, model: Path, math: Path) -> None:
    # bytes are more tokens than words: the longest prompt must fit
    overrides = [f"model.path={model}", "data.name=null", "data.max_prompt_tokens=4096"]
    overrides += ["learner.tokens_per_microbatch=16384"]
    if path.stem.startswith("c-"):
        overrides += [f"data.path={math / 'train.jsonl'}", f"data.eval.path={math / 'test.jsonl'}"]
        sizes = (4500, 500)
    else:
        overrides += [f"data.path={SHARED / 'gsm8k'}"]
        sizes = (7473, 1319)
    config = load_config(path, overrides)
    # the arms of an experiment share their rewards
    found = check(config, rewards=path.stem.endswith("-pods"), seconds=0.2)
    rows = config.data.eval.rows if config.data.eval else None
    assert found.rows is not None
    assert found.rows > 0.98 * sizes[0]  # a few problems are longer still
    assert found.held_out == (rows or found.held_out)
    assert found.held_out is not None
    assert found.held_out + found.held_out_dropped == (rows or sizes[1])
    assert found.prompt is not None
    assert found.prompt.answer


@pytest.mark.parametrize("arm", ["pods", "grpo", "grpo-ga"])
def test_the_chemistry_template_names_what_is_missing(arm: str, model: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: 'data/chemistry-is-not-public/train\.jsonl' does not exist"):
        check(load_config(PAPER[f"d-{arm}"], [f"model.path={model}"]))
    assert PAPER[f"d-{arm}"].read_text().count("MISSING:") == 3


def test_one_card_holds_the_pools_that_share_it() -> None:
    shape = StepShape.of(load_config(ROOT / "configs" / "gsm8k-1gpu.yaml"))
    assert (shape.ranks, shape.generators) == (1, 2)
    assert cards_needed(shape) == 1
