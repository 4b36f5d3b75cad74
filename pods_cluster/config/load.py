"""Loading a `Config` from a YAML file and `key=value` overrides, with errors that a person can act on."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pods_cluster.config.base import ConfigError
from pods_cluster.config.problems import explain
from pods_cluster.config.tree import Config

DEEPEST = 100
"""Levels of sections and lists in one another: no configuration has ten, and readers take a few calls for each."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key, and reads plain words and numbers as YAML 1.2 does.

    It knows the types of JSON alone: `!!timestamp` and its like are refused.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node and what is in it. Raises ConfigError at a depth that is one on every stack and under every recursion limit."""
        self._depth += 1
        if self._depth > DEEPEST:
            line = self.peek_event().start_mark.line + 1
            raise ConfigError(
                f"it is nested too deeply (line {line}: more than {DEEPEST} levels); write fewer brackets"
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, dict | list):
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{key}: a {type(key).__name__} cannot be a key (line {line}); put quotes around a text")
        if key in seen:
            raise ConfigError(f"{key}: stands twice (line {key_node.start_mark.line + 1}); remove one")
        seen.add(key)
    return loader.construct_mapping(node, deep=deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
_TAG = "tag:yaml.org,2002:"
_JSON_TYPES = {None, *(_TAG + name for name in ("map", "seq", "str", "int", "float", "bool", "null"))}
_UniqueKeyLoader.yaml_constructors = {
    tag: make for tag, make in _UniqueKeyLoader.yaml_constructors.items() if tag in _JSON_TYPES
}
# YAML 1.1 reads `settle: off` as false, a run's name 2026-01-01 as a date, 0100 as 64 and 1:30 as 90. Here the words are
# texts, as in YAML 1.2, and so are the numbers: pydantic reads 0100 as 100 and refuses 1:30. `<<` is a field that nobody knows.
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [
        item
        for item in resolvers
        if item[0] not in {_TAG + name for name in ("bool", "timestamp", "int", "float", "merge")}
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"), list("-+0123456789")
)
# YAML 1.1 reads 1e-6 (no dot) as a text; people write learning rates so.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
              |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
              |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.X,
    ),
    list("-+.0123456789"),
)
MOST_VALUES = 100_000
"""Values in a configuration, an anchor's counted wherever it is used: few lines of aliases can stand for billions."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run's YAML file and apply overrides such as `a.b=value`; list items go by index (`reward.0.weight=2`).

    Raises ConfigError for a file that cannot be read, or with all wrong fields in one message.
    """
    return parse_config(_text_of(Path(path), "a run's YAML file"), overrides, source=str(path))


def load_tree(path: str | Path, what: str) -> dict[str, Any]:
    """The mapping that a YAML file holds, read as `load_config` reads one; `what` says what kind of file was expected.

    Raises ConfigError.
    """
    return _tree_of(_text_of(Path(path), what), str(path), f"the fields of {what}")


def _text_of(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of {what}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except ValueError as error:  # a NUL character in its name
        raise ConfigError(f"{str(path)!r}: cannot be read ({error}); give the path of {what}") from None


def _tree_of(text: str, source: str, what: str) -> dict[str, Any]:
    try:
        tree = _read(text, "not valid YAML")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: holds {type(tree).__name__}, not {what}")
    return tree


def parse_config(text: str, overrides: Iterable[str] = (), *, source: str = "configuration") -> Config:
    """Parse a YAML text as `load_config` does a file; `source` names it in errors. Raises ConfigError."""
    tree = _tree_of(text, source, "the sections of a run (model, data, reward, …)")
    problems: list[str] = []
    for override in overrides:
        try:
            _apply(tree, override)
        except ConfigError as error:
            problems.append(str(error))
    return _build(tree, problems, source)


def _read(text: str, wrong: str) -> Any:
    """The value of a YAML text. Raises ConfigError, which begins with `wrong` where the text is no YAML."""
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{wrong}: {error}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{wrong}: {error}; put quotes around a text") from None
    except RecursionError:  # below that depth, where the caller has hardly any stack left
        raise ConfigError(f"{wrong}: it is nested too deeply; write fewer brackets") from None
    _refuse_endless(value)
    return value


def _refuse_endless(value: Any) -> None:
    """Refuse a value that is larger than any configuration (a few lines of aliases suffice): it takes for ever to print."""
    left, waiting = MOST_VALUES, [value]
    while waiting:
        node = waiting.pop()
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        left -= len(inner)
        if left < 0:
            raise ConfigError(f"holds more than {MOST_VALUES:,} values (aliases counted each time); write it shorter")
        waiting.extend(inner)


def build_config(tree: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Validate a nested dict; `source` names it in errors. Raises ConfigError with all wrong fields in one message."""
    return _build(tree, [], source)


def changed(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested dict with `changes`, which may be nested too: sections are merged, values replaced.

    A key may be a path: `learner.workers`, `reward.0.weight`. Paths and NumPy's numbers become texts and numbers. Raises
    ConfigError for a path that leads nowhere.
    """
    result = copy.copy(dict(tree))
    for key, value in changes.items():
        if not isinstance(key, str) or not key.strip():
            raise ConfigError(f"{key!r}: is no name of a field; write it as in 'learner.learning_rate'")
        first, _, rest = key.partition(".")
        held = result.get(first)
        if rest and isinstance(held, list):
            result[first] = _changed_item(held, rest, value, key)
        elif rest and held is not None and not isinstance(held, Mapping):
            raise ConfigError(f"{key}: {first} is a value ({held!r}), not a section; it has no field {rest!r}")
        elif rest:
            result[first] = changed(held or {}, {rest: value})
        elif isinstance(value, Mapping):
            result[first] = changed(held if isinstance(held, Mapping) else {}, value)
        else:
            result[first] = _plain(value)
    return result


def _changed_item(items: list[Any], path: str, value: Any, key: str) -> list[Any]:
    first, _, rest = path.partition(".")
    index = _index(items, first, key)
    item = changed(items[index], {rest: value}) if rest and isinstance(items[index], Mapping) else _plain(value)
    return [*items[:index], item, *items[index + 1 :]]


def _plain(value: Any) -> Any:
    """A value as YAML would hold it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def _build(tree: Mapping[str, Any], problems: list[str], source: str) -> Config:
    """Validate `tree`; `problems` were found before. Raises ConfigError with all of them."""
    try:
        config = Config.model_validate(dict(tree))
        if not problems:
            return config
    except ValidationError as error:
        problems = problems + explain(tree, error)
    raise ConfigError.listing(source, problems)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{override!r}: an override is written key=value, as in learner.learning_rate=1e-5")
    try:
        value = _read(raw, "the value is not valid YAML") if raw.strip() else None
    except ConfigError as error:
        raise ConfigError(f"{override!r}: {error}") from None
    *parents, last = key.strip().split(".")
    node: Any = tree
    for part in parents:
        node = _child(node, part, override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{override!r}: {'.'.join(parents)} is a value, not a section; it has no field {last!r}")


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    raise ConfigError(f"{override!r}: {part!r} lies under a value, not under a section")


def _index(node: list[Any], part: str, override: str) -> int:
    if not re.fullmatch("[0-9]+", part) or int(part) >= len(node):
        known = f"an index from 0 to {len(node) - 1}" if node else "an index: the list is empty"
        raise ConfigError(f"{override!r}: {part!r} is not {known}")
    return int(part)


def dump_config(config: Config) -> str:
    """Return the configuration as YAML, with every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
