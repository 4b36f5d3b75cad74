"""Ray's global control store (GCS) of a local cluster: it keeps its tables on disk and is started again when it dies.

Ray loads the tables from RocksDB then, and everything else in the cluster waits for it, at most 60 s
(`RAY_gcs_rpc_server_reconnect_timeout_s`). On clusters that others have started that is theirs to do (docs/reliability.md).
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from pods_cluster.stopped_process import stays_stopped_here

LOOK_SECONDS = 0.5
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 25.0)
"""Seconds before each start in a row of one that does not stay up, say as another process has its port for a moment; one that
dies on and on ends the run as Ray has it."""
STAYS_SECONDS = 30.0
"""One that was up for so long begins the row anew."""
_FOLDER = f"pods-cluster-{os.getuid()}-gcs"

log = logging.getLogger(__name__)


def table_settings() -> dict[str, Any]:
    """Settings (`_system_config`) with which a cluster keeps its tables on disk; empty where this release of Ray cannot, or
    something else was asked for.

    The folder goes when this process ends; those of processes that were killed go now. Raises OSError.
    """
    from ray._private.node import Node

    if not hasattr(Node, "_is_rocksdb_gcs") or "RAY_gcs_storage" in os.environ or "RAY_REDIS_ADDRESS" in os.environ:
        return {}
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}-*"):
        if (pid := left.name.split("-")[-2]).isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER}-{os.getpid()}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"gcs_storage": "rocksdb", "gcs_storage_path": folder}


def start_keeper() -> None:
    """Start to watch over the GCS of the cluster that this process has started, as long as that is up."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is not None and getattr(node, "_is_rocksdb_gcs", bool)():
        threading.Thread(target=_keep, args=(node,), name="GCS keeper", daemon=True).start()


def _keep(node: Any) -> None:
    from ray._private import ray_constants

    def process(kind: str) -> Any:
        found = node.all_processes.get(kind)
        return found[0].process if found else None

    failures, started = 0, time.monotonic()
    while True:  # what this thread has started ends with it
        time.sleep(LOOK_SECONDS)
        raylet, gcs = process(ray_constants.PROCESS_TYPE_RAYLET), process(ray_constants.PROCESS_TYPE_GCS_SERVER)
        if raylet is None or raylet.poll() is not None:
            return  # the cluster ends: the raylet goes first
        if gcs is not None and gcs.poll() is None and not stays_stopped_here(gcs.pid):
            continue
        failures = 0 if time.monotonic() - started > STAYS_SECONDS else failures + 1
        exit_code = gcs.poll() if gcs is not None else None
        if failures == len(PAUSES):
            log.warning("Ray's GCS does not stay up (exit code %s), so Ray will end the run", exit_code)
            return
        log.warning("Ray's GCS is gone (exit code %s); it is started again", exit_code)
        time.sleep(PAUSES[failures])
        if raylet.poll() is not None:
            return
        started = time.monotonic()
        try:
            node.kill_gcs_server(check_alive=False)
            node.start_gcs_server()
        except Exception as error:
            log.warning("Ray's GCS could not be started again: %s", error)
