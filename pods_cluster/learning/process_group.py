"""Process group of the learner's ranks: NCCL between GPUs, gloo between CPUs, with DeepSpeed attached to it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _set_pg_timeout

from pods_cluster.weights.protocol import WeightTransferError
from pods_cluster.weights.transport import bind

log = logging.getLogger(__name__)


class RendezvousError(Exception):
    """A rendezvous at which not all ranks came; the text names the address and the deadline."""


def open_store(host: str, world_size: int, timeout: float) -> TCPStore:
    """Open rank 0's rendezvous store, on a port that the system chooses (`store.port`), so that groups never race for one.

    It listens on `host` alone: by itself it would on all interfaces, and it has no password. Raises RendezvousError.
    """
    try:
        listener = bind(host)
    except WeightTransferError as error:
        raise RendezvousError(f"the learner's rendezvous {error}") from None
    port = int(listener.getsockname()[1])
    # The store owns the descriptor from here on.
    return TCPStore(
        host,
        port,
        world_size,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    *,
    store: TCPStore | None,
    timeout: float,
    collective_timeout: float,
) -> None:
    """Meet the other ranks (`timeout` seconds), initialise torch.distributed, and attach DeepSpeed.

    `collective_timeout` bounds every collective after that. Raises RendezvousError.
    """
    gpu = torch.cuda.is_available()
    # The five variables keep DeepSpeed from looking for an MPI launcher. A rank sees one device, so its local rank is
    # 0.
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(port)
    )
    if not gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        _choose_interface()
    try:
        if store is None:
            store = TCPStore(host, port, world_size, False, timedelta(seconds=timeout))
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=PrefixStore("pods-learner", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=collective_timeout), dist.group.WORLD)
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"learner rank {rank} of {world_size} did not meet the others at {host}:{port} in {timeout:g} s: {error}"
        ) from error
    attach_deepspeed()


def attach_deepspeed() -> None:
    """Give DeepSpeed the group that torch has initialised, without compiling its operator for CPU communication.

    On a CPU DeepSpeed compiles a shared-memory all-reduce at its first start: a minute, and a C++ compiler and ninja
    must be there. Its one user is `inference_all_reduce` (tensor-parallel inference); the collectives of ZeRO go to
    gloo anyway. So it is left out, and a machine without a compiler can train.
    """
    import deepspeed

    # by its full name: the attribute `deepspeed.comm.torch` is torch itself
    backend = importlib.import_module("deepspeed.comm.torch")
    if not hasattr(backend, "build_shm_op"):
        log.warning(
            "this DeepSpeed has no build_shm_op to leave out; it may compile an operator now, for about a minute"
        )
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    _import_muon()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _import_muon() -> None:
    """Import DeepSpeed's Muon optimiser with torch's compiler off.

    DeepSpeed imports it to compare our optimiser with it, and the module compiles a function. No rank uses it, and
    torch's compiler takes more than a second to import.
    """
    switch = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        with contextlib.suppress(ImportError):  # other versions have it elsewhere, or not at all
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def leave() -> None:
    """Leave the group and free its sockets; safe to call without one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_interface() -> None:
    """Make gloo bind to the interface of this node's Ray address, not to the one its host name resolves to."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = _node_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
