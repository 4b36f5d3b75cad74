"""This project and TRL in turn: one table, and a result that is written as each arm ends.

    pip install -r benchmarks/peers/requirements.txt
    python -m benchmarks.peers --model MODEL --data GSM8K --out benchmarks/results/peers_x.json
    python -m benchmarks.peers --model MODEL --data GSM8K --out result.json --arms ours-16-sync trl-16 --seconds 60
    python -m benchmarks.peers --model MODEL --data GSM8K --out result.json --rounds 3 --arms trl-16-server ours-16-k1-two-cards

Every arm is a process of its own with a deadline; one that fails is told with its cause, and the others go on. MODEL is a
folder; GSM8K a folder with `train.jsonl` and `test.jsonl`. README.md beside this file says what is compared and how.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.peers.arms import ARMS, ONE_CARD, Arm, Settings
from benchmarks.peers.card import visible_cards
from benchmarks.peers.measure import measure
from benchmarks.peers.summary import WARM, config_of, ratios, render_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", help="of ours, in place of each arm's own")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ONE_CARD, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--rounds", type=int, default=1, help="how often the arms are run, all of them in turn")
    parser.add_argument("--seconds", type=float, help="seconds of steps, in place of each arm's own")
    parser.add_argument("--deadline", type=float, help="seconds until an arm is ended, its start included")
    parser.add_argument("--server", help="address of a vLLM server that runs; else arms in server mode start their own")
    parser.add_argument("--evaluate", type=int, help="steps between evaluations, in place of each arm's own; 0: none")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="more of the configuration of ours")
    parser.add_argument("--target", type=float, default=0.30, help="held-out greedy accuracy whose time is taken")
    parser.add_argument("--append", action="store_true", help="keep the arms that --out has")
    parser.add_argument("--work", type=Path, help="where the arms' files are kept; else a folder that is removed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try this script out")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--held-out", type=int, help="rows of an evaluation; else all")
    options = parser.parse_args()
    settings = Settings(
        model=os.path.abspath(options.model),
        data=os.path.abspath(options.data),
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        device=options.device,
        server=options.server,
        held_out=options.held_out,
    )
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is too few; give 1 or more")
    cards = visible_cards() if settings.device == "cuda" else []
    if settings.device == "cuda" and (lacking := _lacking(options.arms, settings, cards)):
        parser.error(lacking)
    # A deadline around this command sends SIGTERM: arms and servers are ended then as they are on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    more = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in options.set)}
    result: dict[str, Any] = {
        "benchmark": "peers",
        "machine": machine() | {"peers": _versions(("trl", "accelerate", "datasets"))},
        "settings": {"model": Path(settings.model).name, "config": None, "set": more}
        | {
            name: getattr(settings, name) for name in ("prompts", "max_tokens", "learning_rate", "warmup_steps", "seed")
        },
        "target": options.target,
        "warm_steps_left_out": WARM,
        "arms": [],
    }
    if options.append and options.out.exists():
        result["arms"] = json.loads(options.out.read_text(encoding="utf-8"))["arms"]
        if not all("round" in entry for entry in result["arms"]):
            parser.error(f"--append: {options.out} has arms without a round, of an older version; give another --out")
    with _work(options.work) as work:
        for name in options.arms * options.rounds:
            arm = _changed(ARMS[name], options, more)
            number = 1 + sum(entry["name"] == name for entry in result["arms"])
            entry = measure(
                arm, settings, work / f"{name}-{number}", options.target, deadline=options.deadline, cards=cards
            )
            result["arms"].append(entry | {"round": number})
            result["settings"]["config"] = config_of(result["arms"])
            result["times_trl"] = ratios(result["arms"])
            write_result(options.out, result)
            _tell(result["arms"][-1])
            if entry["status"] == "interrupted":
                sys.exit(128 + signal.SIGINT)
    print(render_table(result))
    print("TRL's seconds a step over ours, at the same n and number of cards:", json.dumps(result["times_trl"]))


def _lacking(arms: Sequence[str], settings: Settings, cards: Sequence[str]) -> str | None:
    """What to tell of arms that need more cards than there are. A server that runs elsewhere needs none of these."""
    two = [name for name in arms if ARMS[name].cards > max(1, len(cards))]
    two = [name for name in two if not (ARMS[name].serves and settings.server)]
    if not two:
        return None
    seen = "1 card is" if len(cards) == 1 else f"{len(cards)} cards are"
    return (
        f"--arms: {', '.join(dict.fromkeys(two))} need two cards, but {seen} visible; name two in CUDA_VISIBLE_DEVICES or "
        "choose arms of one card (arms in server mode can do with one and --server ADDRESS)"
    )


def _changed(arm: Arm, options: argparse.Namespace, more: Mapping[str, Any]) -> Arm:
    """The arm with what the command line puts in place of its own."""
    if options.seconds:
        arm = replace(arm, seconds=options.seconds)
    if options.evaluate is not None:
        arm = replace(arm, evaluate=options.evaluate)
    if options.config:
        arm = replace(arm, config=options.config)
    return replace(arm, options={**more, **arm.options}) if arm.peer == "ours" else arm


def _tell(entry: Mapping[str, Any]) -> None:
    left_out = ("curve", "evaluations", "options")
    print(json.dumps({key: value for key, value in entry.items() if key not in left_out}), flush=True)


@contextlib.contextmanager
def _work(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="peers-") as made:
        yield Path(made)


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


if __name__ == "__main__":
    main()
