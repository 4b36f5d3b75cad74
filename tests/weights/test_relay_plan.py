"""Who is a member of the broadcast group and who follows a neighbour: a law, and the cases that users have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.weights.relay_plan import Place, Seat, seat

PLACES = st.sampled_from(["", "x", "y", "z"])


@given(st.lists(PLACES, max_size=12), PLACES, st.integers(1, 3))
def test_everyone_gets_the_weights_once_and_a_place_has_one_member(places, sender, ranks):
    names = [f"w{number}" for number in range(len(places))]
    shared = dict(zip(names, places, strict=True))
    seating = seat(names, shared, sender, ranks_per_worker=ranks, token="t")
    assert sorted(seating.seats) == sorted(names)
    followers = {name: found for name, found in seating.seats.items() if found.hub and not found.followers}
    members = {name: found for name, found in seating.seats.items() if name not in followers}
    taken = [found.rank + offset for found in members.values() for offset in range(ranks)]
    assert sorted(taken) == list(range(1, seating.world_size)), "members take all ranks of the group"
    numbers = [found.rank for found in followers.values()]
    assert sorted(numbers) == list(range(seating.world_size, seating.world_size + len(followers)))
    hubs = {found.hub: (shared[name], found.followers) for name, found in members.items() if found.hub}
    if seating.hub:
        hubs[seating.hub] = (sender, seating.followers)
    for name, found in followers.items():
        assert hubs[found.hub][0] == shared[name] != "", "the hub is a neighbour"
    expected = sorted(number for _, behind in hubs.values() for number in behind)
    assert sorted(numbers) == expected, "each is awaited by one hub, and no hub awaits anybody else"
    if ranks > 1:
        assert not followers
    else:
        places_of_members = [shared[name] for name in members if shared[name]]
        assert len(set(places_of_members)) == len(places_of_members), "NCCL: one process a card"
        assert not sender or sender not in places_of_members, "the sender is in the group itself"


def test_cases():
    alone = seat(["a", "b"], {"a": "n/0", "b": "n/1"}, "n/2", token="t")
    assert (alone.world_size, alone.hub, alone.seats) == (3, "", {"a": Seat(1), "b": Seat(2)})
    pair = seat(["a", "b", "c"], {"a": "n/0", "b": "n/0", "c": "n/1"}, "n/2", token="t")
    assert pair.world_size == 3
    assert pair.seats == {"a": Seat(1, "t.1", (3,)), "b": Seat(3, "t.1"), "c": Seat(2)}
    one_card = seat(["a", "b"], {"a": "n/0", "b": "n/0"}, "n/0", token="t")
    assert (one_card.world_size, one_card.hub, one_card.followers) == (1, "t.sender", (1, 2))
    assert one_card.seats == {"a": Seat(1, "t.sender"), "b": Seat(2, "t.sender")}


def test_what_neighbours_share():
    assert Place("n", "3").shared("card") == "n/3"
    assert Place("n", "3").shared("node") == Place("n").shared("node") == "n"
    assert Place("n").shared("card") == Place("", "3").shared("card") == Place().shared("node") == ""
