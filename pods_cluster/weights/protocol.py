"""What learner and generators must agree on to move weights: who meets where, and what is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class WeightTransferError(Exception):
    """A rendezvous or transfer failed or outlived its deadline.

    After a failed transfer the engine holds no usable weights until a full update. `missing` are the ranks that did not
    come to a rendezvous, as far as they are known.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message, missing)
        self.message = message
        self.missing = missing

    def __str__(self) -> str:
        return self.message


class WeightSourceError(WeightTransferError):
    """The learner gathered something else than it announced: no receiver is to blame, a second attempt is in vain."""


class WeightLoadError(WeightTransferError):
    """The bytes arrived, but the engine could not take them: the fault is this receiver's own, not the group's."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """To a broadcast group of one membership: learner rank 0 (the sender) is rank 0 of it, receivers follow.

    `rank` is the receiver's first rank (an engine with tensor parallelism takes that and the next ones). `name` is
    unique a membership. `timeout` (seconds) bounds the rendezvous. `bucket_bytes` is what buckets are cut by (vLLM's
    packed transfer wants it at the start). `hub`: the receiver passes the weights on to its neighbours, the `followers`
    by their ranks; or, where there are none, it is such a follower itself (its rank is `world_size` or more, as it is
    no member of the group).
    """

    transport: str
    host: str
    port: int
    world_size: int
    rank: int
    name: str
    timeout: float
    bucket_bytes: int = 256 * 2**20
    hub: str = ""
    followers: tuple[int, ...] = ()

    @property
    def follows(self) -> bool:
        return bool(self.hub) and not self.followers


DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


@dataclass(frozen=True, slots=True)
class AdapterFactor:
    """Of a low-rank adapter: the parameter `weight` computes as base + scale x B A (its transpose if `transposed`).

    `side` says whether the tensor is A [rank, in] or B [out, rank]; both sides of a weight travel in one update.
    """

    weight: str
    side: Literal["A", "B"]
    scale: float
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter as it travels: Hugging Face name, full shape, torch dtype name (`bfloat16`).

    `factor`: the tensor is no parameter of the model itself but a factor of an adapter on one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    factor: AdapterFactor | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        try:
            return self.numel * DTYPE_BYTES[self.dtype]
        except KeyError:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r} cannot be sent; one of {', '.join(DTYPE_BYTES)}"
            ) from None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version on its way: tensors in the order they are sent, cut into buckets of consecutive tensors.

    `buckets` are [start, stop) index pairs into `tensors`; a bucket travels as one contiguous buffer of bytes.
    `timeout` (seconds) bounds the whole transfer.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[tuple[int, int], ...]
    timeout: float

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def adapter(self) -> bool:
        """Whether this is an adapter on the weights of `model.path`, which the receivers hold, and nothing else.

        Raises ValueError for a mixture, which nobody sends.
        """
        factors = sum(tensor.factor is not None for tensor in self.tensors)
        if factors not in (0, len(self.tensors)):
            raise ValueError(
                f"version {self.version}: {factors} of {len(self.tensors)} tensors are an adapter's; send whole "
                "parameters or an adapter"
            )
        return factors > 0


def plan_buckets(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int, *, overfill: bool = False
) -> tuple[tuple[int, int], ...]:
    """Cut consecutive tensors into buckets of at most `bucket_bytes` (a larger tensor is a bucket of its own).

    With `overfill` a bucket closes with the tensor that takes it past `bucket_bytes`: the cut of vLLM's packed
    transfer, so that its receivers agree with the sender on where a buffer ends.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is below 1")
    buckets: list[tuple[int, int]] = []
    start, size = 0, 0
    for index, tensor in enumerate(tensors):
        if not overfill and index > start and size + tensor.nbytes > bucket_bytes:
            buckets.append((start, index))
            start, size = index, 0
        size += tensor.nbytes
        if overfill and size > bucket_bytes:
            buckets.append((start, index + 1))
            start, size = index + 1, 0
    if start < len(tensors):
        buckets.append((start, len(tensors)))
    return tuple(buckets)


class WeightSource(Protocol):
    """The learner's parameters, as the sender reads them. Every learner rank holds one and calls it in step."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """What a full version consists of, in a fixed order: no tied parameter twice, adapters merged or alone."""
        ...

    def gather(self, start: int, stop: int) -> list[Tensor]:
        """Full tensors `start` to `stop` of `specs()`, on the sender's device, in the dtype of their spec.

        A collective under ZeRO-3: every rank calls it with the same range. The tensors are only sure on rank 0 (other
        ranks may return []), and only until the next call.
        """
        ...
