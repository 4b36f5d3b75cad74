"""Making of the engine that the configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from pods_cluster.config import Config
from pods_cluster.config.builtin_options import wrong_options
from pods_cluster.generation.engine import Engine, EngineError
from pods_cluster.generation.node_notice import node_labels


def make_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine of `generator.engine` with the weights of `model.path`, at version -1. Raises EngineError."""
    kind = config.generator.engine
    if kind == "transformers":
        return _transformers(config, tokenizer)
    if kind == "paced":
        return _paced(config, tokenizer)
    try:
        from pods_cluster.generation.engines.vllm.start import make_vllm_engine  # type: ignore[import-not-found]
    except ImportError as error:
        raise EngineError(
            f"generator.engine: vllm cannot be imported here ({error}); install the extra `gpu`, or use "
            f"generator.engine: transformers"
        ) from error
    return make_vllm_engine(config, tokenizer)


def _transformers(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    from pods_cluster.generation.engines.builtin.engine import TransformersEngine
    from pods_cluster.generation.engines.builtin.hf_model import end_token_ids, load_model

    options = dict(config.generator.engine_options)
    for problem in wrong_options(options):
        raise EngineError(problem)
    gigabytes = options.get("kv_cache_gb")
    model = load_model(
        config.model.path,
        dtype=config.model.dtype,
        device=str(options.get("device", "cpu")),
        trust_remote_code=config.model.trust_remote_code,
        revision=config.model.revision,
        overrides=config.model.overrides,
    )
    return TransformersEngine(
        model,
        end_token_ids(model, tokenizer),
        max_sequences=config.generator.max_sequences,
        kv_bytes=None if gigabytes is None else int(gigabytes * 2**30),
        prefill_tokens=int(options.get("prefill_tokens", 4096)),
        tokenizer=tokenizer,
        keep_cache=config.weights.keep_cache,
    )


def _paced(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    from pods_cluster.generation.engines.paced.engine import PacedEngine

    given = ("tokens", "end_id", "max_sequences")
    known = tuple(name for name in inspect.signature(PacedEngine.__init__).parameters if name not in ("self", *given))
    options = dict(config.generator.engine_options)
    _check_options(options, known, "paced")
    if isinstance(rates := options.get("tokens_per_second"), Mapping):
        options["tokens_per_second"] = _rate_of_this_node(rates)
    end_id = tokenizer.eos_token_id
    if not isinstance(end_id, int):
        raise EngineError(
            f"model.path: the tokenizer of {config.model.path!r} has no end token, which the paced engine needs"
        )
    special = set(tokenizer.all_special_ids)
    tokens = [token for token in range(len(tokenizer)) if token not in special]
    return PacedEngine(tokens=tokens, end_id=end_id, max_sequences=config.generator.max_sequences, **options)


def _rate_of_this_node(rates: Mapping[str, Any]) -> Any:
    """The rate of `{label: {value: rate}}` that is meant for this node."""
    field = "generator.engine_options.tokens_per_second"
    if len(rates) != 1 or not all(isinstance(values, Mapping) for values in rates.values()):
        raise EngineError(
            f"{field}: {dict(rates)}: a number, or {{LABEL: {{VALUE: number, …}}}} for nodes of several kinds"
        )
    ((label, values),) = rates.items()
    here = node_labels().get(label)
    if here not in values:
        told = f"has {label}={here}" if here is not None else f"has no label {label}"
        raise EngineError(f"{field}: {dict(values)}: this node {told}; give each kind of node its rate")
    return values[here]


def _check_options(options: Mapping[str, Any], known: tuple[str, ...], engine: str) -> None:
    for name, value in options.items():
        if name not in known:
            raise EngineError(
                f"generator.engine_options.{name}: {value!r}: the {engine} engine has no such option; "
                f"it has {', '.join(known)}"
            )
