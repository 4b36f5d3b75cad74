"""Statistics of a step: summed over the tokens of each rank, added up over ranks, and turned into metrics.

Importable without torch: the controller does the adding, and would spend seconds and memory on an import that it has no
other use for.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenStats:
    """Statistics over tokens, as sums, counts and maxima, so that those of a batch's parts add up exactly.

    A minimum is kept as the maximum of the negated values (`…_negated`).
    """

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: TokenStats) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)


def step_metrics(stats: TokenStats) -> dict[str, float]:
    """Metrics of a step, by registry name, from the statistics of all ranks and micro-batches.

    Shares and means are over trained tokens.
    """
    sums, maxima = stats.sums, stats.maxima
    tokens = max(sums.get("tokens", 0.0), 1.0)
    updates = max(sums.get("updates", 1.0), 1.0)
    metrics = {
        "loss": sums.get("loss", 0.0) / updates,
        "entropy": sums.get("entropy", 0.0) / tokens,
        "ratio_mean": sums.get("ratio", 0.0) / tokens,
        "clip_ratio/low_mean": sums.get("clipped_low", 0.0) / tokens,
        "clip_ratio/low_min": -maxima.get("clipped_low_negated", 0.0),
        "clip_ratio/high_mean": sums.get("clipped_high", 0.0) / tokens,
        "clip_ratio/high_max": maxima.get("clipped_high", 0.0),
    }
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    if "kl" in sums:
        metrics["kl"] = sums["kl"] / tokens
    known = sums.get("mismatch_tokens", 0.0)
    if known:
        metrics["sampling/sampling_logp_difference/mean"] = sums["mismatch_abs"] / known
        metrics["sampling/sampling_logp_difference/max"] = maxima["mismatch_max"]
        metrics["mismatch_kl"] = sums["mismatch_k3"] / known
        metrics["sampling/importance_sampling_ratio/min"] = -maxima["factor_negated"]
        metrics["sampling/importance_sampling_ratio/mean"] = sums["factor"] / known
        metrics["sampling/importance_sampling_ratio/max"] = maxima["factor"]
    if sums.get("used_squared"):
        metrics["sampling/effective_sample_size"] = sums["used"] ** 2 / (tokens * sums["used_squared"])
        metrics["sampling/capped_ratio"] = sums.get("capped", 0.0) / tokens
        metrics["sampling/masked_ratio"] = sums.get("masked", 0.0) / tokens
    return metrics
