"""YAML and overrides to a Config: what is taken, and what is said about the rest."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

import pods_cluster.config
from pods_cluster.config import Config, ConfigError, build_config, dump_config, load_config, parse_config
from pods_cluster.config.base import Section

BASE = """
model: {path: some/model}
data: {path: rows.jsonl}
reward:
  - {name: math_answer}
  - {name: think_answer_format, weight: 0.1}
run: {name: test}
"""


def problem(*overrides: str, text: str = BASE) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(text, overrides)
    return str(error.value)


def test_a_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BASE, encoding="utf-8")
    config = load_config(
        path, ["learner.learning_rate=3e-5", "reward.1.weight=2", "data.system=Ünïcode {yes}", "staleness=2"]
    )
    assert config.learner.learning_rate == 3e-5
    assert [reward.weight for reward in config.reward] == [1.0, 2.0]
    assert config.data.system == "Ünïcode {yes}"
    assert config.staleness == 2
    assert (config.rollouts_per_step, config.trained_per_step) == (16 * 64, 16 * 16)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read \(No such file or directory\); give the path"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("run: {name: é}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8 text .*save it as UTF-8"):
        load_config(tmp_path / "latin.yaml")
    (tmp_path / "bad.yaml").write_text("model: [\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML"):
        load_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize("text", ["", "[1, 2]", "hello"])
def test_texts_that_hold_no_sections(text: str) -> None:
    assert "not the sections of a run" in problem(text=text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "a: stands twice (line 3); remove one"),
        ("model: {path: m, path: n}", "path: stands twice (line 1)"),
        ("model:\n  path: m\nreward:\n  - name: x\n    name: y", "name: stands twice (line 5)"),
    ],
)
def test_a_key_that_stands_twice(text: str, told: str) -> None:
    assert told in problem(text=text)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("selektor.keep=4", "selektor: unknown field (value {'keep': 4}); did you mean selector?"),
        ("selector.kep=4", "selector.kep: unknown field (value 4); did you mean keep?"),
        ("reward.0.wieght=2", "reward.0.wieght: unknown field (value 2); did you mean weight?"),
        ("learner.lora.rnk=3", "learner.lora.rnk: unknown field (value 3); did you mean rank?"),
        ("data.eval.zzz=3", "data.eval.zzz: unknown field (value 3); known here: path, name, split, rows"),
    ],
)
def test_unknown_fields(override: str, told: str) -> None:
    assert told in problem(override)


@pytest.mark.parametrize("field", ["model", "data", "reward", "run"])
def test_missing_sections(field: str) -> None:
    tree = parse_config(BASE).model_dump(mode="json")
    del tree[field]
    with pytest.raises(ConfigError, match=f"- {field}: missing; it has no default, add it"):
        build_config(tree)


def test_all_problems_in_one_message() -> None:
    told = problem("selector.keep=1", "learner.zero_stage=4", "run.nmae=x")
    assert "3 problems" in told
    for field in ("selector.keep: 1", "learner.zero_stage: 4", "run.nmae"):
        assert field in told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("nonsense", "'nonsense': an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("model.path.deep=3", "model.path is a value, not a section; it has no field 'deep'"),
        ("model.path.deep.er=3", "'deep' lies under a value, not under a section"),
        ("reward.2.weight=1", "'2' is not an index from 0 to 1"),
        ("reward.-1=1", "'-1' is not an index from 0 to 1"),
        ("reward.²=1", "'²' is not an index"),
        ("data.system=[", "the value is not valid YAML"),
        ("selector.options={a: 1, a: 2}", "a: stands twice"),
        ("data.template={{prompt}}", "a dict cannot be a key (line 1); put quotes around a text"),
        ("data.template={prompt}", "data.template: {'prompt': None} is refused: input should be a valid string"),
    ],
)
def test_overrides_that_cannot_be_applied(override: str, told: str) -> None:
    assert told in problem(override)


def test_an_override_of_an_empty_list() -> None:
    assert "'0' is not an index: the list is empty" in problem("reward=[]", "reward.0.weight=1")


def test_overrides_make_sections_and_unset_values() -> None:
    config = parse_config(
        BASE, ["learner.lora.rank=8", "data.answer=", "data.eval.split=dev", "reward.0={name: boxed}"]
    )
    assert config.learner.lora is not None
    assert config.learner.lora.rank == 8
    assert config.data.answer is None
    assert config.data.eval is not None
    assert config.reward[0].name == "boxed"
    assert parse_config(BASE, ["learner.lora=null"]).learner.lora is None


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    "field",
    ["learner.learning_rate", "generator.temperature", "reward.0.weight", "reward.0.range.0", "selector.tolerance"],
)
def test_nan_and_infinity(field: str, number: str) -> None:
    told = problem("reward.0.range=[0, 1]", f"{field}={number}")
    assert f"{field}: {number.replace('.', '')} is refused" in told


@pytest.mark.parametrize("options", ["{a: .nan}", "{a: {b: [1, .inf]}}"])
def test_nan_in_the_options_of_a_plugin(options: str) -> None:
    assert "selector.options: " in problem(f"selector.options={options}")
    assert "numbers must be finite" in problem(f"reward.0.options={options}")


@pytest.mark.parametrize("field", ["generator.workers", "learner.learning_rate", "run.seed", "selector.min_valid"])
def test_a_truth_value_is_no_number(field: str) -> None:
    assert f"{field}: true is not a number" in problem(f"{field}=true")


def test_words_that_yaml_1_1_takes_for_truth_values_or_dates() -> None:
    config = parse_config(
        BASE, ["selector.settle=off", "learner.correction.mode=on", "run.name=2026-01-01", "data.system=no"]
    )
    assert (config.selector.settle, config.learner.correction.mode) == ("off", "on")
    assert (config.run.name, config.data.system) == ("2026-01-01", "no")
    assert parse_config(BASE, ["data.chat=false"]).data.chat is False


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1E-6", 1e-6), ("2.5e-5", 2.5e-5), ("1e+0", 1.0), ("0.5", 0.5), ("1", 1.0)]
)
def test_learning_rates_as_people_write_them(text: str, value: float) -> None:
    assert parse_config(BASE, [f"learner.learning_rate={text}"]).learner.learning_rate == value


def test_a_number_where_a_text_belongs() -> None:
    assert "run.name: 123 is refused: input should be a valid string; put it in quotes" in problem("run.name=123")
    assert parse_config(BASE, ["run.name='123'"]).run.name == "123"


VARIANTS: list[dict[str, Any]] = [
    {},
    {"data.eval": {"split": "test", "rows": 5}},
    {"data.eval": {}, "run.eval.every": 3},
    {"run.eval.temperature": 0.5},
    {"run.eval.every": 0},
    {"selector.settle": "waves", "learner.lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
    {"learner.correction.mode": "off", "learner.correction.mask": [0.5, 5.0], "reward.0.range": [0, 1]},
    {"data.system": "off", "data.template": "a\n{prompt}\n  b: 'c' \"d\" é", "run.name": "2026-01-01"},
    {"selector.options": {"a": [1, {"b": None}], "c": "yes"}, "learner.learning_rate": 1e-6},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=range(len(VARIANTS)))
def test_dump_and_parse_round_trip(variant: dict[str, Any]) -> None:
    import json

    config = parse_config(BASE, [f"{key}={json.dumps(value)}" for key, value in variant.items()])
    text = dump_config(config)
    again = parse_config(text)
    assert again == config
    assert dump_config(again) == text
    assert set(text.split()) >= {"prompts_per_step:", "staleness:"}, "defaults are written out"


def test_a_built_config_does_not_change() -> None:
    config = parse_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.staleness = 3  # type: ignore[misc]


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "path",
    sorted(set(CONFIGS.rglob("*.yaml")) - set((CONFIGS / "sweeps").iterdir())),  # those are of another kind
    ids=lambda path: path.name,
)
def test_the_shipped_configurations(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_importing_and_parsing_needs_neither_torch_nor_ray_nor_vllm() -> None:
    script = f"""
import sys
from pods_cluster.config import dump_config, parse_config
dump_config(parse_config({BASE!r}))
heavy = {{"torch", "ray", "vllm", "deepspeed", "transformers", "datasets"}} & set(sys.modules)
assert not heavy, heavy
"""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_default_is_what_validation_would_make_of_it() -> None:
    """Defaults are not validated when a configuration is built."""
    for module in pkgutil.iter_modules(pods_cluster.config.__path__):
        importlib.import_module(f"pods_cluster.config.{module.name}")
    sections, seen = [Section], 0
    while sections:
        section = sections.pop()
        sections += section.__subclasses__()
        for name, field in section.model_fields.items():
            if field.is_required():
                continue
            default = field.get_default(call_default_factory=True)
            kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            made = TypeAdapter(kind).validate_python(default)
            assert (made, type(made)) == (default, type(default)), f"{section.__name__}.{name}"
            seen += 1
    assert seen > 150


def test_every_limit_of_time_is_one_that_can_be_waited_for() -> None:
    """A number that no clock takes would end the run where it waits, in place of at its start."""
    from pods_cluster.config.problems import field_paths

    fields = [path for path in field_paths() if path.rpartition(".")[2].endswith(("timeout", "patience"))]
    assert len(fields) >= 15
    for path in fields:
        if path.startswith("environment."):
            continue  # a section that is left out
        with pytest.raises(ConfigError, match=rf"{re.escape(path)}: 1e\+30 is refused: input should be less than"):
            parse_config(BASE, [f"{path}=1e30"])
        parse_config(BASE, [f"{path}=1e8"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "reward=exact_match",
            "reward: 'exact_match' is refused: input should be a valid list; write a list, as in [exact_match]",
        ),
        ("reward={name: exact_match}", "write a list, as in [{name: …}]"),
        (
            "reward=[exact_match]",
            "reward.0: 'exact_match' is refused: it must be a section of fields; write its fields",
        ),
        ("run=5", "run: 5 is refused: it must be a section of fields"),
        ("run={name: a, <<: {steps: 3}}", "run.<<: unknown field"),
    ],
)
def test_another_shape_is_told_how_it_is_written(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(BASE, [override])
    assert told in str(refused.value)
