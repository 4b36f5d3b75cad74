"""Decoding and scoring of finished rollouts, between the engine and the store."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.generation.turns import ENVIRONMENT, Played
from pods_cluster.scoring import Score, ScoreRequest, ScorerPool
from pods_cluster.types import FinishReason, Prompt, Rollout

Done = Callable[[Rollout], None]
Ended = tuple[Rollout, Prompt, Played | None]
"""A rollout as it ended, its prompt, and what its turns came to where it has an environment."""


class Postprocessor:
    """Decodes and scores rollouts off the engine's thread; each comes to `done`, scored, in any order.

    An aborted rollout is decoded and passed on without a reward: half a completion has none. `failed` gets the error
    after which no rollout can be finished any more.
    """

    def __init__(
        self,
        text: CompletionText,
        scorers: ScorerPool,
        done: Done,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._text = text
        self._scorers = scorers
        self._done = done
        self._failed = failed
        self._queue: queue.SimpleQueue[list[Ended] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seconds = (0, 0.0, 0.0)  # rollouts, sum, longest
        self.waiting = 0
        self._thread = threading.Thread(target=self._run, name="postprocess", daemon=True)
        self._thread.start()

    def add(self, rollouts: list[Ended]) -> None:
        """Rollouts as the engine returned them, each with its prompt; one whose environment failed gets no reward."""
        with self._lock:
            self.waiting += len(rollouts)
        self._queue.put(rollouts)

    def seconds(self) -> tuple[float, float]:
        """Mean and longest time from a rollout's end to its reward."""
        count, total, longest = self._seconds
        return (total / count if count else 0.0), longest

    def close(self) -> None:
        """End after the batch that is being decoded."""
        self._queue.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                self._finish(batch)
            except BaseException as error:
                self._failed(error)
                return

    def _finish(self, batch: list[Ended]) -> None:
        began = time.monotonic()
        texts = self._text.of([rollout for rollout, _, _ in batch])
        for (rollout, prompt, played), text in zip(batch, texts, strict=True):
            rollout.text = text
            if rollout.finish_reason is FinishReason.ABORT:
                self._pass_on(rollout, began)
                continue
            if played is not None and (failure := played.failure) is not None:
                self._set_score(rollout, self._scorers.fail(failure.kind, ENVIRONMENT, failure.message))
                self._pass_on(rollout, began)
                continue
            request = ScoreRequest(
                prompt_text=prompt.text,
                completion=text if played is None else played.text,
                answer=prompt.answer,
                messages=prompt.messages,
                columns=prompt.columns,
                completion_ids=rollout.token_ids if played is None else sampled_ids(rollout),
                turns=() if played is None else played.turns,
                environment_reward=None if played is None else played.reward,
            )
            self._scorers.submit(request, self._scored(rollout, began))

    def _scored(self, rollout: Rollout, began: float) -> Callable[[Future[Score]], None]:
        def take(future: Future[Score]) -> None:
            try:
                self._set_score(rollout, future.result())
                self._pass_on(rollout, began)
            except BaseException as error:
                self._failed(error)

        return take

    @staticmethod
    def _set_score(rollout: Rollout, score: Score) -> None:
        rollout.reward, rollout.reward_parts = score.total, dict(score.parts)
        rollout.reward_errors = tuple(str(failure) for failure in score.failures)

    def _pass_on(self, rollout: Rollout, began: float) -> None:
        seconds = time.monotonic() - began
        with self._lock:
            self.waiting -= 1
            count, total, longest = self._seconds
            self._seconds = (count + 1, total + seconds, max(longest, seconds))
        self._done(rollout)


def sampled_ids(rollout: Rollout) -> list[int]:
    """The tokens that the model sampled, without those of its environment."""
    return [token for token, mine in zip(rollout.token_ids, rollout.sampled().tolist(), strict=True) if mine]
