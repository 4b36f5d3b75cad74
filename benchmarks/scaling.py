"""One run goes 1 + 1, 3 + 1, 2 + 2 (generators + learner ranks) while it trains: rates and loss across each change.

    python -m benchmarks.scaling [--steps 8] [--rate 1500]

The generators are paced engines (`--rate` tokens/s each: they sleep, so that three of them are not held back by the
cores of one machine); learner ranks, broadcasts, selection and every rollout's way are real, on the CPU. A phase is
measured over `--steps` steps in which the pools kept their sizes: completion tokens of their groups over the seconds
from the step before them to their last. A change counts from the request to the first step with the new sizes.

Writes `benchmarks/results/scaling.json` and `docs/images/scaling.png`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from pods_cluster.actor_names import NAMESPACE
from pods_cluster.client.demo import CONFIG
from pods_cluster.config import Config, load_config
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.task import make_splits, write_jsonl
from pods_cluster.quickstart.tiny_model import ModelSize, build_model
from pods_cluster.run.run_actors import start_controller
from pods_cluster.run.status import LiveStatus
from pods_cluster.telemetry.figure import BLUE, GREEN, INK, ORANGE, STYLE
from pods_cluster.telemetry.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results" / "scaling.json"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
TITLE = "One run while its pools change (paced generators, CPU learner ranks)"
SERIES = ("step", "elapsed", "generator/workers", "learner/workers", "tokens/sampled", "timing_s/step", "timing_s/scale",
          "loss")  # fmt: skip
"""What the figure draws, a step each."""
PHASES = [(1, 1), (3, 1), (2, 2)]
PATIENCE = 300.0


def configuration(folder: Path, rate: float) -> Config:
    """The quickstart's tiny model, untrained, with paced engines that hold all rollouts of a step at once."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    build_model(ModelSize(), tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_jsonl(make_splits(seed=0).train, folder / "train.jsonl")
    options = f"{{tokens_per_second: {rate}, shortest: 16, longest: 48}}"
    return load_config(
        CONFIG,
        [
            f"model.path={folder / 'model'}",
            f"data.path={folder / 'train.jsonl'}",
            "data.eval=null",
            f"reward=[{{name: '{Path(__file__).with_name('even_digits.py')}:even_digits'}}]",
            "generator.engine=paced",
            f"generator.engine_options={options}",
            "generator.max_tokens=48",
            "generator.rollouts_per_prompt=16",
            "selector.no_signal=keep",
            "learner.prompts_per_step=12",
            "learner.schedule=constant",
            "learner.learning_rate=1e-5",
            "staleness=1",
            f"run.dir={folder}",
            "run.name=scaling",
            "run.steps=100000",
            "run.eval.every=0",
            "run.checkpoint.every=0",
            "run.samples_every=0",
            "run.export=false",
        ],
    )


def drive(config: Config, steps: int, say: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run through the phases; the step records, and the changes with their times."""
    controller = start_controller(config, resume=False)
    done = controller.run.remote()
    folder = RunFolder(Path(config.run.dir) / config.run.name)

    def status() -> LiveStatus:
        if ray.wait([done], timeout=0)[0]:
            ray.get(done)
        return ray.get(controller.status.remote(), timeout=60)

    def wait(what: str, check: Any) -> LiveStatus:
        deadline = time.monotonic() + PATIENCE
        while not check(told := status()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE:g} s ({told})")
            time.sleep(0.1)
        return told

    changes: list[dict[str, Any]] = []
    wait("start", lambda told: told.step)
    for index, (generators, learners) in enumerate(PHASES):
        if index:
            asked, before = time.time(), status().step
            ray.get(controller.scale.remote(generators, learners))
            told = wait(
                f"{generators} + {learners}",
                lambda told, want=(generators, learners): (
                    told.note is None and (told.generators, told.learners) == want
                ),
            )
            changes.append({"to": [generators, learners], "asked": asked, "asked_at_step": before,
                            "settled_at_step": told.step})  # fmt: skip
        first = status().step or 0
        wait("the phase's steps", lambda told, until=first + steps + 2: (told.step or 0) >= until)
        say(f"{generators} + {learners}: steps up to {status().step}")
    ray.get(controller.stop.remote("measured"))
    ray.get(done, timeout=PATIENCE)
    return [record for record in folder.read_metrics() if record["step"]], changes


def phase(records: list[dict[str, Any]], sizes: tuple[int, int], steps: int) -> dict[str, Any]:
    """Rates of the last `steps` steps that had these sizes; the step before them is where the clock starts. A step in
    which a pool changed (more than half a second of it) belongs to none."""
    same = [
        r
        for r in records
        if (r["generator/workers"], r["learner/workers"]) == sizes
        and not r["generator/leaving"]
        and r.get("timing_s/scale", 0.0) < 0.5
    ]
    measured = same[-steps:]
    start = next(r for r in reversed(records) if r["step"] < measured[0]["step"])
    seconds = measured[-1]["time"] - start["time"]
    return {
        "generators": sizes[0],
        "learners": sizes[1],
        "steps": [measured[0]["step"], measured[-1]["step"]],
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(r["tokens/sampled"] for r in measured) / seconds, 1),
        "rollouts_per_second": round(sum(r["rollouts/generated"] for r in measured) / seconds, 2),
        "trained_per_second": round(sum(r["rollouts/trained"] for r in measured) / seconds, 2),
        "step_seconds_median": round(statistics.median(r["timing_s/step"] for r in measured), 3),
        "update_seconds_median": round(statistics.median(r["timing_s/update"] for r in measured), 3),
        "publish_seconds_median": round(statistics.median(r["timing_s/publish"] for r in measured), 3),
        "loss_mean": round(statistics.fmean(r["loss"] for r in measured), 5),
        "generator_idle_share": round(statistics.fmean(r["generator/idle_share"] for r in measured), 3),
    }


def effects(records: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each change cost: seconds to take effect, and the longest step on the way beside the usual one."""
    found = []
    for change in changes:
        sizes = tuple(change["to"])
        arrived = next(r for r in records if r["step"] > change["asked_at_step"]
                       and (r["generator/workers"], r["learner/workers"]) == sizes)  # fmt: skip
        between = [r for r in records if change["asked_at_step"] < r["step"] <= arrived["step"]]
        found.append(
            {
                "to": list(sizes),
                "seconds_to_effect": round(arrived["time"] - change["asked"], 1),
                "steps_meanwhile": len(between),
                "longest_step_seconds": round(max(r["timing_s/step"] for r in between), 2),
                "seconds_at_boundaries": round(sum(r.get("timing_s/scale", 0.0) for r in between), 2),
            }
        )
    return found


def draw(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Rate, step time and loss over time, with the sizes of the pools behind them."""
    import matplotlib
    from matplotlib.figure import Figure

    times = [r["elapsed"] for r in records]
    # With staleness 1 two steps' groups end together: a rate is one of the four steps up to its point.
    spans = [(records[max(0, end - 4)], records[max(0, end - 4) + 1 : end + 1]) for end in range(1, len(records))]
    rates = [sum(r["tokens/sampled"] for r in span) / (span[-1]["elapsed"] - start["elapsed"]) for start, span in spans]
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(9, 8.5), layout="constrained")
        sizes, rate, seconds, loss = figure.subplots(4, 1, sharex=True, height_ratios=[1, 2, 2, 2])
        for pool, color, label in (("generator", BLUE, "generators"), ("learner", ORANGE, "learner ranks")):
            sizes.step(times, [r[f"{pool}/workers"] for r in records], where="post", color=color, label=label)
        sizes.set_ylim(0, 1.5 * max(max(r["generator/workers"], r["learner/workers"]) for r in records))
        sizes.yaxis.get_major_locator().set_params(integer=True)
        sizes.legend(loc="upper left", ncols=2)
        rate.plot(times[1:], rates, marker=".", color=GREEN)
        rate.set_ylabel("tokens sampled / s\n(over four steps)")
        seconds.plot(times, [r["timing_s/step"] for r in records], marker=".", color=BLUE, label="step")
        changing = [r.get("timing_s/scale", 0.0) for r in records]
        seconds.plot(times, changing, color=ORANGE, label="of that: changing pools")
        seconds.set_ylabel("seconds a step")
        seconds.legend()
        loss.plot(times, [r["loss"] for r in records], marker=".", color=BLUE)
        loss.set_ylabel("loss")
        loss.set_xlabel("seconds")
        figure.align_ylabels()
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a phase")
    parser.add_argument("--rate", type=float, default=1500.0, help="tokens/s of one paced generator")
    options = parser.parse_args()
    host, console = machine(), Console()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder), options.rate)
        ray.init("local", num_cpus=6, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False,
                 logging_level=40)  # fmt: skip
        try:
            records, changes = drive(config, options.steps, console.print)
        finally:
            ray.shutdown()
    phases = [phase(records, sizes, options.steps) for sizes in PHASES]
    gain = phases[1]["tokens_per_second"] / phases[0]["tokens_per_second"]
    shown = Table("generators", "learner ranks", "tokens/s", "step s", "update s", "loss")
    for row in phases:
        shown.add_row(*(str(row[key]) for key in ("generators", "learners", "tokens_per_second", "step_seconds_median",
                                                  "update_seconds_median", "loss_mean")))  # fmt: skip
    console.print(shown)
    console.print(f"generation, 1 to 3 generators: {gain:.2f} times")
    result = {
        "machine": host,
        "engine": f"paced, {options.rate:g} tokens/s each",
        "phases": phases,
        "generation_1_to_3": round(gain, 3),
        "changes": effects(records, changes),
        "steps": table(records, SERIES),
    }
    write_result(RESULTS, result)
    draw(records, FIGURE, TITLE)


if __name__ == "__main__":
    main()
