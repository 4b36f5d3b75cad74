"""Who of the receivers is a member of the broadcast group, and who gets the weights from a neighbour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process computes: its Ray node, and the one card that it has a part of ("": none, or several)."""

    node: str = ""
    card: str = ""

    @classmethod
    def here(cls) -> Place:
        """Of the Ray worker that this runs in."""
        import ray

        if not ray.is_initialized():
            return cls()
        context = ray.get_runtime_context()
        cards = context.get_accelerator_ids().get("GPU", [])
        return cls(context.get_node_id(), cards[0] if len(cards) == 1 else "")

    def shared(self, by: str) -> str:
        """What this place has in common with its neighbours (`by`: card, node); "": nothing."""
        if not self.node or (by == "card" and not self.card):
            return ""
        return f"{self.node}/{self.card}" if by == "card" else self.node


@dataclass(frozen=True, slots=True)
class Seat:
    """Of one receiver: its (first) rank, and the hub that it opens for `followers` or, without any, follows."""

    rank: int
    hub: str = ""
    followers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Seating:
    """`world_size` counts the members of the broadcast group, the sender among them; followers have numbers from there
    on. `hub` and `followers` are the sender's own."""

    world_size: int
    seats: dict[str, Seat]
    hub: str = ""
    followers: tuple[int, ...] = ()


def seat(
    workers: Sequence[str],
    shared: Mapping[str, str],
    sender: str = "",
    *,
    ranks_per_worker: int = 1,
    token: str = "",
) -> Seating:
    """Seat `workers`; those whose `shared` is the same (and not ""), or the `sender`'s, are neighbours.

    The first of them becomes the member and opens a hub for the others, unless the sender itself is their neighbour.
    Engines of several ranks each (`ranks_per_worker`) have whole cards: all of them are members.
    """
    common = {name: shared.get(name, "") if ranks_per_worker == 1 else "" for name in workers}
    hubs: dict[str, str] = {}
    behind: dict[str, list[str]] = {}
    if sender:
        hubs[sender], behind[sender] = f"{token}.sender", []
    members: dict[str, int] = {}  # first rank of each
    for name in workers:
        place = common[name]
        if place and place in hubs:
            behind[place].append(name)
            continue
        members[name] = 1 + len(members) * ranks_per_worker
        if place:
            hubs[place], behind[place] = f"{token}.{len(members)}", []
    world_size = 1 + len(members) * ranks_per_worker
    numbers = {
        name: number
        for number, name in enumerate((name for names in behind.values() for name in names), start=world_size)
    }
    followers = {place: tuple(numbers[name] for name in names) for place, names in behind.items()}
    seats: dict[str, Seat] = {}
    for name in workers:
        place = common[name]
        if name in numbers:
            seats[name] = Seat(numbers[name], hubs[place])
        else:
            rank, others = members[name], followers.get(place, ())
            seats[name] = Seat(rank, hubs[place], others) if others else Seat(rank)
    own = followers.get(sender, ())
    return Seating(world_size, seats, hubs[sender] if own else "", own)
