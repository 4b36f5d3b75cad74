"""Metrics of the training itself, a part of the catalogue: rewards, completions, what the learner computed, evaluations."""

from __future__ import annotations

from pods_cluster.telemetry.metric_registry import Metric

REWARDS = (
    Metric("reward", "", "Mean reward over all scored rollouts of the step's groups, before selection.", origin="TRL"),
    Metric("reward_std", "", "Sample standard deviation of the rewards in a group, mean over groups.", origin="TRL"),
    Metric("reward/kept", "", "Mean reward over the kept rollouts alone."),
    Metric("reward/settled", "", "Mean reward over groups that were stopped early: censored, no measure of progress."),
    Metric(
        "reward/uncensored",
        "",
        "With `settle: waves`: mean reward over the first portion of every group, on which stopping has no influence.",
    ),
    Metric("reward_std/kept", "", "Sample standard deviation of the kept rewards of a group, mean over groups."),
    Metric("reward/min", "", "Lowest reward of the step."),
    Metric("reward/max", "", "Highest reward of the step."),
    Metric(
        "frac_reward_zero_std", "share", "Share of the step's scored groups whose rewards are all equal.", origin="TRL"
    ),
    Metric("rewards/<name>/mean", "", "Mean of one reward, unweighted, over all scored rollouts.", origin="TRL"),
    Metric("rewards/<name>/std", "", "Standard deviation of one reward over all scored rollouts.", origin="TRL"),
    Metric("rewards/<name>/kept_mean", "", "Mean of one reward over the kept rollouts."),
    Metric("advantages/mean", "", "Mean advantage over the trained rollouts.", origin="verl (critic/advantages/mean)"),
    Metric("advantages/std", "", "Standard deviation of the advantages over the trained rollouts."),
)

COMPLETIONS = (
    Metric(
        "completions/mean_length", "tokens", "Mean length of all finished rollouts, before selection.", origin="TRL"
    ),
    Metric("completions/min_length", "tokens", "Shortest finished rollout.", origin="TRL"),
    Metric("completions/max_length", "tokens", "Longest finished rollout.", origin="TRL"),
    Metric("completions/clipped_ratio", "share", "Finished rollouts that were cut at `max_tokens`.", origin="TRL"),
    Metric(
        "completions/mean_terminated_length",
        "tokens",
        "Mean length of rollouts that ended by themselves.",
        origin="TRL",
    ),
    Metric("completions/min_terminated_length", "tokens", "Shortest rollout that ended by itself.", origin="TRL"),
    Metric("completions/max_terminated_length", "tokens", "Longest rollout that ended by itself.", origin="TRL"),
    Metric("completions/kept_mean_length", "tokens", "Mean length of the kept rollouts."),
    Metric("completions/kept_max_length", "tokens", "Longest kept rollout."),
    Metric("completions/kept_clipped_ratio", "share", "Kept rollouts that were cut at `max_tokens`."),
    Metric("completions/stale_mean_length", "tokens", "Mean length of rollouts dropped as stale."),
    Metric(
        "completions/settled_mean_length",
        "tokens",
        "Mean length of whole rollouts of groups that were stopped "
        "early: censored, with `settle: abort` short ones finish first.",
    ),
    Metric("completions/settled_kept_mean_length", "tokens", "Mean length of the kept rollouts of the same groups."),
    Metric("prompt_length/mean", "tokens", "Mean prompt length of the step's groups.", origin="verl"),
    Metric("prompt_length/max", "tokens", "Longest prompt of the step's groups.", origin="verl"),
)

LEARNING = (
    Metric("loss", "", "Loss of the step's batch: policy term and, where on, the KL term.", origin="TRL"),
    Metric("grad_norm", "", "Gradient norm before clipping, mean over the step's updates.", origin="TRL"),
    Metric("learning_rate", "", "Learning rate of the step's last update.", origin="TRL"),
    Metric("entropy", "nats", "Entropy of the policy, mean over the trained tokens.", origin="TRL"),
    Metric("kl", "nats", "KL divergence to the reference model (k3 estimator), mean over tokens.", origin="TRL"),
    Metric("ratio_mean", "ratio", "π_θ/π_old, mean over the trained tokens; 1 with one update a batch."),
    Metric("clip_ratio/low_mean", "share", "Trained tokens clipped at 1 - clip_low.", origin="TRL"),
    Metric("clip_ratio/low_min", "share", "The same, lowest of the micro-batches.", origin="TRL"),
    Metric("clip_ratio/high_mean", "share", "Trained tokens clipped at 1 + clip_high.", origin="TRL"),
    Metric("clip_ratio/high_max", "share", "The same, highest of the micro-batches.", origin="TRL"),
    Metric("clip_ratio/region_mean", "share", "Trained tokens clipped at either end.", origin="TRL"),
    Metric("sampling/sampling_logp_difference/mean", "nats", "Distance of learner and engine log-probability, mean.",
           origin="TRL"),
    Metric("sampling/sampling_logp_difference/max", "nats", "The same, largest.", origin="TRL"),
    Metric("sampling/importance_sampling_ratio/min", "ratio", "π_old/μ a token before the cap, lowest.", origin="TRL"),
    Metric("sampling/importance_sampling_ratio/mean", "ratio", "The same, mean.", origin="TRL"),
    Metric("sampling/importance_sampling_ratio/max", "ratio", "The same, highest.", origin="TRL"),
    Metric("sampling/effective_sample_size", "share", "Effective sample size of the factors, of the trained tokens."),
    Metric("sampling/capped_ratio", "share", "Trained tokens whose factor was cut at `correction.cap`."),
    Metric("sampling/masked_ratio", "share", "Trained tokens left out by `correction.mask`."),
    Metric("mismatch_kl", "nats", "KL divergence of the engine from the learner (k3 estimator), mean over tokens.",
           origin="prime-rl"),
)  # fmt: skip

EVAL = (
    Metric(
        "eval/greedy_accuracy",
        "share",
        "Held-out rows answered correctly under greedy decoding: the first reward with a "
        "positive weight is at the top of its range (at least 1 where it declares none).",
    ),
    Metric("eval/sampled_accuracy", "share", "Correct share of sampled completions, mean over held-out rows."),
    Metric("eval/pass_at_k", "share", "Held-out rows with at least one correct sampled completion."),
    Metric("eval/reward", "", "Mean reward of the sampled completions (greedy where none are sampled)."),
    Metric("eval/rewards/<name>/mean", "", "Mean of one reward, unweighted, over the same completions."),
    Metric("eval/mean_length", "tokens", "Mean length of the same completions."),
    Metric("eval/clipped_ratio", "share", "The same completions that were cut at the token limit."),
    Metric("eval/rows", "rows", "Held-out rows evaluated."),
    Metric("eval/failed", "rows", "Held-out rows without a result (no valid reward, or the worker died)."),
    Metric("eval/version", "version", "Weight version that all of the evaluation ran on."),
)
