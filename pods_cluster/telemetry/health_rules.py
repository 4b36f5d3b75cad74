"""The rules of a run's health: what each looks at in the last steps, its threshold, and what it advises (pure).

Each rule has a paragraph of its name in docs/troubleshooting.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pods_cluster.telemetry.health_window import WINDOW, Window, fall_of, total
from pods_cluster.telemetry.pace import pace_of

Level = Literal["info", "warning", "error"]
"""`info` is a hint: the run is healthy with it."""
GUIDE = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a rule: `text` says it with its numbers, `advice` what to change."""

    rule: str
    level: Level
    text: str
    advice: str

    @property
    def link(self) -> str:
        """The rule's paragraph in the troubleshooting page."""
        return f"{GUIDE}#{self.rule}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `check` returns what to say, or None; `threshold` is the number above (or below) which it speaks."""

    name: str
    meaning: str
    threshold: float
    check: Callable[[Window, float], Finding | None]


def _warn(rule: str, text: str, advice: str, level: Level = "warning") -> Finding:
    return Finding(rule, level, text, advice)


def _no_update(window: Window, threshold: float) -> Finding | None:
    last = list(window.records)[-int(threshold) :]
    if len(last) < threshold or any(record.get("updates") for record in last):
        return None
    skipped = total(record.get("updates_skipped") or 0.0 for record in last)
    fates = {fate: total(record.get(f"groups/{fate}") or 0.0 for record in last) for fate in UNTRAINED}
    fate = max(fates, key=lambda name: fates[name])
    cause, advice = UNTRAINED[fate] if fates[fate] else UNTRAINED["no_signal"]
    if skipped:
        cause, advice = SKIPPED
    return _warn(
        "no-update",
        f"no update in the last {len(last)} steps: the weights stay as they are{f'; {cause}' if skipped or fates[fate] else ''}",
        advice,
        "error",
    )


SKIPPED = (
    "their loss or gradient was not finite",
    "look at the groups that the events update_skipped name; lower learner.learning_rate",
)
UNTRAINED = {
    "no_signal": (
        "the rewards of each group are equal",
        "look at the rewards of the sampled groups; all of them are equal, or fail",
    ),
    "too_few_valid": ("too few rollouts of each group have a reward", "mend the reward: events.jsonl has its error"),
    "stale": ("the groups were too old", "raise staleness, lower generator.max_tokens, or add generators"),
    "lost": ("the groups were lost with their generators", "see their causes in events.jsonl; memory is the usual one"),
}
"""Why groups of a fate are not trained, and what to change."""


def _skipped(window: Window, threshold: float) -> Finding | None:
    skipped, applied = window.sum("updates_skipped"), window.sum("updates")
    if skipped < threshold:
        return None
    return _warn(
        "updates-skipped",
        f"{skipped:.0f} of the last {skipped + applied:.0f} updates were skipped: their loss or gradient was not finite",
        "look at the groups that the events update_skipped name; lower learner.learning_rate",
    )


def _checkpoint_failed(window: Window, threshold: float) -> Finding | None:
    failed = (window.records[-1].get("checkpoint/failed") or 0.0) if window.records else 0.0
    if failed < threshold:
        return None
    return _warn(
        "checkpoint-failed",
        f"the last {failed:.0f} checkpoint(s) could not be written: what was learned since is lost if the run ends now",
        "free space or raise the quota where run.dir lies; the event checkpoint_failed has the cause",
        "error",
    )


def _no_signal(window: Window, threshold: float) -> Finding | None:
    fates = ("trained", "no_signal", "too_few_valid", "stale", "lost")
    ended = total(window.sum(f"groups/{fate}") for fate in fates)
    share = window.sum("groups/no_signal") / ended if ended else 0.0
    if share <= threshold:
        return None
    return _warn(
        "no-signal",
        f"{share:.0%} of the groups have no signal: all rewards of a group are equal, and its rollouts are wasted",
        "choose prompts of another difficulty, a graded reward, or a higher generator.rollouts_per_prompt",
    )


def _truncated(window: Window, threshold: float) -> Finding | None:
    share = window.mean("completions/clipped_ratio")
    if not share > threshold:
        return None
    return _warn(
        "truncated",
        f"{share:.0%} of the rollouts are cut off at generator.max_tokens, mostly before they have an answer",
        "raise generator.max_tokens, or ask for shorter answers",
    )


def _excluded(window: Window, threshold: float) -> Finding | None:
    share = window.share("rollouts/excluded", "rollouts/generated")
    if not share > threshold:
        return None
    prefix = "scoring/failures/"
    failures: dict[str, float] = {}
    for record in window.records:
        for name, value in record.items():
            if name.startswith(prefix) and value:
                failures[name.removeprefix(prefix)] = failures.get(name.removeprefix(prefix), 0.0) + value
    kind, _, reward = max(failures, key=lambda name: failures[name], default="").partition("/")
    why = f": reward {reward!r} gave no number ({kind}) {failures[f'{kind}/{reward}']:.0f} times" if reward else ""
    return _warn(
        "excluded",
        f"{share:.0%} of the rollouts have no valid reward and are left out{why}",
        "mend the reward; `pods check` calls it once, and events.jsonl has its error",
        "error" if share > 0.5 else "warning",
    )


def _stale(window: Window, threshold: float) -> Finding | None:
    share = window.share("rollouts/stale", "rollouts/generated")
    if not share > threshold:
        return None
    return _warn(
        "stale",
        f"{share:.0%} of the rollouts are too old to train when their step is assembled",
        "raise staleness, lower generator.max_tokens, or add generators",
    )


def _reward_falls(window: Window, threshold: float) -> Finding | None:
    fall = fall_of(window.rewards, threshold)
    if fall is None:
        return None
    return _warn(
        "reward-falls",
        f"the reward fell from {fall.best:.3g} (its best {fall.steps} steps) to {fall.now:.3g}",
        "lower learner.learning_rate, or go back to an earlier checkpoint",
    )


def _entropy_collapse(window: Window, threshold: float) -> Finding | None:
    values = window.entropies
    if len(values) < 2 * WINDOW:
        return None
    first, now = _mean(values[:WINDOW]), _mean(values[-WINDOW:])
    if first <= 0 or now >= threshold * first:
        return None
    return _warn(
        "entropy-collapse",
        f"the policy's entropy fell from {first:.3g} to {now:.3g} nats: rollouts of a prompt become the same",
        "lower learner.learning_rate, raise learner.clip_high or generator.temperature",
    )


def _mismatch(window: Window, threshold: float) -> Finding | None:
    distance, versions = window.mean("sampling/sampling_logp_difference/mean"), window.mean("staleness/mean")
    if not distance > threshold:
        return None
    # what the updates between sampling and training changed is a part of it
    first = "try staleness: 0 or a lower learner.learning_rate; if it stays, " if versions >= 0.5 else ""
    return _warn(
        "mismatch",
        f"engine and learner differ by {distance:.3f} nats a token"
        + (f", over {versions:.1f} versions between sampling and training" if first else ""),
        first + "set weights.verify: true for a run; compare model.dtype and model.attention with the engine's",
    )


def _replaced(window: Window, threshold: float) -> Finding | None:
    count = window.sum("generator/replaced")
    if count < threshold:
        return None
    return _warn(
        "workers-replaced",
        f"{count:.0f} generators were replaced in the last {len(window.records)} steps",
        "see their causes in events.jsonl; memory is the usual one",
    )


def _preempted(window: Window, threshold: float) -> Finding | None:
    share = window.share("generator/preemptions", "rollouts/generated")
    if not share > threshold:
        return None
    return _warn(
        "preemptions",
        f"engines pushed {share:.0%} of the rollouts out of their cache and made them again",
        "lower generator.max_sequences, or give the engine more memory",
    )


def _slow_scoring(window: Window, threshold: float) -> Finding | None:
    share = window.mean("scoring/seconds_mean") / max(window.mean("timing_s/step"), 1e-9)
    if not share > threshold:
        return None
    return _warn(
        "slow-rewards",
        f"a rollout waits {window.mean('scoring/seconds_mean'):.1f} s for its reward, {share:.0%} of a step",
        "raise scoring.workers, or make the reward faster",
    )


def _bottleneck(window: Window, threshold: float) -> Finding | None:
    pace = pace_of(window)
    if pace is None or not pace.waiting > threshold:
        return None
    return _warn("bottleneck", pace.text, pace.advice, "info")


RULES: tuple[Rule, ...] = (
    Rule("no-update", "Steps in a row without an update.", 3, _no_update),
    Rule("checkpoint-failed", "Checkpoints in a row that could not be written.", 1, _checkpoint_failed),
    Rule("updates-skipped", f"Updates within {WINDOW} steps that were skipped, not being finite.", 1, _skipped),
    Rule("excluded", "Share of rollouts without a valid reward.", 0.01, _excluded),
    Rule("no-signal", "Share of groups whose rewards are all equal.", 0.5, _no_signal),
    Rule("truncated", "Share of rollouts cut off at `generator.max_tokens`.", 0.25, _truncated),
    Rule("stale", "Share of rollouts dropped as too old.", 0.1, _stale),
    Rule("reward-falls", "Fall of the reward below its best, as a share of it.", 0.2, _reward_falls),
    Rule("entropy-collapse", "Entropy as a share of what it was at the start.", 0.2, _entropy_collapse),
    Rule("mismatch", "Distance of engine and learner log-probabilities, nats a token.", 0.05, _mismatch),
    Rule("workers-replaced", f"Generators replaced within {WINDOW} steps.", 3, _replaced),
    Rule("preemptions", "Share of rollouts that an engine pushed out of its cache.", 0.05, _preempted),
    Rule("slow-rewards", "Time from a rollout's end to its reward, as a share of a step.", 0.5, _slow_scoring),
    Rule("bottleneck", "Share of a step in which one pool waits for the other.", 0.25, _bottleneck),
)


def _mean(values: Sequence[float]) -> float:
    return total(values) / len(values)
