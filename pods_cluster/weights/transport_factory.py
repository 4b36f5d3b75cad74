"""Choice of a transport: rank 0's listener, and the group that an invitation leads to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pods_cluster.weights.protocol import Invitation, WeightTransferError
from pods_cluster.weights.transport import Closed, Listener, TransferGroup

if TYPE_CHECKING:
    import torch


def listen(
    transport: str,
    host: str,
    device: torch.device | None = None,
    *,
    members: bool = True,
    hub: str = "",
    followers: tuple[int, ...] = (),
) -> Listener:
    """Listen as rank 0 on an address of this host. `device` is the GPU that NCCL sends from.

    Receivers with the ranks `followers`, on this card or host, connect to the relay `hub` (see `relay`); all others are
    `members` of the broadcast group, if there are any.
    """
    if transport not in ("gloo", "nccl"):
        raise WeightTransferError(f"transport: {transport!r} is not known; one of gloo, nccl")
    listener: Listener | None = None
    if members and transport == "gloo":
        from pods_cluster.weights.gloo import GlooListener

        listener = GlooListener(host)
    elif members:
        from pods_cluster.weights.nccl import NcclListener

        listener = NcclListener(host, device)
    if not followers:
        assert listener is not None
        return listener
    from pods_cluster.weights.relay import HubListener

    return HubListener(hub, followers, listener, transport, host, device)


def join(invitation: Invitation, closed: Closed, device: torch.device | None = None) -> TransferGroup:
    """Join the group as rank `invitation.rank`; blocks until all have met, at most `invitation.timeout` seconds."""
    if not invitation.hub:
        return _join_members(invitation, closed, device)
    from pods_cluster.weights.relay import join_as_follower, join_as_hub

    if invitation.is_follower:
        return join_as_follower(invitation, closed, device)
    return join_as_hub(invitation, closed, device, _join_members)


def _join_members(invitation: Invitation, closed: Closed, device: torch.device | None) -> TransferGroup:
    """Join the broadcast group itself, as one of its members."""
    if invitation.transport == "gloo":
        from pods_cluster.weights.gloo import join_gloo

        return join_gloo(invitation, closed)
    if invitation.transport == "nccl":
        from pods_cluster.weights.nccl import join_nccl

        return join_nccl(invitation, closed, device)
    raise WeightTransferError(f"transport: {invitation.transport!r} is not known; one of gloo, nccl")
