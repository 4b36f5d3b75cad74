// Which curves are drawn together, and how.

const line = (metric, name) => ({ metric, name });
const share = { format: ".1%", range: [0, null] };

export const STAGES = ["generate", "fetch", "update", "publish", "eval", "checkpoint"];
export const FATES = ["trained", "no_signal", "too_few_valid", "stale", "lost", "cancelled"];

const CHARTS = {
  ratio: { title: "Rollouts per trained rollout", unit: "scored ÷ trained", lines: [
    line("rollout_to_update_ratio", "step"), line("rollout_to_update_ratio/cumulative", "cumulative")], zero: true },
  reward: { title: "Reward", lines: [line("reward", "all rollouts"), line("reward/kept", "kept")] },
  accuracy: { title: "Held-out accuracy", lines: [line("eval/greedy_accuracy", "greedy"),
    line("eval/sampled_accuracy", "sampled"), line("eval/pass_at_k", "pass@k")], marks: true, format: ".1%" },
  rates: { title: "Rollouts per second", unit: "1/s", lines: [line("throughput/rollouts_generated", "generated"),
    line("throughput/rollouts_selected", "selected"), line("throughput/rollouts_trained", "trained")], zero: true },
  length: { title: "Response length", unit: "tokens", lines: [line("completions/mean_length", "all"),
    line("completions/kept_mean_length", "kept"), line("completions/mean_terminated_length", "ended by itself")] },
  idle: { title: "Idle share of the pools", lines: [line("generator/idle_share", "generators"),
    line("learner/idle_share", "learner")], ...share, top: 1 },
  loss: { title: "Loss", lines: [line("loss", "loss")] },
  grad: { title: "Gradient norm", lines: [line("grad_norm", "before clipping")], zero: true },
  entropy: { title: "Entropy", unit: "nats", lines: [line("entropy", "policy")] },
  mismatch: { title: "Engine–learner mismatch", unit: "nats", lines: [line("mismatch_kl", "KL (k3)"),
    line("sampling/sampling_logp_difference/mean", "log-prob difference")], log: true },
  ratioPi: { title: "Importance ratio π/μ", lines: [line("sampling/importance_sampling_ratio/mean", "mean"),
    line("sampling/importance_sampling_ratio/min", "min"), line("sampling/importance_sampling_ratio/max", "max")] },
  clip: { title: "Clipped tokens", lines: [line("clip_ratio/region_mean", "either end"), line("clip_ratio/low_mean", "low"),
    line("clip_ratio/high_mean", "high")], ...share },
  kl: { title: "KL to the reference", unit: "nats", lines: [line("kl", "k3")] },
  rate: { title: "Learning rate", lines: [line("learning_rate", "last update")], zero: true, tick: ".1~e" },
  staleness: { title: "Staleness", unit: "versions", lines: [line("staleness/mean", "mean"), line("staleness/max", "max")],
    zero: true },
  stages: { title: "Seconds per stage", unit: "s", stack: true, lines: STAGES.map((stage) => line(`timing_s/${stage}`, stage)) },
  step: { title: "Seconds per step", unit: "s", lines: [line("timing_s/step", "step"), line("timing_s/wait", "learner waits")],
    zero: true },
  sync: { title: "Weight-sync time", unit: "s", lines: [line("weights/sync_seconds", "first byte to resumption")], zero: true },
  fates: { title: "Fates of groups", unit: "groups", stack: true, lines: FATES.map((fate) => line(`groups/${fate}`,
    fate.replaceAll("_", " "))) },
  flight: { title: "Groups under way", unit: "groups", lines: [line("groups/in_flight", "in flight"),
    line("groups/queued", "queued at the selector")], zero: true },
  engine: { title: "Rollouts in the engines", unit: "rollouts", lines: [line("generator/running", "decoding"),
    line("generator/waiting", "waiting")], zero: true },
  cache: { title: "KV cache in use", lines: [line("generator/kv_cache_usage", "mean of workers")], ...share, top: 1 },
  workers: { title: "Workers", lines: [line("generator/workers", "generators"), line("learner/workers", "learner ranks")],
    zero: true, stepped: true },
  tokens: { title: "Tokens per second", unit: "1/s", lines: [line("throughput/tokens_sampled", "sampled"),
    line("throughput/tokens_trained", "trained")], zero: true },
  tokenRatio: { title: "Tokens per trained token", unit: "sampled ÷ trained", lines: [line("rollout_to_update_ratio/tokens", "step"),
    line("rollout_to_update_ratio/tokens_cumulative", "cumulative")], zero: true },
  ended: { title: "Rollouts that were not trained on", unit: "rollouts", lines: [line("rollouts/aborted", "aborted"),
    line("rollouts/lost", "lost"), line("rollouts/stale", "stale"), line("rollouts/excluded", "excluded")], zero: true },
  spread: { title: "Reward spread in a group", lines: [line("reward_std", "all rollouts"), line("reward_std/kept", "kept")],
    zero: true },
  silent: { title: "Groups without signal", lines: [line("frac_reward_zero_std", "all rewards equal")], ...share, top: 1 },
  cut: { title: "Cut at the token limit", lines: [line("completions/clipped_ratio", "all"),
    line("completions/kept_clipped_ratio", "kept")], ...share },
  scoring: { title: "Seconds to a reward", unit: "s", lines: [line("scoring/seconds_mean", "mean"),
    line("scoring/seconds_max", "longest"), line("timing_s/score", "generators wait")], zero: true },
};

export const OVERVIEW = ["ratio", "reward", "accuracy", "rates", "length", "idle", "loss", "mismatch", "stages", "fates",
  "staleness", "sync"];

export const SECTIONS = [
  ["Reward and accuracy", ["reward", "accuracy", "spread", "silent"]],
  ["From rollout to update", ["ratio", "rates", "fates", "tokenRatio", "tokens", "ended"]],
  ["Responses", ["length", "cut"]],
  ["Learning", ["loss", "grad", "entropy", "mismatch", "ratioPi", "clip", "kl", "rate"]],
  ["Time", ["stages", "step", "sync", "staleness"]],
  ["Pools", ["idle", "workers", "engine", "cache", "flight", "scoring"]],
];

export const chart = (id) => ({ id, ...CHARTS[id] });

/** Charts for what the run tells beyond the ones above: one a metric, by the registry's section. */
export function others(metrics) {
  const drawn = new Set(Object.values(CHARTS).flatMap((spec) => spec.lines.map((item) => item.metric)));
  const sections = new Map();
  for (const metric of metrics) {
    if (drawn.has(metric.name) || metric.name === "time" || metric.name === "elapsed") continue;
    if (!sections.has(metric.section)) sections.set(metric.section, []);
    sections.get(metric.section).push({
      id: `metric:${metric.name}`, title: metric.name, unit: metric.unit, about: metric.meaning,
      lines: [line(metric.name, metric.name)],
    });
  }
  return [...sections].sort(([a], [b]) => a.localeCompare(b));
}
