"""Rollouts of several turns: between the engine, which makes a turn, and the environment, which answers it.

What an environment answers is appended to the very tokens that the model made, and the engine goes on from there: its next
request is a later turn of the same rollout. vLLM finds the keys and values of the earlier turns in its prefix cache. To all
others, a rollout is one as long as it lasts: it is pending until its last turn, and scored, stored and selected as any other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from pods_cluster.config import Config
from pods_cluster.data.errors import DataError
from pods_cluster.data.tokenizer import PromptTokenizer
from pods_cluster.environments.environment import Message
from pods_cluster.environments.host import EnvironmentFailed, EnvironmentHost, RunningEnvironment
from pods_cluster.environments.turn_tokens import TurnTokens
from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.scoring.score import FailureKind
from pods_cluster.types import FinishReason, Prompt, Rollout, RolloutRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pods_cluster.scoring import ScorerPool

ENVIRONMENT = "environment"
"""The name under which failures and output of environments are told, beside those of rewards."""


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of a rollout's turns: the text of the last one, all of them as messages, the environment's reward; or
    its failure."""

    text: str = ""
    turns: tuple[Message, ...] = ()
    reward: float | None = None
    failure: EnvironmentFailed | None = None


@dataclass(slots=True, eq=False)
class _Playing:
    """A rollout whose last turn has not ended. `request` is that of the first turn; its `max_tokens` bound all of them."""

    request: RolloutRequest
    prompt: Prompt
    began: float
    rollout: Rollout | None = None
    environment: RunningEnvironment | None = None
    said: list[Message] = field(default_factory=list)
    task: asyncio.Task[Played | None] | None = None


class Turns:
    """Plays rollouts with their environments. All but the public methods run in the thread of the environments' loop.

    `submit` hands the next turn's request to the engine, `abort` ends turns there; both only post it. `done` gets each rollout
    at its end, with what its turns came to. `failed` gets an error after which nothing can be played any more.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        text: CompletionText,
        scorers: ScorerPool,
        *,
        submit: Callable[[RolloutRequest], None],
        abort: Callable[[list[str]], None],
        done: Callable[[Rollout, Played], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        assert config.environment is not None
        self._settings = config.environment
        self._wants_reward = any(reward.name == ENVIRONMENT for reward in config.reward)
        self._text = text
        self._tokens = TurnTokens(config, cast(PromptTokenizer, tokenizer))
        self._submit, self._abort_turns, self._done, self._failed = submit, abort, done, failed
        self._playing: dict[str, _Playing] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """Counts over the rollouts that have ended, by the names of `generation.pool_stats`."""
        speaker = list(scorers.output.rewards).index(ENVIRONMENT)
        self._host = EnvironmentHost(self._settings, config.scoring.load_timeout, scorers.output, speaker)

    # From any thread.

    def begin(self, requests: Iterable[tuple[RolloutRequest, Prompt]]) -> list[RolloutRequest]:
        """Take rollouts on; returns the requests of their first turns, for the engine."""
        now, first = time.monotonic(), []
        for request, prompt in requests:
            self._playing[request.key] = _Playing(request, prompt, now)
            first.append(self._limited(request, request.sampling.max_tokens))
        return first

    def forget(self, requests: Iterable[RolloutRequest]) -> None:
        """Undo `begin` for requests that the engine refused."""
        for request in requests:
            self._playing.pop(request.key, None)

    def take(self, rollouts: Sequence[Rollout]) -> None:
        """Turns that the engine has finished."""
        self._host.loop.call_soon_threadsafe(self._take, list(rollouts))

    def abort(self, keys: Sequence[str]) -> None:
        """End rollouts early, in whichever turn they are."""
        self._host.loop.call_soon_threadsafe(self._abort, list(keys))

    def close(self) -> None:
        """Kill all environments."""
        self._host.close()

    # On the loop.

    def _take(self, rollouts: list[Rollout]) -> None:
        for turn in rollouts:
            if (playing := self._playing.get(turn.key)) is not None:
                playing.rollout = _joined(playing, turn)
                playing.task = self._host.loop.create_task(self._answer(playing, playing.rollout, turn))
                playing.task.add_done_callback(partial(self._answered, playing, playing.rollout))

    def _abort(self, keys: list[str]) -> None:
        with_engine: list[str] = []
        for key in keys:
            playing = self._playing.get(key)
            if playing is not None and playing.task is not None:
                playing.task.cancel()
            elif playing is not None:
                with_engine.append(key)
        if with_engine:
            self._abort_turns(with_engine)

    def _answered(self, playing: _Playing, rollout: Rollout, task: asyncio.Task[Played | None]) -> None:
        """End a rollout whose last turn this was."""
        if task.cancelled():
            rollout.finish_reason = FinishReason.ABORT
            self._end(playing, rollout, Played())
        elif isinstance(error := task.exception(), EnvironmentFailed):
            self._end(playing, rollout, Played(failure=error))
        elif error is not None:
            self._failed(error)
        elif (played := task.result()) is not None:
            self._end(playing, rollout, played)

    async def _answer(self, playing: _Playing, rollout: Rollout, turn: Rollout) -> Played | None:
        """The rollout's outcome if this turn was its last; else None, and the next turn is asked for."""
        (text,) = self._text.of([turn])
        playing.said.append({"role": "assistant", "content": text})
        if turn.finish_reason is FinishReason.ABORT:
            return Played()
        if turn.finish_reason is FinishReason.LENGTH:  # half a turn has no answer
            return await self._played(playing, text)
        environment = await self._environment(playing)
        answer: list[Message] = await environment.call("step", text)
        if not answer:
            return await self._played(playing, text)
        ids, left = self._ids(rollout, answer)
        settings = self._settings
        over = rollout.turns >= settings.max_turns or time.monotonic() - playing.began >= settings.max_seconds
        if over or left < 1:
            self.counts["turns/limited"] += over
            rollout.finish_reason = FinishReason.LENGTH
            return await self._played(playing, text)
        playing.said += answer
        _append(rollout, ids)
        playing.task = None
        context = (*rollout.prompt_ids, *rollout.token_ids)
        later = replace(playing.request, prompt_ids=context, start=len(rollout.token_ids))
        self._submit(self._limited(later, left))
        return None

    def _ids(self, rollout: Rollout, answer: list[Message]) -> tuple[list[int], int]:
        """The answer as tokens, and how many the model may sample after it."""
        try:
            ids = self._tokens(rollout.token_ids, answer)
        except DataError as error:
            raise EnvironmentFailed(FailureKind.ERROR, str(error)) from error
        return ids, self._playing[rollout.key].request.sampling.max_tokens - len(rollout.token_ids) - len(ids)

    def _limited(self, request: RolloutRequest, tokens: int) -> RolloutRequest:
        most = min(tokens, self._settings.turn_tokens or tokens)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    async def _environment(self, playing: _Playing) -> RunningEnvironment:
        if playing.environment is None:
            playing.environment = await self._host.begin()
            prompt = playing.prompt
            await playing.environment.call("reset", {**prompt.columns, "answer": prompt.answer})
        return playing.environment

    async def _played(self, playing: _Playing, text: str) -> Played:
        reward = None
        if self._wants_reward:
            reward = await (await self._environment(playing)).call("reward")
        return Played(text, tuple(playing.said), reward)

    def _end(self, playing: _Playing, rollout: Rollout, played: Played) -> None:
        self._playing.pop(rollout.key, None)
        if (environment := playing.environment) is not None:
            if played.failure is None and rollout.finish_reason is not FinishReason.ABORT:
                closing = self._host.loop.create_task(environment.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            else:
                environment.kill()
        if rollout.finish_reason is not FinishReason.ABORT:
            self.counts["turns/rollouts"] += 1
            self.counts["turns/total"] += rollout.turns
        self.counts["tokens/environment"] += rollout.environment_tokens
        self._done(rollout, played)


def _joined(playing: _Playing, turn: Rollout) -> Rollout:
    """The rollout with one more turn."""
    before, request = playing.rollout, playing.request
    if before is None:
        return replace(turn, prompt_ids=request.prompt_ids)
    before.token_ids += turn.token_ids
    if before.logprobs is not None and turn.logprobs is not None:
        before.logprobs += turn.logprobs
    else:
        before.logprobs = None
    if turn.token_ids:
        before.last_version = turn.last_version
        before.spans = _joined_spans(before.spans, turn.spans)
    before.turns += 1
    before.finish_reason = turn.finish_reason
    before.seconds = time.monotonic() - playing.began
    return before


def _joined_spans(
    before: tuple[tuple[int, int], ...], turn: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    if not before or not turn:
        return ()  # an engine that does not know
    (version, tokens), (first, more) = before[-1], turn[0]
    if version == first:
        return (*before[:-1], (version, tokens + more), *turn[1:])
    return before + turn


def _append(rollout: Rollout, ids: list[int]) -> None:
    """Append what the environment wrote."""
    start = len(rollout.token_ids)
    rollout.token_ids += ids
    rollout.environment = (*rollout.environment, (start, start + len(ids)))
    if rollout.logprobs is not None:
        rollout.logprobs += [math.nan] * len(ids)
