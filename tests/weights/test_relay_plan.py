"""Who is a member of the broadcast group and who follows a neighbour: a law, and the cases that users have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.weights.relay_plan import ReceiverRole, WorkerLocation, plan_relay

PLACES = st.sampled_from(["", "x", "y", "z"])


@given(st.lists(PLACES, max_size=12), PLACES, st.integers(1, 3))
def test_everyone_gets_the_weights_once_and_a_place_has_one_member(places, sender, ranks):
    names = [f"w{number}" for number in range(len(places))]
    shared = dict(zip(names, places, strict=True))
    plan = plan_relay(names, shared, sender, ranks_per_worker=ranks, token="t")
    assert sorted(plan.roles) == sorted(names)
    followers = {name: found for name, found in plan.roles.items() if found.hub and not found.followers}
    members = {name: found for name, found in plan.roles.items() if name not in followers}
    taken = [found.rank + offset for found in members.values() for offset in range(ranks)]
    assert sorted(taken) == list(range(1, plan.world_size)), "members take all ranks of the group"
    numbers = [found.rank for found in followers.values()]
    assert sorted(numbers) == list(range(plan.world_size, plan.world_size + len(followers)))
    hubs = {found.hub: (shared[name], found.followers) for name, found in members.items() if found.hub}
    if plan.hub:
        hubs[plan.hub] = (sender, plan.followers)
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
    alone = plan_relay(["a", "b"], {"a": "n/0", "b": "n/1"}, "n/2", token="t")
    assert (alone.world_size, alone.hub, alone.roles) == (3, "", {"a": ReceiverRole(1), "b": ReceiverRole(2)})
    pair = plan_relay(["a", "b", "c"], {"a": "n/0", "b": "n/0", "c": "n/1"}, "n/2", token="t")
    assert pair.world_size == 3
    assert pair.roles == {"a": ReceiverRole(1, "t.1", (3,)), "b": ReceiverRole(3, "t.1"), "c": ReceiverRole(2)}
    one_card = plan_relay(["a", "b"], {"a": "n/0", "b": "n/0"}, "n/0", token="t")
    assert (one_card.world_size, one_card.hub, one_card.followers) == (1, "t.sender", (1, 2))
    assert one_card.roles == {"a": ReceiverRole(1, "t.sender"), "b": ReceiverRole(2, "t.sender")}


def test_processes_share_a_card_or_a_node():
    assert WorkerLocation("n", "3").shared_resource("card") == "n/3"
    assert WorkerLocation("n", "3").shared_resource("node") == "n"
    assert WorkerLocation("n").shared_resource("node") == "n"
    assert WorkerLocation("n").shared_resource("card") == ""
    assert WorkerLocation("", "3").shared_resource("card") == ""
    assert WorkerLocation().shared_resource("node") == ""
