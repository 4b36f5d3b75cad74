"""Every metric of the service: name, unit, meaning, kind, and where its name comes from (TRL, verl, prime-rl or here).

`registry` holds them; a name that is not in it is not a metric. The reference page is made by
`python -m pods_cluster.telemetry.catalog > docs/metrics.md`.
"""

from __future__ import annotations

from pods_cluster.scoring.score import FailureKind
from pods_cluster.telemetry.catalog_training import COMPLETIONS, EVAL, LEARNING, REWARDS
from pods_cluster.telemetry.health_rules import RULES
from pods_cluster.telemetry.metric_registry import Kind, Metric, Registry
from pods_cluster.types import Fate

GAUGE, COUNT, COUNTER = Kind.GAUGE, Kind.COUNT, Kind.COUNTER

STAGES = ("generate", "fetch", "update", "publish", "eval", "checkpoint")
"""The stages of a step in their order; each has a `timing_s/<stage>`. Scoring and selection are parts of `generate`."""

_RUN = (
    Metric("step", "steps", "Learner step that the record belongs to; 0 is before the first update.", COUNTER),
    Metric("time", "s", "Wall clock when the record was made, Unix time."),
    Metric("elapsed", "s", "Seconds that the run has been working, downtime before a resume left out.", COUNTER),
    Metric("epoch", "epochs", "Passes over the training rows so far, as a fraction.", COUNTER, "TRL"),
    Metric("updates", "updates", "Optimiser steps applied.", COUNT),
    Metric(
        "updates_skipped", "updates", "Optimiser steps skipped on all ranks: loss or gradient was not finite.", COUNT
    ),
    Metric("updates_overflowed", "updates", "Optimiser steps skipped in search of float16's loss scale.", COUNT),
)

_FLOW = (
    Metric("rollouts/generated", "rollouts", "Rollouts that finished on a generator (aborted ones not).", COUNT),
    Metric("rollouts/scored", "rollouts", "Finished rollouts with a valid reward.", COUNT),
    Metric("rollouts/selected", "rollouts", "Rollouts kept by the selection rule.", COUNT),
    Metric("rollouts/trained", "rollouts", "Rollouts in applied optimiser steps.", COUNT),
    Metric("rollouts/aborted", "rollouts", "Rollouts ended from outside (group settled, cancelled or drained).", COUNT),
    Metric("rollouts/unissued", "rollouts", "Rollouts that settled groups were not made to have (waves).", COUNT),
    Metric("rollouts/lost", "rollouts", "Rollouts whose worker died before they were taken.", COUNT),
    Metric("rollouts/stale", "rollouts", "Finished rollouts dropped because a token was sampled too long ago.", COUNT),
    Metric("tokens/sampled", "tokens", "Completion tokens sampled, those of aborted rollouts included.", COUNT),
    Metric("tokens/aborted", "tokens", "Completion tokens sampled in rollouts that were aborted.", COUNT),
    Metric(
        "tokens/saved",
        "tokens",
        "Estimate of what settled groups would still have sampled: mean lengths of "
        "rollouts not issued, expected remaining lengths of aborted ones (too high where prompts differ in length).",
        COUNT,
    ),
    Metric(
        "tokens/prompt", "tokens", "Prompt tokens of the requests that the engines began, evaluations included.", COUNT
    ),
    Metric(
        "tokens/recomputed",
        "tokens",
        "Tokens in flight whose keys and values the engines made anew under new weights (weights.keep_cache: false).",
        COUNT,
    ),
    Metric(
        "tokens/environment", "tokens", "Tokens that environments wrote; they are read, and never trained on.", COUNT
    ),
    Metric("turns/mean", "turns", "Turns of the model in rollouts that ended, mean (with an environment)."),
    Metric(
        "turns/limited", "share", "Rollouts, of these, that environment.max_turns or environment.max_seconds cut short."
    ),
    Metric("tokens/trained", "tokens", "Completion tokens in applied optimiser steps.", COUNT),
    Metric("num_tokens", "tokens", "Prompt and completion tokens that the learner has trained on.", COUNTER, "TRL"),
    Metric(
        "rollout_to_update_ratio",
        "ratio",
        "Rollouts per trained rollout in the step: rollouts/scored ÷ rollouts/trained.",
    ),
    Metric("rollout_to_update_ratio/cumulative", "ratio", "The same over the run so far."),
    Metric(
        "rollout_to_update_ratio/tokens",
        "ratio",
        "Tokens per trained token in the step: tokens/sampled ÷ tokens/trained.",
    ),
    Metric("rollout_to_update_ratio/tokens_cumulative", "ratio", "The same over the run so far."),
    Metric("throughput/rollouts_generated", "1/s", "rollouts/generated a second of timing_s/step."),
    Metric("throughput/rollouts_selected", "1/s", "rollouts/selected a second of timing_s/step."),
    Metric("throughput/rollouts_trained", "1/s", "rollouts/trained a second of timing_s/step."),
    Metric("throughput/tokens_sampled", "1/s", "tokens/sampled a second of timing_s/step."),
    Metric("throughput/tokens_trained", "1/s", "tokens/trained a second of timing_s/step."),
    Metric("throughput/updates", "1/s", "Optimiser steps a second of timing_s/step."),
)

_GROUPS = (
    Metric("groups/<fate>", "groups", "Groups that met this end in the step; each group has exactly one.", COUNT,
           choices={"fate": tuple(fate.value for fate in Fate)}),
    Metric("groups/replaced", "groups", "Prompts tried in place of groups without signal.", COUNT),
    Metric("groups/settled", "groups", "Groups stopped early; their lengths and rewards are censored.", COUNT),
    Metric("groups/settled_share", "share", "The same, of all groups that ended in the step. Above 0 the step's rewards "
           "and lengths over all rollouts are censored."),
    Metric("groups/overtaken", "groups", "Groups left behind by younger ones in the step's assembly."),
    Metric("groups/in_flight", "groups", "Groups that hold a place in the staleness ledger at the step's end."),
    Metric("groups/queued", "groups", "Complete groups that were left in the selector when the step was assembled."),
    Metric("data/prompts_served", "prompts", "Prompts taken from the dataset's stream, those served again counted again.", COUNT),
    Metric("data/prompts_dropped_unrenderable", "prompts", "Rows that could not be rendered, left out.", COUNT),
    Metric("data/prompts_given_up", "prompts", "Rows whose rollouts ended every engine, left out.", COUNT),
    Metric("data/prompts_skipped", "prompts", "Rows skipped by signal (`data.revisit`) or pass rate (`data.curriculum`).", COUNT),
    Metric("data/revisit_chance/easy", "share", "Chance to be tried of a prompt whose last group was right, without signal "
           "(`data.revisit_target`)."),
    Metric("data/revisit_chance/hard", "share", "The same of one whose last group was wrong."),
    Metric("data/prompts_dropped_overlong", "prompts", "Prompts longer than `data.max_prompt_tokens`, dropped.", COUNT),
)  # fmt: skip

_SCORING = (
    Metric("scoring/failures/<kind>/<reward>", "rollouts", "Scorings by this reward that gave no number.", COUNT,
           choices={"kind": tuple(kind.value for kind in FailureKind)}),
    Metric("rollouts/excluded", "rollouts", "Finished rollouts left out of selection: no valid reward.", COUNT),
    Metric("rollouts/excluded/<reason>", "rollouts", "The same by reason (missing: no number came).", COUNT,
           choices={"reason": ("missing", "infinite")}),
    Metric("scoring/seconds_mean", "s", "Mean time from a rollout's end to its reward."),
    Metric("scoring/seconds_max", "s", "Longest time from a rollout's end to its reward."),
    Metric("scoring/restarts", "processes", "Scorer processes that were killed or died, and were replaced.", COUNT),
)  # fmt: skip

_POOLS = (
    Metric("generator/idle_share", "share", "1 - tokens/s of the pool over its calibrated saturated rate."),
    Metric("learner/idle_share", "share", "1 - tokens/s of the group over its calibrated saturated rate."),
    Metric("generator/busy_seconds", "s", "Seconds since the last step in which an engine computed, mean over workers."),
    Metric("generator/occupied_seconds", "s",
           "Seconds since the last step in which rollouts were in an engine or at the scorers, mean over workers."),
    Metric("generator/weights_seconds", "s",
           "Seconds since the last step in which new weights stopped an engine, mean over workers."),
    Metric("generator/verifying_seconds", "s",
           "Seconds since the last step in which fingerprints of them stopped it (weights.verify), mean over workers."),
    Metric("generator/empty_seconds", "s",
           "Seconds since the last step in which an engine had no rollout in flight, mean over workers."),
    Metric("generator/between_seconds", "s",
           "Seconds since the last step between an engine's steps: prompts taken in, rollouts handed on; mean over workers."),
    Metric("generator/steps", "steps", "Steps of an engine since the last step, mean over workers.", COUNT),
    Metric("generator/mean_running", "rollouts", "Rollouts decoded in the engines' steps, mean over their seconds."),
    Metric("learner/busy_seconds", "s", "Seconds that the slowest rank computed and talked with the others."),
    Metric("generator/rollouts_per_prompt", "rollouts", "n: rollouts of the groups issued for the step."),
    Metric("balance/generate_seconds", "s", "Seconds that the saturated generator pool needs for the step's rollouts."),
    Metric("balance/update_seconds", "s", "Seconds that the learner group needs to fetch and train what the step kept."),
    Metric("balance/rollouts_per_prompt", "rollouts", "Rollouts a prompt with which both of these would be equal."),
    Metric("balance/generators", "workers", "Generator workers (a fraction) with which they would."),
    Metric("generator/workers", "workers", "Generator workers that serve."),
    Metric("learner/workers", "workers", "Learner ranks in the group."),
    Metric("generator/starting", "workers", "Generator workers that wait for room, start, or wait for their weights."),
    Metric("generator/leaving", "workers", "Generator workers that only finish what they have."),
    Metric("generator/target", "workers", "Generator workers asked for."),
    Metric("learner/target", "workers", "Learner ranks asked for."),
    Metric("generator/running", "rollouts", "Rollouts being decoded, over the pool."),
    Metric("generator/waiting", "rollouts", "Rollouts queued in the engines, over the pool."),
    Metric("generator/kv_cache_usage", "share", "Share of the KV cache in use, mean over workers."),
    Metric("generator/preemptions", "rollouts", "Rollouts that an engine pushed out of its KV cache.", COUNT),
    Metric("generator/tokens_per_second", "1/s", "Completion tokens a second, over the pool."),
    Metric("generator/saturated_tokens_per_second", "1/s", "The calibrated rate that counts as never idle."),
    Metric("generator/replaced", "workers", "Workers that died or hung, and were replaced.", COUNT),
    Metric("learner/tokens_per_second", "1/s", "Tokens a second of timing_s/update, over the group."),
    Metric("learner/saturated_tokens_per_second", "1/s", "The calibrated rate that counts as never idle."),
    Metric("learner/received_bytes", "bytes", "Kept rollouts as the ranks took them from the workers' nodes.", COUNT),
    Metric("learner/microbatches", "batches", "Micro-batches of the rank with the most."),
    Metric("learner/padding_share", "share", "Padding in the micro-batches, of all their tokens."),
    Metric(
        "learner/sequence_tokens_per_computed",
        "",
        "Tokens of the trained sequences, prompts counted for each, over tokens computed: above 1 where prompts are shared.",
    ),
    Metric("memory/<role>/rss", "bytes", "Resident memory after the step, largest of the role's actors.",
           choices={"role": ("controller", "selector", "generator", "learner")}),
    Metric("memory/<role>/gpu_peak", "bytes", "Most GPU memory that PyTorch has allocated, largest of the role's actors.",
           choices={"role": ("generator", "learner")}),
)  # fmt: skip

_TIMING = (
    *(
        Metric(f"timing_s/{stage}", "s", meaning, COUNT, "verl" if stage in ("update", "checkpoint") else "")
        for stage, meaning in zip(
            STAGES,
            (
                "From the step's first request until its last group is complete, scoring and selection included.",
                "The learner taking the kept rollouts from the workers.",
                "Forward, backward and optimiser on all ranks.",
                "New weights on their way to the generators.",
                "Evaluation on held-out rows.",
                "Writing a checkpoint.",
            ),
            strict=True,
        )
    ),
    Metric(
        "timing_s/score",
        "s",
        "Generators waiting for rewards alone: rollouts at the scorers and none in the engine, "
        "mean over workers. At staleness 0 a part of `timing_s/generate`.",
        COUNT,
    ),
    Metric(
        "timing_s/select",
        "s",
        "Settling, selection and assembly, as the selector computes them. A part of `timing_s/generate`.",
        COUNT,
    ),
    Metric("timing_s/copy", "s", "The ranks copying their state to memory, for a light copy.", COUNT),
    Metric("timing_s/scale", "s", "Changing the pools' sizes: weights of newcomers, a new learner group.", COUNT),
    Metric("timing_s/wait", "s", "The learner waiting for enough groups (staleness above 0).", COUNT),
    Metric("timing_s/step", "s", "Wall clock of the whole step, evaluation and checkpoint left out.", COUNT, "verl"),
    Metric("staleness/mean", "versions", "Learner version less the rollout's oldest, mean over trained rollouts."),
    Metric("staleness/max", "versions", "The same, largest."),
    Metric("weights/version", "version", "Weight version that the generators serve.", COUNTER),
    Metric(
        "weights/bytes", "bytes", "Bytes of one version as sent to each receiver; with LoRA the adapter's alone.", COUNT
    ),
    Metric("weights/sync_seconds", "s", "From the first byte of a version to the last generator's resumption.", COUNT),
    Metric("weights/receivers", "workers", "Generators that took the step's version."),
    Metric("weights/failed", "workers", "Generators that failed to take the step's version.", COUNT),
    Metric("weights/rebuilds", "groups", "Broadcast groups built anew.", COUNT),
    Metric(
        "weights/staged",
        "workers",
        "Generators that took the version beside their engine's steps (weights.staged).",
        COUNT,
    ),
    Metric("weights/staging_seconds", "s", "Seconds that this took beside the steps, mean over workers."),
)

_TELEMETRY = (
    Metric(
        "health/<rule>",
        "",
        "1 where this rule of the run's health speaks (docs/troubleshooting.md), 0 elsewhere.",
        choices={"rule": tuple(rule.name for rule in RULES)},
    ),
    Metric(
        "checkpoint/failed", "checkpoints", "Checkpoints in a row that the disk did not take; left out while it does."
    ),
    Metric("telemetry/failed_writes", "writes", "Writes of telemetry that failed (they are tried again).", COUNTER),
    Metric("telemetry/dropped_lines", "lines", "Lines of telemetry given up because too many waited.", COUNTER),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "The record": _RUN,
    "Rewards": REWARDS,
    "Completions and prompts": COMPLETIONS,
    "From rollout to update": _FLOW,
    "Groups and prompts": _GROUPS,
    "Scoring": _SCORING,
    "Pools": _POOLS,
    "Time, staleness and weights": _TIMING,
    "Learning": LEARNING,
    "Evaluation": EVAL,
    "Telemetry": _TELEMETRY,
}

registry = Registry(SECTIONS)
"""The registry of all metrics. A plug-in adds its own with `registry.register(Metric(...), section=...)`."""


if __name__ == "__main__":
    print(registry.markdown(), end="")
