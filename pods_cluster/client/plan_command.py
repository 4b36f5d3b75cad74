"""`pods plan`: the split of GPUs and the rollouts per prompt that keep both pools busy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pods_cluster.config import Config, ConfigError, load_config
from pods_cluster.sizing.balance import Rates, StepForecast, StepShape, forecast, measured_rates
from pods_cluster.sizing.card_memory import CardMemory, card_memory
from pods_cluster.sizing.card_splits import cards_needed, splits
from pods_cluster.sizing.step_measurement import StepMeasurement

Rate = Annotated[float | None, typer.Option(help="Completion tokens a second of one saturated generator worker.")]


def plan(
    config: Annotated[Path, typer.Argument(metavar="RUN.YAML", help="The run's configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, as in learner.workers=2.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs to split; by default those of the configured pools.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of a run to take the rates from.")] = None,
    generate_rate: Rate = None,
    update_rate: Annotated[
        float | None, typer.Option(help="Completion tokens a second that one learner rank trains, fetching included.")
    ] = None,
    sync_seconds: Annotated[float | None, typer.Option(help="Seconds that new weights take to every worker.")] = None,
    length: Annotated[float | None, typer.Option(help="Mean completion tokens of a rollout.")] = None,
    kept_length: Annotated[
        float | None, typer.Option(help="Mean completion tokens of a kept rollout; by default that of all.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds that a batch takes beyond its tokens at that rate: its longest rollouts.")
    ] = 0.0,
    card_gb: Annotated[
        float | None,
        typer.Option(help="GB of a card that both pools share: plan the engines' caches beside the learner."),
    ] = None,
    learner_gb: Annotated[
        float | None,
        typer.Option(
            help="GB that a learner rank takes at its peak; by default as measured. With --card-gb and without rates the memory "
            "alone is planned, and no pool is started."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of the calibration.")] = 4,
    groups: Annotated[int | None, typer.Option(min=1, help="Prompts in a step of the calibration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the split of GPUs, and the rollouts per prompt, that keep both pools busy.

    It shows the seconds of each stage, the idle share of each pool, and with --card-gb the memory of a card that both share.
    The rates are given as options, taken from a run's folder with --run, or else measured: the run's own pools are started
    for a few steps. --card-gb with --learner-gb alone needs no GPU.
    """
    from pods_cluster.client.calibrate import calibrate, steps_of_run
    from pods_cluster.run.cluster import ClusterError

    loaded = load_config(config, overrides or [])
    console = Console(stderr=as_json)
    given = {"--generate-rate": generate_rate, "--update-rate": update_rate, "--sync-seconds": sync_seconds,
             "--length": length}  # fmt: skip
    missing = [name for name, value in given.items() if value is None]
    measured: list[StepMeasurement] = []
    try:
        if card_gb is not None and learner_gb is not None and run is None and len(missing) == len(given):
            _show_memory(loaded, _memory(loaded, card_gb, learner_gb, []), as_json)
            return
        if not missing:
            assert generate_rate is not None
            assert update_rate is not None
            assert sync_seconds is not None
            assert length is not None
            rates = Rates(generate_rate, update_rate, sync_seconds, length, kept_length or length, drain_seconds)
        elif len(missing) < len(given):
            raise ConfigError(
                f"{missing[0]}: left out, but other rates are given; give {', '.join(missing)} too, or none"
            )
        elif run is not None:
            measured = steps_of_run(run)
            rates = measured_rates(measured)
        else:
            with console.status(f"measuring: {steps} steps on the run's own pools"):
                measured = calibrate(loaded, steps=steps, groups=groups)
            rates = measured_rates(measured)
        shape = StepShape.of(loaded)
        now = forecast(rates, shape)
        found = splits(rates, shape, gpus if gpus is not None else cards_needed(shape))
        memory = None if card_gb is None else _memory(loaded, card_gb, learner_gb, measured)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except ClusterError as error:
        raise ClusterError(
            f"{error}; or measure nothing here: give {', '.join(given)}, or --run of a run elsewhere, or --card-gb and "
            f"--learner-gb for the memory alone"
        ) from None
    if as_json:
        print(json.dumps(_values(loaded, rates, now, found, memory)))
        return
    _show(console, rates, now, found)
    console.print(Text(_in_flight(loaded)))
    if memory is not None:
        console.print(Text(memory.describe()))


def _memory(config: Config, card: float, learner: float | None, measured: list[StepMeasurement]) -> CardMemory:
    """The memory plan of a shared card. Raises ValueError where pools share none, or the learner's peak is not known."""
    from pods_cluster.client.model_sizes import model_sizes

    peak = max((step.learner_peak_bytes for step in measured), default=0.0) if learner is None else learner * 1e9
    for value, option in ((card, "--card-gb"), (1.0 if learner is None else learner, "--learner-gb")):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{option}: {value:g} must be a number above 0")
    if not peak:
        raise ValueError(
            "--learner-gb: left out, and no step on a GPU was measured; give it, or --run of a run on GPUs"
        )
    found = card_memory(config, model_sizes(config), card=card * 1e9, learner=peak)
    if found is None:
        raise ValueError(
            f"--card-gb: no card is shared: learner.gpus_per_worker: {config.learner.gpus_per_worker} leaves no room for "
            f"generator.gpus_per_worker: {config.generator.gpus_per_worker}; set both below 1, as 0.5 and 0.5"
        )
    return found


def _in_flight(config: Config) -> str:
    """A line on how many groups fill the engines, and how many `staleness` lets out."""
    generator, k = config.generator, config.staleness
    filled = generator.places_per_worker(generator.workers) * generator.workers
    out = (k + 1) * config.rollouts_per_step
    if not k:
        return f"staleness 0: the {out:,} rollouts of a step are issued at its start"
    text = f"{filled:,} rollouts fill the engines (generator.in_flight); staleness {k} lets {out:,} out"
    beside = k * config.rollouts_per_step
    if beside < filled:
        text += f", {beside:,} of them while a step is trained: the engines are not full then"
    return text


def _show_memory(config: Config, memory: CardMemory, as_json: bool) -> None:
    """Print the memory plan alone, where no rates are known."""
    if as_json:
        print(json.dumps({"in_flight": _in_flight_values(config), "memory": _memory_values(memory)}))
        return
    console = Console()
    console.print(Text(_in_flight(config)))
    console.print(Text(memory.describe()))


def _in_flight_values(config: Config) -> dict[str, Any]:
    generator = config.generator
    return {
        "fills_engines": generator.places_per_worker(generator.workers) * generator.workers,
        "out_at_most": (config.staleness + 1) * config.rollouts_per_step,
    }


def _memory_values(memory: CardMemory) -> dict[str, Any]:
    return {
        "learner_bytes": memory.learner,
        "engines": memory.engines,
        "weights_bytes": memory.weights,
        "cache_bytes": memory.cache,
        "left_bytes": memory.left,
        "fits": memory.fits,
        "kv_cache_gb": memory.cache_gib,
        "sequences_that_fit": memory.sequences_that_fit,
    }


def _values(
    config: Config, rates: Rates, now: StepForecast, found: list[StepForecast], memory: CardMemory | None
) -> dict[str, Any]:
    return {
        "in_flight": _in_flight_values(config),
        "memory": None if memory is None else _memory_values(memory),
        "rates": {
            name: getattr(rates, name)
            for name in ("generate", "update", "sync_seconds", "length", "kept_length", "drain")
        },
        "now": _numbers(now),
        "splits": [_numbers(split) for split in found],
    }


def _numbers(found: StepForecast) -> dict[str, Any]:
    return {
        "generators": found.shape.generators,
        "learners": found.shape.ranks,
        "gpus": cards_needed(found.shape),
        "rollouts_per_prompt": found.shape.rollouts,
        "generate_seconds": found.generate,
        "update_seconds": found.update,
        "sync_seconds": found.sync,
        "drain_seconds": found.drain,
        "bound": found.bound,
        "enough_staleness": found.enough_staleness,
        "step_seconds": found.step,
        "generator_idle": found.generator_idle,
        "learner_idle": found.learner_idle,
        "balanced_rollouts_per_prompt": found.balanced_rollouts,
    }


def _show(console: Console, rates: Rates, now: StepForecast, found: list[StepForecast]) -> None:
    console.print(
        Text(
            f"one generator {rates.generate:,.0f} tokens/s · one learner rank {rates.update:,.0f} tokens/s · publish "
            f"{rates.sync_seconds:.2f} s · {rates.length:.0f} tokens a rollout, {rates.kept_length:.0f} kept ones"
            + (f" · a batch drains for {rates.drain:.2f} s" if rates.drain >= 0.01 else "")
        )
    )
    k = now.shape.staleness
    others = [
        split
        for split in found[:4]
        if (split.shape.generators, split.shape.ranks) != (now.shape.generators, now.shape.ranks)
    ]
    rows = [("as configured", now), *((f"split {place}", split) for place, split in enumerate(others, start=1))]
    turns = "staleness 0: the pools take turns" if not k else f"staleness {k}"
    title = f"a step of {now.shape.prompts} prompts, {turns} (generators + learner ranks)"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("", "pools", "generate", "update", "step", "idle", "balanced n"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, split in rows:
        table.add_row(
            name,
            f"{split.shape.generators} + {split.shape.ranks}",
            f"{split.generate:.2f} s",
            f"{split.update:.2f} s",
            f"{split.step:.2f} s",
            f"{100 * split.generator_idle:.0f} + {100 * split.learner_idle:.0f} %",
            str(split.balanced_rollouts),
        )
    console.print(table)
    best = found[0]
    console.print(Text(_advice(now, best)))


def _advice(now: StepForecast, best: StepForecast) -> str:
    if not now.shape.staleness:
        k = best.enough_staleness
        return (
            f"With staleness: 0 each pool waits while the other works, whatever the split; staleness: {k} would make "
            f"the step of the best split about {best.bottleneck_seconds:.2f} s."
        )
    shape = best.shape
    text = (
        f"generator.workers={shape.generators} learner.workers={shape.ranks}: {best.step:.2f} s a step "
        f"({now.step / best.step:.2f} times as fast as configured); "
        f"generator.rollouts_per_prompt={best.balanced_rollouts} there keeps both pools busy"
    )
    if best.bound == "staleness":
        text += (
            f". It waits for the longest rollouts of a batch; staleness: {best.enough_staleness} would make the step "
            f"{best.bottleneck_seconds:.2f} s"
        )
    return text
