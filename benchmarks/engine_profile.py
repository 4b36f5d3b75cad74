"""Where a step's time goes: the host's parts by the clock, then the card's kernels by torch's profiler.

For an engine in this process (`engine.py --profile`): steps in the middle of a round, all sequences in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

SETTLE, STEPS = 24, 16

# The first of these words in a kernel's name decides; names of other kernels fall under "other".
KINDS = {
    "attention": ("flash", "attention", "unified", "reshape_and_cache", "mha"),
    "sampling": ("gumbel", "softmax", "ranks", "temperature", "argmax", "reduce_kernel", "gather"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "splitk"),
    "fused elementwise": ("triton", "elementwise", "rms", "rotary", "silu"),
    "copies": ("memcpy", "memset"),
}


def profile(engine: Any, begin: Callable[[], object]) -> dict[str, Any]:
    """`begin` submits a full load of requests. Times are milliseconds a step."""
    core = engine._core._client.engine_core
    clock = HostClock(core)
    begin()
    steps(engine, SETTLE)
    host = clock.measure(engine)
    kernels = measure_kernels(engine)
    while engine.in_flight:
        engine.step()
    return {"host": host, **kernels}


def steps(engine: Any, count: int) -> None:
    for _ in range(count):
        if not engine.in_flight:
            raise SystemExit("--max-tokens: too few for a profile; let it be at least 64")
        engine.step()


class HostClock:
    """The host's time in each part of a step: what is left of the step's wall time is `rest` (this engine's own)."""

    def __init__(self, core: Any) -> None:
        self.seconds: dict[str, float] = {}
        self._parts = (
            (core.scheduler, "schedule"),
            (core.model_executor, "execute_model"),
            (core.model_executor, "sample_tokens"),
            (core.scheduler, "update_from_output"),
        )

    def measure(self, engine: Any) -> dict[str, float]:
        for owner, name in self._parts:
            setattr(owner, name, self._timed(getattr(owner, name), name))
        try:
            start = time.perf_counter()
            steps(engine, STEPS)
            total = time.perf_counter() - start
        finally:
            for owner, name in self._parts:
                delattr(owner, name)
        parts = dict(self.seconds, step=total)
        parts["rest"] = total - sum(self.seconds.values())
        return {name: round(1000 * value / STEPS, 2) for name, value in parts.items()}

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self._add(name, start)
            return self._waits(result) if name == "sample_tokens" else result

        return timed

    def _waits(self, future: Any) -> Any:
        """The step's result is waited for later: that time is the card's, not the host's."""
        result = getattr(future, "result", None)
        if result is None:
            return future

        def waited(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            value = result(*args, **kwargs)
            self._add("wait_and_convert", start)
            return value

        future.result = waited
        return future

    def _add(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def measure_kernels(engine: Any) -> dict[str, Any]:
    """`busy`: some kernel runs. Under the profiler the host is slower: only kernels' own times mean anything here."""
    import torch
    from torch.profiler import ProfilerActivity

    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        steps(engine, STEPS)
        torch.cuda.synchronize()
    intervals, kernels = [], {}
    for event in trace.events() or ():
        if event.device_type.name != "CUDA":
            continue
        span = event.time_range
        intervals.append((span.start, span.end))
        time_us, count = kernels.get(event.name, (0.0, 0))
        kernels[event.name] = (time_us + span.end - span.start, count + 1)
    kinds: dict[str, float] = {}
    for name, (time_us, _) in kernels.items():
        kinds[kind(name)] = kinds.get(kind(name), 0.0) + time_us / 1000 / STEPS
    top = sorted(kernels.items(), key=lambda item: -item[1][0])[:25]
    return {
        "busy": round(covered(intervals) / 1000 / STEPS, 2),
        "kinds": {name: round(value, 2) for name, value in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": [
            {"name": name[:120], "ms": round(us / 1000 / STEPS, 3), "count": round(count / STEPS, 1)}
            for name, (us, count) in top
        ],
    }


def kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the intervals' union."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
