"""Changing a live run: what the dashboard asks for, and from whom."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

MAX_WORKERS = 4096


class NotLive(Exception):
    """The run is not alive where the controls look."""


class ControlFailed(Exception):
    """A live run did not do what was asked; the text says why."""


Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class ScaleRequest(BaseModel):
    """How many workers the pools shall have; a pool left out stays as it is."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"anyOf": [{"required": ["generators"]}, {"required": ["learners"]}]}
    )
    generators: Workers | SkipJsonSchema[None] = None
    learners: Workers | SkipJsonSchema[None] = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_something(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, count in value.items():
                # 3.0 is a whole number in JSON; true, null and "3" are none
                if isinstance(count, bool) or not isinstance(count, (int, float)):
                    raise ValueError(f"{name}: give a whole number of workers, or leave it out")
            if not value:
                raise ValueError("give generators, learners, or both")
        return value


class StopRequest(BaseModel):
    """Why the run shall end."""

    model_config = ConfigDict(extra="forbid")
    reason: Annotated[str, Field(min_length=1, max_length=500)] = "stopped from the dashboard"


class WorkerState(BaseModel):
    """One worker of a live run."""

    name: str
    role: Literal["controller", "selector", "generator", "learner"]
    state: str
    node: str | None = None
    pid: int | None = None
    detail: str | None = None


class LiveStatus(BaseModel):
    """What a live run says about itself now."""

    live: bool
    step: int | None = None
    version: int | None = None
    generators: int | None = None
    learners: int | None = None
    target_generators: int | None = None
    target_learners: int | None = None
    stopping: str | None = None
    note: str | None = None
    workers: list[WorkerState] = []


class Done(BaseModel):
    """A request that the run has taken."""

    accepted: Literal[True] = True
    detail: str


class Controls(Protocol):
    """Reaches live runs. Every call ends within its own deadline and raises NotLive or ControlFailed."""

    async def status(self, run: str) -> LiveStatus: ...

    async def scale(self, run: str, generators: int | None, learners: int | None) -> str:
        """Ask for new sizes of the pools; a sentence about what the run does with it."""
        ...

    async def stop(self, run: str, reason: str) -> str:
        """Ask the run to end after what it is doing, its state saved; a sentence."""
        ...
