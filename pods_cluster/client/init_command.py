"""`pods init`: a commented YAML for the user's model, data and cards, from options or questions; or a shipped one, copied."""

from __future__ import annotations

import itertools
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from pods_cluster.config import ConfigError, build_config

SHARE = Path("share") / "pods-cluster" / "configs"
"""Folder of the shipped configurations of an installed package, below the environment's folder."""
COMMENT_COLUMN = 28


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers that make a configuration. `prompt` and `answer` are columns; `gpus` are the cards of both pools."""

    model: str
    data: str
    prompt: str
    answer: str | None
    reward: str
    gpus: int
    name: str


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="Folder or hub name of the model.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder or hub name of the dataset.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Column of the prompt; by default found in the data.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column of the answer; by default found in the data.")] = None,
    reward: Annotated[str | None, typer.Option(help="Built-in reward, or file.py:function.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs for both pools; by default those of this machine.")
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="Copy this shipped configuration; `list` lists them.")
    ] = None,
) -> None:
    """Write a commented configuration: `pods init run.yaml --model Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl`."""
    console = Console(stderr=True)
    if example == "list":
        width = max(map(len, shipped()))
        for name in shipped():
            line = f"{name:<{width}}  {_about(shipped_text(name))}"
            Console().print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
        return
    if file.exists():
        raise ConfigError(f"{file}: exists already; give another name, or remove it")
    if example is not None:
        text = shipped_text(example)
    else:
        model = model or _ask("model (folder or hub name)", "--model", "Qwen/Qwen2.5-0.5B-Instruct")
        data = data or _ask("dataset (file, folder or hub name)", "--data", None)
        gpus = _cards() if gpus is None else gpus
        columns, verl = _columns(data, console) if prompt is None or answer is None else ([], False)
        prompt = prompt or _column("prompt", columns)
        answer = answer or ("answer" if verl else _column("answer", columns))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-._") or "run"
        text = written(Answers(model, data, prompt or "prompt", answer, reward or "", gpus, name))
    file.write_text(text, encoding="utf-8")
    console.print(
        f"wrote {file}; next: pods check {file}, then pods train {file}", markup=False, highlight=False, soft_wrap=True
    )


def written(answers: Answers) -> str:
    """The commented YAML, which is validated. Raises ConfigError."""
    gpus, reward = answers.gpus, answers.reward or ("math_answer" if answers.answer else "think_answer_format")
    learners = max(1, gpus // 4)
    if gpus == 0:
        pools = ("engine: transformers      # the small built-in engine, for a CPU", "workers: 1")
        cards, dtype, n, m = "", "float32", 16, 4
    elif gpus == 1:
        pools = ("engine: vllm", "workers: 1", "gpus_per_worker: 0.5      # generator and learner share the card",
                 "engine_options: {gpu_memory_utilization: 0.3}")  # fmt: skip
        cards, dtype, n, m = "  gpus_per_worker: 0.5\n", "bfloat16", 64, 16
    else:
        pools = (
            "engine: vllm",
            f"workers: {gpus - learners}                # one card each; larger models: tensor_parallel",
        )
        cards, dtype, n, m = "", "bfloat16", 64, 16
    generator = "\n".join(f"  {line}" for line in pools)
    quoted = {name: yaml.safe_dump(value, width=10**6).splitlines()[0] for name, value in (
        ("model", answers.model), ("data", answers.data), ("prompt", answers.prompt), ("answer", answers.answer),
        ("reward", reward), ("name", answers.name))}  # fmt: skip
    text = f"""\
# Written by `pods init`. Every field, its default and its meaning: docs/config.md. Check it with `pods check`.
model:
  path: {quoted["model"]}
  dtype: {dtype}

data:
  path: {quoted["data"]}
  prompt: {quoted["prompt"]}            # column with a text or chat messages
  answer: {quoted["answer"]}            # column that rewards compare with, or null
  max_prompt_tokens: 512
  # template: boxed         # wraps a text prompt: think_answer, boxed, or your own text with {{prompt}}
  # eval: {{split: test}}     # held-out rows (or path: …); run.eval.every says how often

reward:                     # the weighted sum is trained on; `pods rewards` lists those that are built in
  - {{name: {quoted["reward"]}, weight: 1.0}}
  # - {{name: "rewards.py:mine", weight: 0.5}}    # your own: f(prompts, completions, **columns) -> numbers

generator:                  # makes n rollouts of each prompt
{generator}
  rollouts_per_prompt: {n}   # n
  max_tokens: 512           # longest completion
  temperature: 1.0

selector:                   # keeps m of them
  rule: max_variance        # PODS
  keep: {m}                 # m; as many as n is plain GRPO

learner:                    # trains on the m
  workers: {learners}
{cards}  prompts_per_step: {16 if gpus else 4}
  learning_rate: 1.0e-6
  warmup_ratio: 0.05
  # lora: {{rank: 64}}        # adapters alone

staleness: {1 if gpus else 0}                # generators work while the learner updates, at most this many versions behind

run:
  name: {quoted["name"]}
  epochs: 1                 # or steps: 200
  checkpoint: {{minutes: 10}}
"""
    build_config(yaml.safe_load(text), source="pods init")
    return _aligned(text)


def _aligned(text: str) -> str:
    """The text with the comments behind values in one column, where the value leaves room for that."""
    lines = []
    for line in text.splitlines():
        value, space, comment = line.partition("  # ")
        beside = space and value.strip() and not value.lstrip().startswith("#")
        lines.append(f"{value.rstrip():<{COMMENT_COLUMN}}# {comment}" if beside else line)
    aligned = "\n".join(lines) + "\n"
    return (
        aligned if yaml.safe_load(aligned) == yaml.safe_load(text) else text
    )  # a value may hold what looks like a comment


def shipped() -> list[str]:
    """Names of the configurations that come with the package, as `--example` takes them."""
    folder = _shipped_folder()
    files = (path for path in folder.rglob("*.yaml") if path.parent.name != "sweeps")  # they name a file beside them
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in files)


def shipped_text(name: str) -> str:
    """The text of a shipped configuration. Raises ConfigError for a name that there is none of."""
    names = shipped()
    if name not in names:
        raise ConfigError(f"--example: there is no {name!r}; choose of {', '.join(names)}")
    return (_shipped_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def _about(text: str) -> str:
    """The first sentence of a configuration's opening comment, without its source."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    sentence = " ".join(line.lstrip("# ") for line in comment).split(". ")[0].removesuffix(".")
    return re.sub(r" \(arXiv [^)]*\)", "", sentence)


def _shipped_folder() -> Path:
    beside = Path(__file__).parents[2] / "configs"
    installed = Path(sysconfig.get_path("data")) / SHARE
    for folder in (beside, installed):
        if (folder / "quickstart.yaml").is_file():
            return folder
    raise ConfigError(
        f"--example: the shipped configurations are neither in {beside} nor in {installed}; install the package again"
    )


def _ask(question: str, option: str, default: str | None) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"{option}: missing, and there is no terminal to ask on; give it")
    return str(typer.prompt(question, default=default))


def _cards() -> int:
    """NVIDIA cards of this machine."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if Path("/proc/driver/nvidia/gpus").is_dir() else 0


def _columns(data: str, console: Console) -> tuple[list[str], bool]:
    """Columns of the dataset, and whether it has verl's form; none where it cannot be read here."""
    from pods_cluster.data import DataError, load_source

    try:
        source: Any = load_source(data, None, "train")
    except DataError as error:
        console.print(
            f"the columns could not be read, so check them in the file: {error}", markup=False, style="yellow"
        )
        return [], False
    return list(source.rows.column_names), "reward_model" in source.rows.column_names


def _column(kind: str, columns: list[str]) -> str | None:
    from pods_cluster.data.layout import ANSWER_ALIASES, PROMPT_ALIASES

    usual = PROMPT_ALIASES if kind == "prompt" else ANSWER_ALIASES
    return next((name for name in usual if name in columns), None)
