"""The start of a generator worker: its engine, and beside it the processes that score."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pods_cluster.config import Config
from pods_cluster.generation.engine import Engine, EngineError
from pods_cluster.generation.turns import ENVIRONMENT

SWITCH_SECONDS = 0.0002
"""Time after which a thread of a worker gives up the interpreter to one that asks for it. The engine's thread asks many
times a step; with Python's 5 ms it would wait that long behind a thread that decodes completions."""


@dataclass(frozen=True, slots=True)
class Started:
    """The parts of a worker that has started."""

    engine: Engine
    tokenizer: Any
    scorers: Any


def start_engine(config: Config) -> Started:
    """Start the engine in this thread: scorers start meanwhile, their processes take a while to import.

    Raises what either of them raises; the other is ended then.
    """
    # Imported here and not by the worker's constructor: that takes seconds, and the constructor's end tells that Ray has
    # placed the worker.
    import torch
    from transformers import AutoTokenizer

    from pods_cluster.generation.engines.factory import make_engine
    from pods_cluster.scoring import ScorerPool

    sys.setswitchinterval(SWITCH_SECONDS)
    torch.set_num_threads(config.generator.threads or max(1, int(config.generator.cpus_per_worker)))
    model = config.model
    with ThreadPoolExecutor(1) as pool:
        beside = () if config.environment is None else (ENVIRONMENT,)
        scorers = pool.submit(ScorerPool, config.reward, config.scoring, beside=beside)
        try:
            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
                )
            except Exception as error:  # what broken settings raise is of every kind
                raise EngineError(
                    f"model.path: the tokenizer of {model.path!r} cannot be loaded ({type(error).__name__}: {error}); copy "
                    f"its files again"
                ) from error
            engine = make_engine(config, tokenizer)
        except BaseException:
            if scorers.exception() is None:
                scorers.result().close()
            raise
        return Started(engine, tokenizer, scorers.result())
