"""Calling conventions of reward functions: built-in, TRL and verl, all over the same requests."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pods_cluster.scoring.score import ScoreRequest

if TYPE_CHECKING:
    import asyncio

CallBatch = Callable[[Sequence[ScoreRequest]], Any]
"""Calls a reward for some requests and returns what it returned: in the good case a list, one value a request."""

_TRL_PARAMETERS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
_VERL_PARAMETERS = {"data_source", "solution_str", "ground_truth", "extra_info"}


class MissingColumn(Exception):
    """A reward reads a column, or takes an argument, that the rows do not give it."""


def detect_style(function: Callable[..., Any]) -> str | None:
    """Return `trl` or `verl`, by the names of the parameters; None when they fit neither."""
    names = set(inspect.signature(function).parameters)
    if "solution_str" in names:
        return "verl"
    if "completions" in names:
        return "trl"
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return "trl" if inspect.Parameter.VAR_KEYWORD in kinds and "ground_truth" not in names else None


def needed_columns(function: Callable[..., Any], style: str, options: Mapping[str, Any]) -> set[str]:
    """Return the parameters without a default that its convention does not give: for TRL columns of the dataset."""
    given = _VERL_PARAMETERS if style == "verl" else _TRL_PARAMETERS
    return {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and name not in given
        and name not in options
    }


def call_builtin(function: Callable[..., float | None], reads: Sequence[str], options: Mapping[str, Any]) -> CallBatch:
    """Call a built-in reward: `function(<the fields of a request that it reads>, **options) -> float`."""

    def call(rows: Sequence[ScoreRequest]) -> list[float | None]:
        return [function(*(getattr(row, name) for name in reads), **options) for row in rows]

    return call


def call_trl(function: Callable[..., Any], options: Mapping[str, Any], completions: str) -> CallBatch:
    """Call by TRL's convention: `f(prompts, completions, **columns) -> list[float | None]`, one entry a row in each list.

    Prompts and completions of a chat are lists of messages, those of several turns too. Columns that the function does not
    name are passed only if it takes `**kwargs`.
    """
    accepts = _accepted(function)

    def call(rows: Sequence[ScoreRequest]) -> Any:
        arguments: dict[str, Any] = {
            name: [_columns(row).get(name) for row in rows] for name in {key for row in rows for key in _columns(row)}
        }
        chats = [completions == "messages" or (completions == "auto" and bool(row.messages)) for row in rows]
        arguments["prompts"] = [_prompt(row, chat) for row, chat in zip(rows, chats, strict=True)]
        arguments["completions"] = [
            _messages(row) if chat else row.completion for row, chat in zip(rows, chats, strict=True)
        ]
        arguments["completion_ids"] = [list(row.completion_ids or ()) for row in rows]
        arguments["trainer_state"] = None  # there is no transformers Trainer here
        arguments["log_extra"] = arguments["log_metric"] = _ignore
        arguments |= options
        return _call(function, {name: value for name, value in arguments.items() if accepts(name)})

    return call


def call_verl(function: Callable[..., Any], options: Mapping[str, Any]) -> CallBatch:
    """Call by verl's convention: `compute_score(data_source, solution_str, ground_truth, extra_info)`, row by row.

    The result is a number, or a dict with one under `score`. `ground_truth` is the row's `reward_model.ground_truth`,
    else its answer.
    """
    accepts = _accepted(function)

    def call_row(row: ScoreRequest) -> Any:
        model = row.columns.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        arguments = {
            "data_source": row.columns.get("data_source", ""),
            "solution_str": row.completion,
            "ground_truth": row.answer if truth is None else truth,
            "extra_info": row.columns.get("extra_info"),
            **options,
        }
        result = _call(function, {name: value for name, value in arguments.items() if accepts(name)})
        if isinstance(result, Mapping):
            if "score" not in result:
                raise ValueError(f"returned a dict without 'score'; its keys: {', '.join(map(str, result)) or 'none'}")
            return result["score"]
        return result

    return lambda rows: [call_row(row) for row in rows]


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a user's function. Raises MissingColumn where it fails for want of a column or an argument."""
    try:
        return awaited(function(**arguments))
    except (KeyError, TypeError) as error:
        if (problem := _missing(function, arguments, error)) is None:
            raise
        raise MissingColumn(problem).with_traceback(error.__traceback__) from error


def _missing(function: Callable[..., Any], arguments: Mapping[str, Any], error: KeyError | TypeError) -> str | None:
    """Say what the rows do not give, if that is why the call failed: only where the function's own line shows it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is _call.__code__:  # the call itself was refused
        return str(error) if isinstance(error, TypeError) and "argument" in str(error) else None
    code, own = trace.tb_frame.f_code, getattr(inspect.unwrap(function), "__code__", None)
    within = own is not None and code.co_filename == own.co_filename and code.co_name.startswith("<")  # as <listcomp>
    if code is not own and not within:
        return None
    line = linecache.getline(code.co_filename, trace.tb_lineno)
    if isinstance(error, TypeError):
        absent = arguments.get("extra_info", ...) is None and "extra_info[" in line
        return "needs the column 'extra_info', which the rows do not have" if absent else None
    key = error.args[0] if error.args else None
    for parameter in inspect.signature(function).parameters.values():
        whole = parameter.kind is parameter.VAR_KEYWORD
        value = trace.tb_frame.f_locals.get(parameter.name)
        if f"{parameter.name}[" in line and isinstance(value, Mapping) and key not in value:
            if whole:
                return f"needs the column {key!r}, which the rows do not have"
            if parameter.name == "extra_info":
                return f"needs {key!r} in the column 'extra_info', where the row does not have it"
    return None


def _columns(row: ScoreRequest) -> dict[str, Any]:
    return {"answer": row.answer, **row.columns} if row.answer is not None else dict(row.columns)


def _prompt(row: ScoreRequest, chat: bool) -> Any:
    if not chat:
        return row.prompt_text
    return [dict(message) for message in row.messages] or [{"role": "user", "content": row.prompt_text}]


def _messages(row: ScoreRequest) -> list[dict[str, Any]]:
    """The completion as chat messages: with an environment all turns, what it answered among them."""
    return [dict(message) for message in row.turns] or [{"role": "assistant", "content": row.completion}]


def _accepted(function: Callable[..., Any]) -> Callable[[str], bool]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return lambda _: True
    return parameters.__contains__


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for TRL's logging hooks: the metrics of a reward are its parts here."""


_LOOP: list[asyncio.AbstractEventLoop] = []


def awaited(result: Any) -> Any:
    """Wait for the result of an async function, on one event loop for the life of the process."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # few rewards need it

    if not _LOOP:
        _LOOP.append(asyncio.new_event_loop())

    async def wait() -> Any:
        return await result

    return _LOOP[0].run_until_complete(wait())
