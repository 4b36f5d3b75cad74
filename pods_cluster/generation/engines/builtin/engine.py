"""The small built-in engine: continuous batching on torch and transformers, for machines without a GPU.

All rollouts in flight decode in one batch, each at its own length; finished rows are closed up at once and waiting
requests take their places between steps. A prompt is computed once for all its rollouts that are admitted together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pods_cluster.generation.engine import (
    COUNTS,
    EngineError,
    EngineStats,
    check_request,
    fill_logprobs,
    require_open,
    require_version,
)
from pods_cluster.generation.engines.builtin.admission import AdmissionQueue, prompt_batches
from pods_cluster.generation.engines.builtin.hf_model import Forward, WeightLoad
from pods_cluster.generation.engines.builtin.kv_cache import SlotCache
from pods_cluster.generation.engines.builtin.merge_adapter import AdapterLoad, BaseWeights
from pods_cluster.generation.engines.builtin.right_padding import right_padded
from pods_cluster.generation.engines.builtin.row_table import RowTable
from pods_cluster.generation.engines.builtin.teacher_forcing import score
from pods_cluster.generation.engines.cache_memory import KVBudget
from pods_cluster.generation.engines.sampling import sample
from pods_cluster.generation.engines.weight_receiving import WeightReceiving
from pods_cluster.generation.stop_strings import StopStringsByRequest
from pods_cluster.types import FinishReason, Rollout, RolloutRequest
from pods_cluster.weights.fingerprint import fingerprints
from pods_cluster.weights.protocol import WeightUpdate


class TransformersEngine(WeightReceiving):
    """`Engine` over a Hugging Face causal LM.

    `end_ids` end a completion (each request may add its own), at most `max_sequences` rollouts decode at once, their
    cache within `kv_bytes`; prompts are computed in batches of up to `prefill_tokens` tokens. `tokenizer`: for requests
    with stop strings. `keep_cache`: rollouts in flight keep their keys and values over an update.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        *,
        max_sequences: int = 256,
        kv_bytes: int | None = None,
        prefill_tokens: int = 4096,
        tokenizer: PreTrainedTokenizerBase | None = None,
        keep_cache: bool = False,
    ) -> None:
        super().__init__(model.device)
        self._keep_cache = keep_cache
        self._model = model
        self._base = BaseWeights()
        self._forward = Forward(model)
        self._cache = SlotCache()
        self._rows = RowTable()
        self._budget = KVBudget(model.config, model.dtype, max_sequences, kv_bytes)
        self._prefill_tokens = prefill_tokens
        self._waiting = AdmissionQueue(self._budget)
        self._keys: set[str] = set()
        self._aborted: set[str] = set()
        self._stop_strings = StopStringsByRequest(tokenizer)
        self._stops: dict[tuple[int, ...], int] = {}
        self._stop_table = np.zeros((0, self._forward.vocabulary), bool)
        self._end_ids = tuple(end_ids)
        self._stop_class(())
        self._stale = False
        self._stats = dict.fromkeys(COUNTS, 0)
        self._busy_seconds = 0.0

    # Requests.

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        require_version(self.version)
        keys = set()
        for request in requests:
            check_request(request, self._forward.context, self._forward.vocabulary)
            self._stop_strings.of(request.sampling.stop_strings)
            self._budget.check(request.key, len(request.prompt_ids) + request.sampling.max_tokens)
            if request.key in self._keys or request.key in keys:
                raise EngineError(f"request {request.key}: already in flight; give each rollout its own index")
            keys.add(request.key)
        self._keys |= keys
        self._waiting.add(requests)

    def abort(self, keys: Iterable[str]) -> None:
        self._aborted.update(key for key in keys if key in self._keys)

    @property
    def in_flight(self) -> int:
        return len(self._keys)

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        require_open(self.closed, "step")
        if not self._keys:
            return []
        started = time.perf_counter()
        finished: list[Rollout] = []
        if self._aborted:
            self._take_aborted(finished)
        if self._stale:
            self._recompute()
        self._admit(finished)
        if self._rows.count:
            self._decode(finished)
        self._busy_seconds += time.perf_counter() - started
        return finished

    # One step.

    def _admit(self, finished: list[Rollout]) -> None:
        """Give waiting requests rows, and compute their prompts."""
        longest = int(self._rows.limit[: self._rows.count].max(initial=0))
        if admitted := self._waiting.admit(self._rows.count, longest):
            for batch, prompts in prompt_batches(admitted, self._prefill_tokens):
                self._prefill(batch, prompts, finished)

    def _prefill(
        self, requests: list[RolloutRequest], prompts: dict[tuple[int, ...], int], finished: list[Rollout]
    ) -> None:
        ids, lengths = right_padded(list(prompts))
        logits = self._fill(ids, lengths)
        self._stats["prompt_tokens"] += int(lengths.sum())
        count = self._rows.count + len(requests)
        self._reserve(count, ids.shape[1])
        rows = self._rows.add(requests, [self._stop_class(request.sampling.stop_token_ids) for request in requests])
        source = torch.tensor([prompts[request.prompt_ids] for request in requests], device=logits.device)
        self._cache.store(rows, source)
        self._advance(rows, logits[source], finished)

    def _fill(self, ids: Int64[Tensor, "rows longest"], lengths: Int64[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Run right-padded sequences from their start; the cache is captured. Logits at each last token."""
        device = self._forward.device
        places, which = torch.unique(lengths - 1, return_inverse=True)
        self._cache.begin_prefill()
        rows, longest = ids.shape
        positions = torch.arange(longest, device=device)[None].expand(rows, -1)
        mask = self._forward.causal_mask(rows, longest)
        logits = self._forward(ids.to(device), positions, self._cache, mask, places.to(device))
        return logits[torch.arange(rows, device=device), which.to(device)]

    def _decode(self, finished: list[Rollout]) -> None:
        """One more token for every row."""
        count = self._rows.count
        last = self._rows.length[:count] - 1
        width = int(last.max()) + 1
        self._reserve(count, width)
        positions = torch.from_numpy(last)
        ids = torch.from_numpy(self._rows.ids[np.arange(count), last])[:, None].to(self._forward.device)
        self._cache.begin_decode(positions, width)
        mask = self._forward.decode_mask(positions, width)
        logits = self._forward(ids, positions[:, None].to(self._forward.device), self._cache, mask)[:, -1]
        self._advance(slice(0, count), logits, finished)

    def _advance(self, rows: slice, logits: Float[Tensor, "rows vocab"], finished: list[Rollout]) -> None:
        """Sample one token for each of `rows`; rows that end with it leave."""
        table = self._rows
        tokens, logprobs = sample(
            logits,
            temperature=table.temperature[rows],
            keys=table.key[rows],
            counters=table.length[rows] - table.prompt_length[rows],
            top_p=table.top_p[rows],
            top_k=table.top_k[rows],
            min_p=table.min_p[rows],
        )
        table.append_tokens(rows, tokens, logprobs, self.version)
        self._stats["generated_tokens"] += len(tokens)
        stopped = self._stop_table[table.stop_class[rows], tokens] | self._stop_strings.ended(table.completions(rows))
        full = table.length[rows] >= table.limit[rows]
        if (ended := stopped | full).any():
            reasons = [FinishReason.STOP if stop else FinishReason.LENGTH for stop in stopped[ended]]
            self._remove(rows.start + np.flatnonzero(ended), reasons, finished)

    def _remove(
        self, rows: Int64[np.ndarray, " rows"], reasons: Sequence[FinishReason], finished: list[Rollout]
    ) -> None:
        for row, reason in zip(rows.tolist(), reasons, strict=True):
            self._return(self._rows.rollout(row, reason, self.version), finished)
        width = int(self._rows.length[: self._rows.count].max())
        source, target = self._rows.remove(rows)
        if len(source):
            self._cache.move(torch.from_numpy(source), torch.from_numpy(target), width)

    def _return(self, rollout: Rollout, finished: list[Rollout]) -> None:
        self._keys.discard(rollout.key)
        if rollout.finish_reason is FinishReason.ABORT:
            self._stats["aborted"] += 1
            self._stats["aborted_tokens"] += len(rollout.token_ids)
        else:
            self._stats["finished"] += 1
        finished.append(rollout)

    def _take_aborted(self, finished: list[Rollout]) -> None:
        keys, self._aborted = self._aborted & self._keys, set()
        rows = [row for row, request in enumerate(self._rows.requests) if request.key in keys]
        if rows:
            self._remove(np.array(rows), [FinishReason.ABORT] * len(rows), finished)
        for request in self._waiting.remove(keys):
            rollout = Rollout(
                group=request.group,
                index=request.index,
                prompt_ids=request.prompt_ids,
                token_ids=[],
                logprobs=[] if request.sampling.logprobs else None,
                finish_reason=FinishReason.ABORT,
                first_version=self.version,
                last_version=self.version,
            )
            self._return(rollout, finished)

    def _reserve(self, rows: int, columns: int) -> None:
        self._rows.reserve(rows, columns + 1)
        self._cache.reserve(rows, columns)

    def _recompute(self) -> None:
        """Rebuild the cache of every row under the present weights: what was computed under older ones is stale."""
        self._stats["recomputed_tokens"] += int(self._rows.length[: self._rows.count].sum())
        order = np.argsort(self._rows.length[: self._rows.count], kind="stable")
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * self._rows.length[order[stop]] <= self._prefill_tokens:
                stop += 1
            chunk = order[start:stop]
            # The last token of a row has not been fed yet: the next step does that.
            sequences = [self._rows.ids[row, : self._rows.length[row] - 1] for row in chunk]
            ids, lengths = right_padded(sequences)
            self._fill(ids, lengths)
            self._cache.store(torch.from_numpy(chunk), torch.arange(len(chunk)))
            start = stop
        self._stale = False

    def _stop_class(self, extra: tuple[int, ...]) -> int:
        """Row of the stop table for the engine's end tokens plus `extra`."""
        if extra not in self._stops:
            known = [token for token in (*self._end_ids, *extra) if 0 <= token < self._forward.vocabulary]
            row = np.zeros((1, self._forward.vocabulary), bool)
            row[0, known] = True
            self._stops[extra] = len(self._stop_table)
            self._stop_table = np.concatenate([self._stop_table, row])
        return self._stops[extra]

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """See `Engine.score`; at temperature 0 the untempered log-probabilities."""
        return score(self._forward, sequences, temperature)

    def rescore(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        if not self.closed:
            fill_logprobs(self, rollouts, temperature)

    # Weights.

    def receive(self, update: WeightUpdate) -> None:
        if update.adapter:
            load = AdapterLoad(self._model, self._base)
        else:
            load = WeightLoad(self._model)
            self._base.replaced()
        before = self.version
        with self._receiving(update, load.take):
            load.finish()
        self._rows.updated(before)
        self._stale = self._rows.count > 0 and not self._keep_cache

    def fingerprints(self) -> dict[str, str]:
        return fingerprints(self._model.named_parameters())

    def stats(self) -> EngineStats:
        count = self._rows.count
        return EngineStats(
            running=count,
            waiting=len(self._waiting),
            kv_cache_usage=min(1.0, int(self._rows.length[:count].sum()) / self._budget.tokens),
            busy_seconds=self._busy_seconds,
            **self._stats,
        )

    def close(self) -> None:
        self.closed = True
        self.disconnect()
        self._cache.clear()
        self._keys.clear()
        self._waiting.clear()
        self._model: Any = None
