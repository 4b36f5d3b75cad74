"""A vLLM model's parameters by their Hugging Face names: which there are, and what the engine computes with.

vLLM fuses projections (`qkv_proj`, `gate_up_proj`), pads the vocabulary, and on a CPU packs weights into oneDNN's own
format and throws the originals away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from pods_cluster.weights.fingerprint import fingerprints

_PROBE_COLUMNS = 1024
# Of vLLM's WeightsMapper; its other maps say what is fused, and name suffixes of scales.
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
    """On a CPU an output head that shares the embedding's weight keeps its packed copy of the old one: pack again."""
    if next(model.parameters()).device.type != "cpu":
        return
    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    for module in heads:
        if module.weight.numel() and not module.weight.is_meta:
            module.quant_method.process_weights_after_loading(module)


def held_fingerprints(model: torch.nn.Module) -> dict[str, str]:
    """Fingerprint of every parameter that the engine computes with, by Hugging Face name.

    On a CPU a packed weight is read back by multiplying it with the identity: exact, but for a negative zero, which
    comes back positive. Raises ValueError under tensor parallelism, where no worker holds a whole parameter.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size

    if (size := get_tensor_model_parallel_world_size()) > 1:
        raise ValueError(
            f"fingerprints: each of {size} tensor-parallel workers holds a share of every parameter; set "
            "weights.verify: false, or generator.tensor_parallel: 1"
        )
    return fingerprints(_held(model))


def _held(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            tensor: torch.Tensor = parameter.data
            if name == "weight" and _is_packed(module):
                tensor = _unpacked(module)
            elif parameter.data_ptr() in seen:
                continue
            else:
                seen.add(parameter.data_ptr())
            if isinstance(module, VocabParallelEmbedding):
                tensor = tensor[: module.org_vocab_size]
            names = unfused(f"{prefix}.{name}", packed)
            sizes = [tensor.shape[0]] if len(names) == 1 and tensor.ndim else list(getattr(module, "output_sizes", []))
            parts = tensor.split(sizes) if tensor.ndim else (tensor,)
            yield from zip(names, parts, strict=True)


def unfused(name: str, packed: dict[str, list[str]]) -> list[str]:
    """Hugging Face names of what vLLM keeps as `name`."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in packed and len(packed[part]) > 1:
            return [".".join([*parts[:place], single, *parts[place + 1 :]]) for single in packed[part]]
    return [name]


def _is_packed(module: Any) -> bool:
    """Whether the engine multiplies with a packed copy; an embedding looks its rows up in the weight itself."""
    if not hasattr(module, "cpu_linear") or module.weight.is_meta:
        return False
    return isinstance(module, ParallelLMHead) or not isinstance(module, VocabParallelEmbedding)


def _unpacked(module: Any) -> torch.Tensor:
    """The weight [out, in] that `cpu_linear` multiplies with, from its products with unit vectors."""
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
