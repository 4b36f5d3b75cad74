"""Protocol between learner and generators for moving weights: invitations, tensor specs, updates, errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from torch import Tensor


class WeightTransferError(Exception):
    """A rendezvous or transfer that failed or exceeded its deadline.

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
    """The learner gathered other tensors than it announced: no receiver is at fault, and a second attempt would fail too."""


class WeightLoadError(WeightTransferError):
    """The engine could not load the bytes that arrived: the fault is this receiver's own, not the group's."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Invitation of a receiver to a broadcast group, in which learner rank 0, the sender, has rank 0.

    `rank` is the receiver's first rank (an engine with tensor parallelism takes that and the next ones). `name` is
    unique per membership. `timeout` (seconds) bounds the rendezvous. `bucket_bytes` is the size that buckets are cut to
    (vLLM's packed transfer needs it at the start).

    A receiver with a `hub` takes part in a relay (see `relay`). With `followers` (their ranks) it opens the hub and
    passes the weights on to them. Without, it is a follower itself: no member of the group, with a rank of `world_size`
    or more.
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
    def is_follower(self) -> bool:
        """Whether the receiver gets the weights from a relay hub."""
        return bool(self.hub) and not self.followers


DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


@dataclass(frozen=True, slots=True)
class AdapterFactor:
    """Factor of a low-rank adapter on the parameter `weight`, which becomes base + scale x B A.

    `side` says whether the tensor is A [rank, in] or B [out, rank]; both are sent in one update. If `transposed`, the
    parameter is [in, out], and the transpose of the product is added.
    """

    weight: str
    side: Literal["A", "B"]
    scale: float
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Spec of a tensor in an update: Hugging Face name, full shape, torch dtype name (`bfloat16`).

    With a `factor`, the tensor is not a parameter of the model but a factor of an adapter on one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    factor: AdapterFactor | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes. Raises ValueError for a dtype that cannot be sent."""
        try:
            return self.numel * DTYPE_BYTES[self.dtype]
        except KeyError:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r} cannot be sent; one of {', '.join(DTYPE_BYTES)}"
            ) from None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Description of one version's transfer: tensors in the order they are sent, cut into buckets of consecutive ones.

    `buckets` are [start, stop) index pairs into `tensors`; each bucket is sent as one contiguous buffer of bytes.
    `timeout` (seconds) bounds the whole transfer.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[tuple[int, int], ...]
    timeout: float

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def adapter(self) -> bool:
        """Whether the update is only an adapter on the weights of `model.path`, which the receivers hold.

        Raises ValueError for a mixture of parameters and factors.
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

    With `overfill` a bucket ends with the tensor that takes it past `bucket_bytes`. This is the rule of vLLM's packed
    transfer, whose receivers work out the buckets from it.
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
    """Source of the learner's weights for the sender. Every learner rank holds one, and all call it in step."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors of a full version, in a fixed order, without tied parameters a second time."""
        ...

    def gather(self, start: int, stop: int) -> list[Shaped[Tensor, "*shape"]]:
        """Full tensors `start` to `stop` of `specs()`, on the sender's device, in the dtype of their spec.

        A collective under ZeRO-3: every rank calls it with the same range. Only rank 0 is certain to get the tensors
        (others may return []), and they are valid only until the next call.
        """
        ...
