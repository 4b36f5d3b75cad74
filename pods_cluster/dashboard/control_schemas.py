"""Requests that change a run or sign a client in, and their responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

MAX_WORKERS = 4096


class Login(BaseModel):
    token: str = Field(min_length=1, max_length=1000)


class Session(BaseModel):
    """The rights of this client."""

    local: bool = Field(description="On this machine: reading is open.")
    signed_in: bool = Field(description="Has given the token: changes are open.")
    controls: bool = Field(description="The server can reach live runs.")


Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class ScaleRequest(BaseModel):
    """New numbers of workers; a pool left out stays as it is."""

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
    """Reason for ending the run."""

    model_config = ConfigDict(extra="forbid")
    # it is shown on terminals: nothing that moves a cursor
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = (
        "stopped from the dashboard"
    )


class Accepted(BaseModel):
    """A request that the run has accepted."""

    accepted: Literal[True] = True
    detail: str
