"""Rewards by name, as something that can be called: a built-in, `module:function` or `file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pods_cluster.scoring.builtin import BUILTINS, BuiltinReward
from pods_cluster.scoring.calling import CallBatch, call_builtin, call_trl, call_verl, detect_style, needed_columns
from pods_cluster.scoring.pickled_function import unpickle_function
from pods_cluster.scoring.sent_reward import SentReward

if TYPE_CHECKING:  # else only where a reward is refused: see SentReward
    from pods_cluster.config import RewardConfig, RewardConfigError


def declared_range(reward: RewardConfig | SentReward) -> tuple[float, float] | None:
    """The (lowest, highest) value that the configuration or the built-in declares; None where neither does."""
    if reward.range is not None:
        return reward.range
    builtin = BUILTINS.get(reward.name)
    return None if builtin is None else builtin.range


def check_rewards(rewards: Sequence[RewardConfig], columns: Collection[str] | None = None) -> None:
    """Check the sum, built-in names and their options, without importing user code. Raises RewardConfigError.

    `columns` are those of the dataset, `answer` among them when the rows have one; None where they are not known.
    """
    from pods_cluster.config.reward import check_sum

    check_sum(rewards)
    for index, reward in enumerate(rewards):
        if ":" in reward.name or reward.code is not None:
            continue
        builtin = BUILTINS.get(reward.name)
        if builtin is None:
            close = difflib.get_close_matches(reward.name, BUILTINS, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise _refused(
                index,
                "name",
                reward.name,
                "is no built-in reward",
                f"{guess}built-in are {', '.join(sorted(BUILTINS))}; "
                "your own is written as module:function or file.py:function",
            )
        _check_options(builtin.function, reward, index, skip=len(builtin.reads))
        _try_options(builtin, reward, index)
        if columns is not None and "answer" in builtin.reads and "answer" not in columns:
            raise _refused(
                index,
                "name",
                reward.name,
                "compares with the row's answer, and the rows have none",
                "name the answer's column in data.answer",
            )


def load_reward(reward: RewardConfig | SentReward, index: int, columns: Collection[str] | None = None) -> CallBatch:
    """Import and prepare reward `index` of the configuration; runs in the scorer process.

    Returns a function from a list of `ScoreRequest` to a list of raw results. Raises RewardConfigError.
    """
    if ":" not in reward.name and reward.code is None:
        builtin = BUILTINS[reward.name]
        if builtin.warm_up is not None:
            builtin.warm_up()
        return call_builtin(builtin.function, builtin.reads, reward.options)
    function = _load_function(reward, index)
    style = detect_style(function) if reward.style == "auto" else reward.style
    if style is None:
        raise _refused(
            index,
            "style",
            reward.style,
            f"fits no convention: the parameters of {reward.name} are neither those of TRL (prompts, completions, "
            "**columns) nor those of verl (data_source, solution_str, ground_truth, extra_info)",
            "rename its parameters, or set style: trl or style: verl",
        )
    _check_options(function, reward, index, skip=0)
    needed = needed_columns(function, style, reward.options)
    if style == "verl" and needed:
        raise _refused(
            index,
            "name",
            reward.name,
            f"takes the argument {', '.join(sorted(needed))}, which verl's convention does not give "
            "(data_source, solution_str, ground_truth, extra_info)",
            f"set it in reward.{index}.options, give it a default, or read it from extra_info",
        )
    missing = needed - set(columns) if columns is not None else set()
    if missing:
        raise _refused(
            index,
            "name",
            reward.name,
            f"needs the column {', '.join(sorted(missing))}, which the rows do not have",
            f"they have {', '.join(sorted(columns or ())) or 'none'}; rename the parameter or add the column",
        )
    if style == "trl":
        return call_trl(function, reward.options, reward.completions)
    return call_verl(function, reward.options)


def _load_function(reward: RewardConfig | SentReward, index: int) -> Callable[..., Any]:
    source, _, name = reward.name.rpartition(":")
    if reward.code is not None:
        return _unpickled(reward, index)
    try:
        module = _load_module(source)
    except BaseException as error:  # user code at import may raise anything, SystemExit included
        raise _refused(
            index,
            "name",
            reward.name,
            f"cannot be used: importing {source} failed: {describe_error(error)}",
            "fix the import; its folder must be on the import path of every node (ray job submit --working-dir)",
        ) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
        raise _refused(
            index,
            "name",
            reward.name,
            f"cannot be used: {source} has no function {name!r}",
            f"did you mean {close[0]!r}?" if close else "name a function of that module",
        )
    return function


def load_object(name: str) -> Any:
    """Return what `file.py:name` or `package.module:name` names. Raises what the import raises, and AttributeError."""
    source, _, path = name.rpartition(":")
    found: Any = _load_module(source)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _load_module(source: str) -> ModuleType:
    return _load_file(Path(source).expanduser()) if source.endswith(".py") else importlib.import_module(source)


def _unpickled(reward: RewardConfig | SentReward, index: int) -> Callable[..., Any]:
    try:
        return unpickle_function(reward.code or "")
    except BaseException as error:  # it imports modules, which may raise anything
        raise _refused(
            index,
            "code",
            reward.name,
            f"cannot be unpickled: {describe_error(error)}",
            "what it imports must be there on every node, with the same Python; or name the function in a module",
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path.resolve()}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that the file can import its neighbours
    name = f"pods_reward_{abs(hash(str(path.resolve()))):x}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _check_options(function: Callable[..., Any], reward: RewardConfig | SentReward, index: int, skip: int) -> None:
    """Refuse options that the function does not take; for a built-in also missing ones (`skip` > 0).

    The first `skip` parameters are what a built-in reads of a request, not options.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for option, value in reward.options.items():
        if option not in names:
            raise _refused(
                index,
                f"options.{option}",
                value,
                f"is no option of {reward.name}",
                f"it takes {', '.join(names) or 'none'}",
            )
    for parameter in parameters if skip else ():
        if parameter.default is parameter.empty and parameter.name not in reward.options:
            raise _refused(
                index,
                f"options.{parameter.name}",
                None,
                f"is no value: {reward.name} needs this option",
                "add it",
            )


def _try_options(builtin: BuiltinReward, reward: RewardConfig | SentReward, index: int) -> None:
    """Call a built-in once on an empty completion: values that it refuses would fail for every rollout."""
    request = {"completion": "", "answer": "0", "completion_ids": (), "environment_reward": 0.0}
    try:
        builtin.function(*(request[name] for name in builtin.reads), **reward.options)
    except Exception as error:
        raise _refused(
            index, "options", dict(reward.options), f"cannot be used by {reward.name}: {error}", "correct the value"
        ) from error


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


def _refused(index: int, field: str, value: object, problem: str, fix: str) -> RewardConfigError:
    from pods_cluster.config import RewardConfigError

    return RewardConfigError(index, field, value, problem, fix)
