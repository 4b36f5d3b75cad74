"""Parameters of a vLLM model by their Hugging Face names: which there are, and what the engine computes with.

vLLM fuses projections (`qkv_proj`, `gate_up_proj`), pads the vocabulary, shares all of it out among tensor-parallel
workers, and on a CPU packs weights into oneDNN's own format and throws the originals away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pods_cluster.generation.engines.vllm.compat import (
    ColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pods_cluster.weights.sharded_fingerprint import Shard, ShardSum, shard_sums

_PROBE_COLUMNS = 1024
# Fields of vLLM's WeightsMapper that rename; its others say what is fused, and name suffixes of scales.
_RENAMINGS = ("orig_to_new_renaming", "orig_to_new_regex", "orig_to_new_substr", "orig_to_new_prefix")


def expected_names(model: torch.nn.Module) -> set[str] | None:
    """Names that a full update must hold; None where they cannot be told (renamed or quantised parameters)."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if getattr(model, "quant_config", None) is not None or any(getattr(mapper, name, None) for name in _RENAMINGS):
        return None
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    names: set[str] = set()
    for name, _ in model.named_parameters():  # a tied parameter comes once, under its first name
        names.update(unfused(name, packed))
    return names


def repack_tied_heads(model: Any) -> None:
    """Pack tied output heads again: on a CPU such a head keeps a packed copy of the old embedding."""
    if next(model.parameters()).device.type != "cpu":
        return
    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    for module in heads:
        if module.weight.numel() and not module.weight.is_meta:
            module.quant_method.process_weights_after_loading(module)


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """This worker's part of a parameter, by its Hugging Face name.

    `tensor` is the `shard` of the whole: a view of the storage that the engine computes from, unless that is packed
    (`is_packed`).
    """

    name: str
    tensor: Shaped[Tensor, ...]
    shard: Shard


def local_parameters(model: torch.nn.Module) -> Iterator[LocalParameter]:
    """All parameters that this worker computes with.

    On a CPU a packed weight is read back by multiplying it with the identity: exact, but for a negative zero, which
    comes back positive.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            tensor: Tensor = parameter.data
            if name == "weight" and is_packed(module):
                tensor = _unpacked(module)
            elif parameter.data_ptr() in seen:
                continue
            else:
                seen.add(parameter.data_ptr())
            names = unfused(f"{prefix}.{name}", packed)
            shards = _shards(module, name, tensor, len(names))
            for single, (part, shard) in zip(names, shards, strict=True):
                yield LocalParameter(single, part, shard)


def local_sums(model: torch.nn.Module) -> dict[str, ShardSum]:
    """This worker's part of the fingerprints of all parameters; `sharded_fingerprint.joined` makes them whole."""
    return shard_sums((item.name, item.tensor, item.shard) for item in local_parameters(model))


def _shards(module: Any, name: str, tensor: Shaped[Tensor, ...], count: int) -> list[tuple[Shaped[Tensor, ...], Shard]]:
    """`tensor`, parameter `name` of `module`, as its `count` fused parts, and where each lies in its whole."""
    if isinstance(module, VocabParallelEmbedding):
        own = module.shard_indices
        rows = tensor[: own.org_vocab_end_index - own.org_vocab_start_index]  # without padding
        return [(rows, Shard((module.org_vocab_size, *tensor.shape[1:]), 0, own.org_vocab_start_index))]
    if isinstance(module, RowParallelLinear):
        if name != "weight" or tensor.ndim < 2 or module.tp_size == 1:
            return [(tensor, Shard(tuple(tensor.shape)))]
        width = tensor.shape[1]
        return [
            (tensor, Shard((tensor.shape[0], width * module.tp_size, *tensor.shape[2:]), 1, width * module.tp_rank))
        ]
    if isinstance(module, QKVParallelLinear) and count == 3:
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        sizes = [n * s for n, s in zip(heads, (module.head_size, module.head_size, module.v_head_size), strict=True)]
        # Where there are more workers than key/value heads, several hold the same one.
        ranks = [module.tp_rank, *[module.tp_rank // module.num_kv_head_replicas] * 2]
        groups = [module.tp_size, *[module.tp_size // module.num_kv_head_replicas] * 2]
    elif isinstance(module, ColumnParallelLinear):
        wholes: list[int] = (
            list(getattr(module, "output_sizes", [])) if count > 1 else [tensor.shape[0] * module.tp_size]
        )
        sizes = [size // module.tp_size for size in wholes]
        ranks, groups = [module.tp_rank] * count, [module.tp_size] * count
    else:  # every worker holds all of it
        sizes = [tensor.shape[0]] if count == 1 and tensor.ndim else list(getattr(module, "output_sizes", []))
        ranks, groups = [0] * len(sizes), [1] * len(sizes)
    if not tensor.ndim:
        return [(tensor, Shard(()))]
    rest = tensor.shape[1:]
    return [
        (part, Shard((size * group, *rest), 0, size * rank))
        for part, size, rank, group in zip(tensor.split(sizes), sizes, ranks, groups, strict=True)
    ]


def unfused(name: str, packed: dict[str, list[str]]) -> list[str]:
    """Hugging Face names of the parameters that vLLM keeps as `name`."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in packed and len(packed[part]) > 1:
            return [".".join([*parts[:place], single, *parts[place + 1 :]]) for single in packed[part]]
    return [name]


def is_packed(module: Any) -> bool:
    """Whether the engine multiplies with a packed copy (a CPU may); an embedding looks its rows up in the weight."""
    multiply = getattr(module, "cpu_linear", torch.nn.functional.linear)
    if multiply is torch.nn.functional.linear or module.weight.is_meta:
        return False
    return isinstance(module, ParallelLMHead) or not isinstance(module, VocabParallelEmbedding)


def _unpacked(module: Any) -> Float[Tensor, "out in"]:
    """The weight that `cpu_linear` multiplies with, from its products with unit vectors."""
    size = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
    if size is None:
        size = module.weight.shape[1]
    dtype = module.weight.dtype
    columns = []
    for start in range(0, size, _PROBE_COLUMNS):
        count = min(_PROBE_COLUMNS, size - start)
        unit = torch.zeros(count, size, dtype=dtype)
        unit[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(module.cpu_linear(unit, module.weight, None).T)
    return torch.cat(columns, dim=1).contiguous()
