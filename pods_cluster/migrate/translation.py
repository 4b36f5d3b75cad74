"""A translation of another trainer's settings: the fields that they become here, and those that did not carry over.

Names that mean the same as one of our fields are in `config.foreign_names`, for all trainers together. What needs more
than a new name (batch sizes, lengths, rewards) is in the module of its trainer, which reads it from here one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.config.foreign_names import field_of


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A setting that did not carry over. `matters`: without it the run computes something else than the other trainer's."""

    name: str
    value: Any
    reason: str
    matters: bool = False

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.name}: {shown if len(shown) <= 60 else shown[:57] + '…'}: {self.reason}"


@dataclass(slots=True)
class Translation:
    """`settings` of the other trainer; `fields` are ours by their path. `take` reads a setting, `finish` all the rest."""

    settings: Mapping[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these settings that is given, and counts them all as read."""
        self._taken.update(names)
        return next((self.settings[name] for name in names if self.settings.get(name) is not None), default)

    def copy(self, name: str, path: str, *, default: Any = None) -> Any:
        """Read a setting into the field of this path, where it is given or has a default."""
        value = self.take(name, default=default)
        if value is not None:
            self.fields[path] = value
        return value

    def drop(self, name: str, reason: str, *, unless: Iterable[Any] = (None, False), matters: bool = True) -> None:
        """Leave a setting out with the reason, unless it has one of these values, which change nothing."""
        value = self.take(name)
        if not any(value == other and type(value) is type(other) for other in unless):
            self.left_out.append(LeftOut(name, value, reason, matters))

    def finish(self, ignored: Mapping[str, str]) -> Translation:
        """Read what is left: by the shared table of names, else left out. `ignored` has reasons for names (or their last
        part) that have no counterpart and change no result."""
        for name, value in self.settings.items():
            if name in self._taken or value is None:
                continue
            reason = ignored.get(name) or ignored.get(name.rpartition(".")[2])
            known = field_of(name)
            if reason is None and known is not None and not known.note:
                own = known.own(value)
                if own is not None:
                    self.fields.setdefault(known.path, own)
                else:
                    self.left_out.append(LeftOut(name, value, f"{known.path} has no such value", True))
            elif reason is not None:
                self.left_out.append(LeftOut(name, value, reason))
            elif known is not None:
                self.left_out.append(LeftOut(name, value, known.text(value)))
            else:
                self.left_out.append(LeftOut(name, value, "has no counterpart here", True))
        return self
