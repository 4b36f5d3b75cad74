"""From a reward's name to something that can be called: a built-in, `module:function` or `file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pods_cluster.scoring.builtin import BUILTINS
from pods_cluster.scoring.calling import CallBatch, call_builtin, call_trl, call_verl, detect_style, needed_columns
from pods_cluster.scoring.spec import RewardConfigError, RewardSpec, check_specs


def declared_range(spec: RewardSpec) -> tuple[float, float] | None:
    """The range that the config or the built-in declares, or None (a user function without one)."""
    if spec.range is not None:
        return spec.range
    builtin = BUILTINS.get(spec.name)
    return None if builtin is None else builtin.range


def check_rewards(specs: Sequence[RewardSpec], columns: Collection[str] | None = None) -> None:
    """Checks values, built-in names and options without importing user code. Raises RewardConfigError.

    `columns` are the dataset's, with `answer` among them when the rows have one.
    """
    check_specs(specs)
    for index, spec in enumerate(specs):
        where = f"reward[{index}]"
        if ":" in spec.name:
            continue
        builtin = BUILTINS.get(spec.name)
        if builtin is None:
            close = difflib.get_close_matches(spec.name, BUILTINS, n=1)
            known = f"did you mean {close[0]!r}? " if close else ""
            raise RewardConfigError(
                f"{where}.name",
                spec.name,
                "no built-in reward has this name",
                f"{known}Built-in: {', '.join(sorted(BUILTINS))}; your own: module:function or file.py:function",
            )
        _check_options(builtin.function, spec, where, skip=len(builtin.reads))
        if columns is not None and "answer" in builtin.reads and "answer" not in columns:
            raise RewardConfigError(
                f"{where}.name",
                spec.name,
                "it compares with the row's answer, and the rows have none",
                "Name the answer's column in data.answer",
            )


def load_reward(spec: RewardSpec, index: int, columns: Collection[str] | None = None) -> CallBatch:
    """Imports and prepares reward `index` of the config; runs in the scorer process.

    Returns a function from a list of `ScoreRequest` to a list of raw results. Raises RewardConfigError.
    """
    where = f"reward[{index}]"
    if ":" not in spec.name:
        builtin = BUILTINS[spec.name]
        if builtin.warm_up is not None:
            builtin.warm_up()
        return call_builtin(builtin.function, builtin.reads, spec.options)
    function = _load_function(spec, where)
    style = detect_style(function) if spec.style == "auto" else spec.style
    if style is None:
        raise RewardConfigError(
            f"{where}.style",
            spec.style,
            f"the parameters of {spec.name} are neither those of TRL (prompts, completions, **columns) nor those of "
            "verl (data_source, solution_str, ground_truth, extra_info)",
            "Rename its parameters, or set style: trl or style: verl",
        )
    _check_options(function, spec, where, skip=0)
    missing = needed_columns(function, style, spec.options) - set(columns) if columns is not None else set()
    if missing:
        raise RewardConfigError(
            f"{where}.name",
            spec.name,
            f"it needs the column {', '.join(sorted(missing))}, which the rows do not have",
            f"The rows have: {', '.join(sorted(columns or ())) or 'none'}. Rename the parameter or add the column",
        )
    return call_trl(function, spec.options, spec.completions) if style == "trl" else call_verl(function, spec.options)


def _load_function(spec: RewardSpec, where: str) -> Callable[..., Any]:
    source, _, name = spec.name.rpartition(":")
    try:
        module = _load_file(Path(source).expanduser()) if source.endswith(".py") else importlib.import_module(source)
    except BaseException as error:  # user code at import may raise anything, SystemExit included
        raise RewardConfigError(
            f"{where}.name",
            spec.name,
            f"importing {source} failed: {describe_error(error)}",
            "Fix the import; the folder must be on the import path of every node (ray job submit --working-dir)",
        ) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
        raise RewardConfigError(
            f"{where}.name",
            spec.name,
            f"{source} has no function {name!r}",
            f"Did you mean {close[0]!r}?" if close else "Name a function of that module",
        )
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path.resolve()}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for the modules that lie beside it
    name = f"pods_reward_{abs(hash(str(path.resolve()))):x}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _check_options(function: Callable[..., Any], spec: RewardSpec, where: str, skip: int) -> None:
    """Refuses options that the function does not take; for a built-in also those that it needs and lacks."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for option, value in spec.options.items():
        if option not in names:
            raise RewardConfigError(
                f"{where}.options.{option}",
                value,
                f"{spec.name} has no such option",
                f"Its options: {', '.join(names) or 'none'}",
            )
    for parameter in parameters if skip else ():
        if parameter.default is parameter.empty and parameter.name not in spec.options:
            raise RewardConfigError(
                f"{where}.options.{parameter.name}", None, f"{spec.name} needs it", "Give it a value"
            )


def describe_error(error: BaseException) -> str:
    """Type, text and place (file, line, function) of an error, in one line of at most 500 characters."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith("<") and Path(__file__).parent != Path(code.co_filename).parent:
            frames.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    try:
        text = str(error)
    except Exception:  # a user's __str__ may raise as well
        text = "(its text could not be made)"
    line = f"{type(error).__name__}: {text}" + (f" ({frames[-1]})" if frames else "")
    return " ".join(line.split())[:500]
