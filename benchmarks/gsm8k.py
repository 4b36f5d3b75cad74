"""What runs made of a model, from their folders: accuracy before and after with its interval, curves, seconds, samples.

    pods train configs/gsm8k-2gpu.yaml run.seed=1 && pods train configs/gsm8k-2gpu.yaml run.seed=2 run.name=gsm8k-0.5b-2
    python -m benchmarks.gsm8k runs/gsm8k-0.5b runs/gsm8k-0.5b-2 --out benchmarks/results/gsm8k_0.5b

Writes `<out>.json` and `<out>.png`. Each held-out row answers greedily before the first and after the last step, so the gain is
a paired difference: its 95 % interval is the mean of the rows' differences (-1, 0, 1) and 1.96 of its standard errors. Over
several runs of the same rows, a row's difference is its mean over the runs. Run it on the machine that trained, or name that
one with --machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.telemetry.catalog import STAGES
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import Record, merge_steps
from pods_cluster.telemetry.summary import summarize

CURVES = ("reward", "timing_s/step")
MISMATCH = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/mean",
    "mismatch_kl",
)
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Gain:
    """Greedy accuracy of the same rows before and after. `low` and `high` bound the gain at 95 %.

    `gained` rows were wrong and are right, `lost` ones the other way round (where several runs go together: their mean).
    """

    rows: int
    before: float
    after: float
    gain: float
    low: float
    high: float
    gained: float
    lost: float


def gain(runs: Sequence[Mapping[int, tuple[bool, bool]]]) -> Gain:
    """Gain in accuracy over runs that each give row -> (right before, right after); rows that one of them lacks are left out.

    Raises ValueError where fewer than two rows are in all of them.
    """
    rows = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    if len(rows) < 2:
        raise ValueError(
            f"{len(rows)} row(s) were answered before and after in all runs; an interval needs two or more"
        )
    pairs = np.array([[run[row] for row in rows] for run in runs], dtype=np.float64)  # [runs, rows, 2]
    before, after = pairs[..., 0], pairs[..., 1]
    differences = (after - before).mean(0)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(rows))
    return Gain(
        rows=len(rows),
        before=float(before.mean()),
        after=float(after.mean()),
        gain=mean,
        low=mean - Z95 * error,
        high=mean + Z95 * error,
        gained=float(((before == 0) & (after == 1)).sum(1).mean()),
        lost=float(((before == 1) & (after == 0)).sum(1).mean()),
    )


def first_and_last(rows: Iterable[Record]) -> dict[int, tuple[bool, bool]]:
    """Row -> (right in the first evaluation, right in the last), of rows that were scored in both."""
    by_step: dict[int, dict[int, bool]] = {}
    for row in rows:
        if row["greedy"] is not None:
            by_step.setdefault(row["step"], {})[row["row"]] = bool(row["greedy"])
    if len(by_step) < 2:
        return {}
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    return {row: (first[row], last[row]) for row in first if row in last}


def look_at(path: Path) -> tuple[dict[str, Any], dict[int, tuple[bool, bool]]]:
    """Everything of one run that goes into the result, and its paired rows."""
    folder = RunFolder.open(path)
    records = merge_steps(folder.read_metrics())
    steps = [record for record in records if "timing_s/step" in record]
    rows = first_and_last(folder.read_evals())
    summary = asdict(summarize(records, folder.read_events(), run=folder.name, status=_status(folder)))
    return {
        "run": folder.name,
        "config": yaml.safe_load(folder.config.read_text(encoding="utf-8")),
        "summary": summary,
        "gain": asdict(gain([rows])) if len(rows) > 1 else None,
        "seconds_per_step": {
            stage: _mean([record.get(f"timing_s/{stage}", 0.0) for record in steps])
            for stage in (*STAGES, "step")
            if any(f"timing_s/{stage}" in record for record in steps)
        },
        "ratio": _last(records, "rollout_to_update_ratio/cumulative"),
        "token_ratio": _last(records, "rollout_to_update_ratio/tokens_cumulative"),
        "idle_shares": {
            pool: _mean([r[f"{pool}/idle_share"] for r in steps if f"{pool}/idle_share" in r])
            for pool in ("generator", "learner")
        },
        "mismatch": {
            name: {"mean": _mean(found), "largest": max(found)}
            for name in MISMATCH
            if (found := [record[name] for record in steps if record.get(name) is not None])
        },
        "weights_bytes": _last(records, "weights/bytes"),
        "lengths": _lengths(steps),
        "curves": {
            "steps": [record["step"] for record in steps],
            "elapsed": [record["elapsed"] for record in steps],
            **{name: [r.get(name) for r in steps] for name in CURVES if any(name in r for r in steps)},
        },
        "evaluations": [
            {"step": r["step"], "elapsed": r["elapsed"], "accuracy": r["eval/greedy_accuracy"]}
            for r in records
            if r.get("eval/greedy_accuracy") is not None
        ],
        "samples": _samples(folder.read_samples()),
    }, rows


def _status(folder: RunFolder) -> str:
    try:
        return str(json.loads(folder.summary.read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError):
        return "unknown"


def _lengths(steps: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """Mean completion tokens over the first and the last tenth of the steps."""
    tenth = max(1, len(steps) // 10)
    names = ("completions/mean_length", "completions/kept_mean_length", "completions/clipped_ratio")
    return {
        name: {
            "first": _mean([record[name] for record in steps[:tenth] if name in record]),
            "last": _mean([record[name] for record in steps[-tenth:] if name in record]),
        }
        for name in names
    }


def _samples(groups: Sequence[Record], texts: int = 1) -> dict[str, Any]:
    """Samples of the first and the last group that was trained: the prompt, and rollouts of the highest and the lowest reward."""

    def show(group: Record) -> dict[str, Any]:
        scored = sorted((r for r in group["rollouts"] if r["reward"] is not None), key=lambda r: r["reward"])
        shown = scored[-texts:][::-1] + [rollout for rollout in scored[:texts] if rollout not in scored[-texts:]]
        fields = ("index", "reward", "kept", "length", "text")
        return {
            "step": group["step"],
            "prompt": group["prompt"],
            "answer": group["answer"],
            "rewards": [rollout["reward"] for rollout in group["rollouts"]],
            "kept": [rollout["index"] for rollout in group["rollouts"] if rollout["kept"]],
            "rollouts": [{name: rollout[name] for name in fields} for rollout in shown],
        }

    groups = [group for group in groups if group["fate"] in (None, "trained")]
    return {"first": show(groups[0]), "last": show(groups[-1])} if groups else {}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _last(records: Sequence[Record], name: str) -> float | None:
    return next((record[name] for record in reversed(records) if record.get(name) is not None), None)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy and reward against wall clock and steps; seconds of a step by stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from pods_cluster.telemetry.figure import STAGE_COLORS, STYLE

    colors = ("#0f766e", "#2563eb", "#d97706", "#9333ea", "#be123c")
    with pyplot.rc_context(cast(Any, STYLE)):
        figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
        for place, (key, unit, scale) in enumerate((("elapsed", "minutes", 60.0), ("step", "steps", 1.0))):
            for run, color in zip(runs, (colors * len(runs))[: len(runs)], strict=True):
                evaluations, curves = run["evaluations"], run["curves"]
                axes[place, 0].plot(
                    [e[key] / scale for e in evaluations],
                    [100 * e["accuracy"] for e in evaluations],
                    "o-",
                    ms=4,
                    color=color,
                    label=run["run"],
                )
                across = [value / scale for value in curves["elapsed" if key == "elapsed" else "steps"]]
                reward = [math.nan if value is None else value for value in curves.get("reward", [])]
                axes[place, 1].plot(across, reward, lw=1.2, color=color)
            axes[place, 0].set(title="Greedy accuracy on held-out rows, %", xlabel=unit)
            axes[place, 1].set(title="Mean reward of all rollouts", xlabel=unit)
        axes[0, 0].legend(loc="best")
        names = [stage for stage in STAGES if any(run["seconds_per_step"].get(stage) for run in runs)]
        left = np.zeros(len(runs))
        for stage in names:
            seconds = np.array([run["seconds_per_step"].get(stage) or 0.0 for run in runs])
            axes[0, 2].barh(
                range(len(runs)), seconds, height=0.5, left=left, color=STAGE_COLORS.get(stage, "#999999"), label=stage
            )
            left += seconds
        axes[0, 2].set(
            title="Seconds of a step, by stage", yticks=range(len(runs)), yticklabels=[r["run"] for r in runs]
        )
        axes[0, 2].legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
        shown = [run for run in runs if run["gain"]]
        for place, run in enumerate(shown):
            found = run["gain"]
            spread = [[100 * (found["gain"] - found["low"])], [100 * (found["high"] - found["gain"])]]
            axes[1, 2].errorbar(
                [100 * found["gain"]], [place], xerr=spread, fmt="o", color=colors[place % len(colors)], capsize=4
            )
        axes[0, 2].set_ylim(-0.7, len(runs) - 0.3)
        axes[1, 2].set_ylim(-0.7, max(len(shown), 1) - 0.3)
        axes[1, 2].axvline(0, color="#6b7280", lw=0.8)
        axes[1, 2].set(
            title="Gain in greedy accuracy, points (95 %)",
            yticks=range(len(shown)),
            yticklabels=[r["run"] for r in shown],
        )
        figure.savefig(path)
        pyplot.close(figure)


def analyse(paths: Sequence[Path], about: str | None = None) -> dict[str, Any]:
    """The result of these runs. `about`: the machine that trained, where it is not this one."""
    found = [look_at(path) for path in paths]
    paired = [rows for _, rows in found if len(rows) > 1]
    return {
        "machine": about or machine(),
        "together": asdict(gain(paired)) if len(paired) > 1 else None,
        "runs": [run for run, _ in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="path without ending")
    parser.add_argument("--machine", help="the machine that trained, where it is another one")
    arguments = parser.parse_args()
    result = analyse(arguments.runs, arguments.machine)
    write_result(Path(f"{arguments.out}.json"), result)
    draw(result["runs"], Path(f"{arguments.out}.png"))
    for run in result["runs"]:
        print(f"{run['run']}: {_sentence(run['gain'])}; {run['ratio']} rollouts per trained rollout")
    if result["together"]:
        print(f"together: {_sentence(result['together'])}")


def _sentence(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no rows were evaluated before and after"
    return (
        f"{100 * found['before']:.1f} % -> {100 * found['after']:.1f} % of {found['rows']} rows, "
        f"gain {100 * found['gain']:+.1f} points [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    )


if __name__ == "__main__":
    main()
