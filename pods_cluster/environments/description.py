"""A run's questions to its environment before any rollout: its tools, its role, and the prompts of rows, if it makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.config import Config
from pods_cluster.data.errors import RowError
from pods_cluster.data.tokenizer import PromptTokenizer
from pods_cluster.environments.environment import Message
from pods_cluster.environments.host import EnvironmentFailed, EnvironmentHost, EnvironmentStartError, RunningEnvironment
from pods_cluster.environments.turn_tokens import TurnTokens


@dataclass(slots=True)
class Description:
    """An environment as prompts need it: role of its answers, tools as JSON schemas, whether it makes the prompts."""

    role: str = "user"
    tools: list[Any] = field(default_factory=list)
    prompts: bool = False


class EnvironmentDesk:
    """Asks an environment in a process of its own. Raises EnvironmentStartError where it cannot be used."""

    def __init__(self, config: Config) -> None:
        assert config.environment is not None
        self._config, self._load_timeout = config.environment, config.scoring.load_timeout
        self._host: EnvironmentHost | None = None
        self._running: RunningEnvironment | None = None
        try:
            self.description = Description(**self._ask("describe"))
        except EnvironmentFailed as error:
            raise EnvironmentStartError(f"environment.name: {self._config.name!r}: {error.message}") from error
        finally:
            self.close()

    def _start(self) -> EnvironmentHost:
        return EnvironmentHost(self._config, self._load_timeout)

    def first_prompt(self, row: Mapping[str, Any], index: int) -> str | list[Message] | None:
        """Return the prompt that the environment makes of row `index`. Raises RowError where it fails."""
        try:
            return self._ask("first_prompt", row)
        except EnvironmentFailed as error:
            raise RowError(f"environment: row {index} has no prompt: {error.kind}: {error.message}") from error

    def play(self, row: Mapping[str, Any], completion: str) -> tuple[list[Message], float | None]:
        """Play one turn: return what it answers to `completion`, and its reward. Raises EnvironmentFailed."""
        self._ask("reset", row)
        return self._ask("step", completion), self._ask("reward")

    def close(self) -> None:
        """End the environment's process; the next question starts another one."""
        if self._host is not None:
            self._host.close()
        self._host = self._running = None

    def _ask(self, method: str, argument: Any = None) -> Any:
        # schemas of tools are made by transformers, whose import counts as the environment's
        seconds = max(self._config.timeout, self._load_timeout) if method == "describe" else None
        host = self._host = self._host or self._start()

        async def ask() -> Any:
            if self._running is None:
                self._running = await host.begin()
            try:
                return await self._running.call(method, argument, seconds)
            except EnvironmentFailed:
                self._running.kill()
                self._running = None
                raise

        return host.run(ask()).result()


_DESKS: dict[str, EnvironmentDesk] = {}


def desk_of(config: Config) -> EnvironmentDesk:
    """The desk of a run's environment, one for all prompts of this process. Raises EnvironmentStartError."""
    assert config.environment is not None
    key = config.environment.model_dump_json()
    if key not in _DESKS:
        for other in _DESKS.values():
            other.close()
        _DESKS.clear()
        _DESKS[key] = EnvironmentDesk(config)
    return _DESKS[key]


def check_turns(config: Config, tokenizer: PromptTokenizer) -> None:
    """Refuse a chat template that an answer of the environment cannot be written with. Raises DataError."""
    if config.environment is not None:
        description = desk_of(config).description
        TurnTokens(config, tokenizer, description.tools).check(description.role)
