"""Log-probabilities of given completions, from a prefill over them while rollouts are in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import requests
from pods_cluster.generation.engines.vllm.core import Core

ELEMENTS = 1 << 26
"""Probabilities that one request may bring over where it needs whole distributions."""

_BATCH = 64
_SILENCE_SECONDS = 120.0

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


class Scoring:
    """Scores completions with requests of its own. `take` must be given every output of the core that belongs to no
    rollout; `advance` makes one step of the core and says whether anything came of it."""

    def __init__(self, core: Core, next_id: Callable[[str], str], advance: Callable[[], bool]) -> None:
        self._core = core
        self._next_id = next_id
        self._advance = advance
        self._places: dict[str, int] = {}
        self._results: list[list[float]] = []
        self._starts: list[int] = []
        self._temperature = 1.0

    def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `Engine.score`; at temperature 0 the untempered log-probabilities.

        They wait their turn behind the rollouts that wait. At a temperature other than 1 the whole distribution at each
        token comes over: keep such probes short.
        """
        whole = temperature not in (0.0, 1.0)
        for number, (prompt, completion) in enumerate(sequences):
            self._check(number, len(prompt), len(prompt) + len(completion), whole, temperature)
        self._results = [[] for _ in sequences]
        self._starts = [len(prompt) for prompt, _ in sequences]
        self._temperature = temperature
        step = 1 if whole else _BATCH
        for start in range(0, len(sequences), step):
            for number in range(start, min(start + step, len(sequences))):
                prompt, completion = sequences[number]
                if len(completion):
                    request_id = self._next_id("score")
                    self._places[request_id] = number
                    params = requests.make_scoring_params(whole)
                    self._core.add(requests.make_request(request_id, [*prompt, *completion], params))
            self._wait()
        for number, (_, completion) in enumerate(sequences):
            if len(self._results[number]) != len(completion):
                raise EngineError(f"score: vLLM returned no log-probabilities for sequence {number}")
        return self._results

    def take(self, output: Any) -> None:
        number = self._places.get(output.request_id)
        if number is None:
            return
        values = requests.prompt_logprobs(output, self._temperature)
        if values is not None:
            self._results[number] = values[self._starts[number] - 1 :].tolist()
        if output.finish_reason is not None:
            del self._places[output.request_id]

    def _check(self, number: int, prompt: int, length: int, whole: bool, temperature: float) -> None:
        longest, vocabulary = self._core.max_model_len - 1, self._core.vocabulary
        if not prompt or length > longest:
            raise EngineError(
                f"score: sequence {number} has {prompt} prompt and {length - prompt} completion tokens; it needs a "
                f"prompt and at most {longest} tokens in all (generator.engine_options.max_model_len)"
            )
        if whole and length * vocabulary > ELEMENTS:
            raise EngineError(
                f"score: sequence {number} of {length} tokens at temperature {temperature:g} needs the whole "
                f"distribution over {vocabulary} tokens at each; give at most {ELEMENTS // vocabulary} tokens, or "
                "temperature 1"
            )

    def _wait(self) -> None:
        heard = time.monotonic()
        while self._places:
            if self._advance():
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_SECONDS:
                self._core.abort(list(self._places))
                self._places.clear()
                raise EngineError(f"score: vLLM has done nothing for {_SILENCE_SECONDS:g} s; its log may say why")
