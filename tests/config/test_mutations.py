"""No wrong configuration passes, and none ends in a traceback: each message names the field, its value and the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pods_cluster.config import ConfigError, build_config, load_config, parse_config
from pods_cluster.config.problems import _short
from tests.config.mutations import CONTRADICTIONS, leaves, misspelt, with_value, without_value

ROOT = Path(__file__).parents[2]
SHIPPED = [
    *sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "sweeps"),
    ROOT / "benchmarks" / "arms_cpu.yaml",
    ROOT / "pods_cluster" / "quickstart" / "run.yaml",
]
TREES: list[dict[str, Any]] = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in SHIPPED]
FIX = re.compile(
    r"should|must|\bset\b|\buse\b|raise|lower|\bgive\b|\badd\b|remove|leave|\bput\b|did you mean|known here|write|choose|"
    r"widen|it has|swap|one of|at most|correct|needs|cannot"
)


def fault(tree: dict[str, Any], field: str, value: Any = None, *, alone: bool = True) -> str:
    """What is wrong with how a wrong configuration is refused; empty where nothing is.

    One line names the field, its value and the fix; with `alone` nothing else is told.
    """
    try:
        build_config(tree)
    except ConfigError as error:
        told = str(error)
    except Exception as error:
        return f"{field}={value!r}: {type(error).__name__}: {error}"
    else:
        return f"{field}={value!r}: accepted"
    lines = [line for line in told.splitlines()[1:] if line.startswith("  - ")]
    # what is wrong with an item of a list, a pair or options may be told by the item's own path
    line = next((line for line in lines if re.match(rf"  - {re.escape(field)}(\.[\w.\[\]]+)?( =|:)", line)), "")
    if not line:
        return f"{field}={value!r}: not named in {told}"
    if alone and len(lines) > max(1, len(value) if isinstance(value, list | dict) else 1):
        return f"{field}={value!r}: more than one problem is told: {told}"
    if value is not None and not shows(line, value):
        return f"{field}={value!r}: the value is not in {line}"
    return "" if FIX.search(line) else f"{field}={value!r}: no fix in {line}"


def shows(line: str, value: Any) -> bool:
    items = [value, *(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())]
    if isinstance(value, int) and abs(value) > 2**64:
        return str(value)[:20] in line
    return any(
        _short(item).lower()[:60] in line.lower() or str(item).lower() in line.lower() for item in items if item != ""
    ) or (value in ("", [], {}) and _short(value) in line)


def test_every_field_refuses_what_it_cannot_be() -> None:
    faults, tried = [], 0
    for leaf in leaves():
        for value in leaf.wrong_values():
            tree = TREES[tried % len(TREES)]
            tried += 1
            faults.append(fault(with_value(tree, leaf.path, value), leaf.path, value))
    assert tried > 900
    assert not (wrong := list(filter(None, faults))), "\n".join(text[:400] for text in wrong)


def test_misspelt_and_misplaced_fields_are_told_with_the_right_one() -> None:
    faults, tried = [], 0
    known = {leaf.path for leaf in leaves()}
    for leaf in leaves():
        name = leaf.path.rpartition(".")[2]
        wrong = leaf.path.removesuffix(name) + misspelt(name)
        tree = TREES[tried % len(TREES)]
        tried += 1
        try:
            build_config(with_value(without_value_or_same(tree, leaf.path), wrong, 3))
        except ConfigError as error:
            if not re.search(rf"- {re.escape(wrong)}: unknown field \(value 3\); .*\b{name}\b", str(error)):
                faults.append(f"{wrong}: {error}")
        else:
            faults.append(f"{wrong}: accepted")
        elsewhere = f"cluster.{name}" if not leaf.path.startswith("cluster") else f"data.{name}"
        if elsewhere not in known:
            tried += 1
            faults.append(fault(with_value(tree, elsewhere, 3), elsewhere, 3))
    assert tried > 200
    assert not (found := list(filter(None, faults))), "\n".join(found)


def without_value_or_same(tree: dict[str, Any], path: str) -> dict[str, Any]:
    return (
        tree if path in ("model", "data", "reward", "run") or path.endswith(("path", "name")) else _without(tree, path)
    )


def _without(tree: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        return without_value(tree, path)
    except (KeyError, AttributeError, TypeError):
        return tree


@pytest.mark.parametrize("place", range(len(TREES)), ids=[str(path.relative_to(ROOT)) for path in SHIPPED])
def test_settings_that_disagree_are_told_in_every_shipped_configuration(place: int) -> None:
    faults = []
    for field, values in CONTRADICTIONS[place % 3 :: 3]:  # a third of them for each configuration
        tree = TREES[place]
        for path, value in values.items():
            tree = with_value(tree, path, value)
        faults.append(fault(tree, field, alone=False))
    for section in ("model", "data", "reward", "run"):
        faults += [fault(without_value(TREES[place], section), section)]
        if section != "reward":
            faults += [
                fault(
                    with_value(TREES[place], section, {}),
                    f"{section}.{'name' if section == 'run' else 'path'}",
                    alone=False,
                )
            ]
    assert not (wrong := list(filter(None, faults))), "\n".join(wrong)


DEEP = "a: " + "[" * 700
LONG = "run: {steps: " + "9" * 5000 + "}"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds NoneType, not the sections"),
        ("- a", "holds list, not the sections"),
        ("5", "holds int"),
        ("model: {path: [", "not valid YAML"),
        ("model: {path: m}}", "not valid YAML"),
        ("\tmodel: 5", "not valid YAML"),
        ("model: *nothing", "undefined alias"),
        ("model: &m {path: m, self: *m}", "recursive"),
        ("a: &a [*a]", "holds more than 100,000 values"),
        (LAUGHS, "holds more than 100,000 values"),
        (DEEP, "nested too deeply (line 1: more than 100 levels)"),
        ("a: " + "[" * 97 + "]" * 97, "a: unknown field"),
        ("a:\n" + "".join(f"{' ' * depth}b:\n" for depth in range(1, 120)), "nested too deeply (line 100: more"),
        (LONG, "put quotes around a text"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: !!timestamp x", "could not determine a constructor"),
        ("a: !!int x", "not valid YAML"),
        ("a: !!float x", "not valid YAML"),
        ("a: !!binary x", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: \0", "special characters are not allowed"),
        ("? [a]\n: 1", "a list cannot be a key"),
        ("<<: 5", "<<: unknown field (value 5)"),
        ("1: 2", "1: 1 is no field's name"),
        ("true: 2", "True is no field's name"),
        ("null: 2", "None is no field's name"),
        ("1.5: {a: 1}", "1.5 is no field's name"),
        ("model: {1: 2}", "model.1: 1 is no field's name"),
        ("reward: [{1: 2}]", "reward.0.1: 1 is no field's name"),
        ("generator: {engine_options: {1: 2}}", "generator.engine_options.1"),
    ],
)  # fmt: skip
def test_texts_that_are_no_configuration(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    assert told in str(error.value), str(error.value)
    assert len(str(error.value)) < 5000


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "image.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "utf16.yaml").write_text("model: {path: m}", encoding="utf-16")
    for name in ("gone.yaml", ".", "image.yaml", "utf16.yaml", "a\0b.yaml", "n" * 300):
        with pytest.raises(ConfigError, match=r"give the path|save it as UTF-8"):
            load_config(tmp_path / name)


def test_numbers_are_read_as_people_mean_them() -> None:
    base = yaml.safe_dump(TREES[-1])
    values = {"0100": 100, "1_000": 1000, "0x10": 16, "1e3": 1000, "12.0": 12, "'7'": 7}
    for text, value in values.items():
        assert parse_config(base, [f"run.steps={text}"]).run.steps == value
    for text in ("1:30", "10k", "0b1x", "1 000", "1,000", "12.5", "١٢x"):
        with pytest.raises(ConfigError, match=r"run\.steps: .* is refused"):
            parse_config(base, [f"run.steps={text}"])
    assert parse_config("\ufeff" + base).run.steps == 180
