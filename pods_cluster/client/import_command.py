"""`pods import`: another trainer's command line as a run's YAML, with a list of what did not carry over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from pods_cluster.client.train_command import train
from pods_cluster.config import ConfigError, build_config, parse_config
from pods_cluster.config.load import changed
from pods_cluster.migrate.command_lines import parse_flags, parse_overrides
from pods_cluster.migrate.translation import Translation

TRAINERS = ("verl", "openrlhf")


def import_settings(
    trainer: Annotated[str, typer.Argument(metavar="TRAINER", help="verl or openrlhf.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORDS", help="Its command line, as it is typed there.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default the YAML is printed.")
    ] = None,
    start: Annotated[
        bool, typer.Option("--train", help="Train with it at once; without --output in NAME.yaml, by the run's name.")
    ] = False,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --train: a field of the run, as in generator.workers=2."),
    ] = None,
) -> None:
    """Turn another trainer's command into a run's YAML: `pods import verl -o run.yaml -- data.train_files=…`."""
    text, told = imported(trainer, words or [])
    if fields and not start:
        raise ConfigError(f"--set: {fields} is for --train; change the file, or give them to pods train")
    if start and output is None:
        output = Path(f"{parse_config(text).run.name}.yaml")
    if output is not None and output.exists():
        raise ConfigError(f"--output: {output} exists already; give another file, or remove it")
    console = Console(stderr=True)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
        console.print(
            f"wrote {output}; look at it with: pods check {output}", markup=False, highlight=False, soft_wrap=True
        )
    for matters, title in ((True, "did not carry over, and changes the run"), (False, "has no part in a run")):
        lines = [item for item in told.left_out if item.matters == matters]
        if lines:
            console.print(f"{title}:", style="yellow" if matters else "dim", highlight=False)
        for item in lines:
            console.print(f"  - {item}", markup=False, highlight=False, soft_wrap=True)
    if start:
        assert output is not None
        train(output, fields)


def imported(trainer: str, words: list[str]) -> tuple[str, Translation]:
    """The YAML of a command line, validated, and its translation. Raises ConfigError."""
    if trainer == "verl":
        from pods_cluster.migrate.verl_fields import translate_verl

        told = translate_verl(parse_overrides(words))
    elif trainer == "openrlhf":
        from pods_cluster.migrate.openrlhf_flags import translate_openrlhf

        told = translate_openrlhf(parse_flags(words))
    else:
        raise ConfigError(
            f"pods import: {trainer!r} is unknown; it reads {' and '.join(TRAINERS)} (TRL: see docs/migrate.md)"
        )
    tree = changed({}, told.fields)
    build_config(tree, source=f"imported from {trainer}")
    ordered = {name: tree[name] for name in ("model", "data", "reward", "generator", "selector", "learner", "run")}
    text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
    return (
        f"# Imported from a command line of {trainer}. Fields that are not here have their defaults (docs/config.md).\n{text}",
        told,
    )
