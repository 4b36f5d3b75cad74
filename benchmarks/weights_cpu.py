"""How fast a version travels over gloo on one machine: seconds and GB/s by number of receivers.

    python -m benchmarks.weights_cpu [--megabytes 500] [--receivers 1 2 3] [--repeats 3]

Sender and receivers are processes of their own. A publish counts from the first gather until the last receiver has
copied every tensor into parameters of its own (what an engine does with them); GB/s are bytes of one version over
that time, so a group of three delivers three times as much. The first publish of a group, which also allocates its
buffers, is given apart. Writes `benchmarks/results/weights_cpu.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.weights.fingerprint import combined, fingerprints
from pods_cluster.weights.protocol import Invitation, TensorSpec, WeightUpdate, plan_buckets
from pods_cluster.weights.receiver import make_receiver
from pods_cluster.weights.sender import WeightSender

RESULTS = Path(__file__).parent / "results" / "weights_cpu.json"
TIMEOUT = 120.0
HIDDEN = 1024


class Parameters:
    """A float32 model of about the given size: matrices of 4 MiB and 16 MiB, vectors between them."""

    def __init__(self, megabytes: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        while sum(tensor.nbytes for tensor in self.tensors.values()) < megabytes * 1e6:
            layer = f"layers.{len(self.tensors) // 3}"
            self.tensors[f"{layer}.attention"] = torch.randn(HIDDEN, HIDDEN)
            self.tensors[f"{layer}.norm"] = torch.randn(HIDDEN)
            self.tensors[f"{layer}.mlp"] = torch.randn(4 * HIDDEN, HIDDEN)

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in self.tensors.items())

    def gather(self, start: int, stop: int) -> list[torch.Tensor]:
        return list(self.tensors.values())[start:stop]


def receive(pipe: Connection, invitation: Invitation, update: WeightUpdate, publishes: int) -> None:
    torch.set_num_threads(1)
    held = {spec.name: torch.zeros(spec.shape) for spec in update.tensors}
    receiver = make_receiver(invitation)

    def load(rows: list[tuple[TensorSpec, torch.Tensor]]) -> None:
        for spec, tensor in rows:
            held[spec.name].copy_(tensor)

    for _ in range(publishes):
        pipe.recv()
        receiver.receive(update, load)
        pipe.send(None)
    pipe.send(combined(fingerprints(held)))
    receiver.close()


def publish_to(receivers: int, source: Parameters, bucket_megabytes: int, repeats: int) -> dict[str, Any]:
    update = WeightUpdate(1, source.specs(), plan_buckets(source.specs(), bucket_megabytes * 2**20), TIMEOUT)
    sender = WeightSender(source, 0, "127.0.0.1")
    host, port = sender.open("gloo", "benchmark", receivers, TIMEOUT)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for place in range(receivers):
        ours, theirs = context.Pipe()
        invitation = Invitation("gloo", host, port, receivers + 1, place + 1, "benchmark", TIMEOUT)
        process = context.Process(target=receive, args=(theirs, invitation, update, repeats + 1), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    sender.connect(TIMEOUT)

    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(None)
        sender.send(update)
        for pipe in pipes:
            pipe.recv()
        seconds.append(time.perf_counter() - began)
    sent = combined(sender.fingerprints())
    if any(pipe.recv() != sent for pipe in pipes):
        raise SystemExit("a receiver holds other bytes than were sent")
    sender.close()
    for process in processes:
        process.join()
    median = statistics.median(seconds[1:])
    return {
        "receivers": receivers,
        "bytes": update.nbytes,
        "buckets": len(update.buckets),
        "first_seconds": round(seconds[0], 3),
        "seconds": [round(value, 3) for value in seconds[1:]],
        "median_seconds": round(median, 3),
        "gb_per_second": round(update.nbytes / median / 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    host = machine()
    source = Parameters(options.megabytes)
    began = time.perf_counter()
    fingerprints(source.tensors)
    fingerprint_seconds = time.perf_counter() - began
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    rows = [publish_to(count, source, options.bucket_megabytes, options.repeats) for count in options.receivers]

    table = Table("receivers", "GB", "median s", "first s", "GB/s")
    for row in rows:
        table.add_row(
            str(row["receivers"]),
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['median_seconds']:.2f}",
            f"{row['first_seconds']:.2f}",
            f"{row['gb_per_second']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(f"fingerprints: {size / fingerprint_seconds / 1e9:.2f} GB/s on one thread")
    result = {
        "machine": host,
        "bucket_megabytes": options.bucket_megabytes,
        "publish": rows,
        "fingerprint_gb_per_second": round(size / fingerprint_seconds / 1e9, 3),
    }
    write_result(RESULTS, result)


if __name__ == "__main__":
    main()
