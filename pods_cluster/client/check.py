"""`pods check`: everything that can be known without starting a process, found and shown. Imports no ray and no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pods_cluster.client.run_plan import plan_of
from pods_cluster.config import Config
from pods_cluster.data import load_eval, load_prompts, load_tokenizer
from pods_cluster.run.settling import settling_of
from pods_cluster.scoring.from_config import reward_specs
from pods_cluster.scoring.reward_registry import check_rewards
from pods_cluster.selection.rule_registry import resolve as resolve_rule
from pods_cluster.types import Prompt


@dataclass(slots=True)
class Checked:
    """What the check found: the first prompt as the engine reads it, and the datasets' sizes (None when offline)."""

    prompt: Prompt | None = None
    rows: int | None = None
    held_out: int | None = None
    held_out_dropped: int = 0
    notes: list[str] = field(default_factory=list)


def check(config: Config, *, offline: bool = False) -> Checked:
    """Resolve rule and rewards and, unless `offline`, tokenizer and datasets. Raises ConfigError and its kinds."""
    resolve_rule(config.selector.rule, config.selector.options)
    check_rewards(reward_specs(config.reward))
    settling_of(config)
    found = Checked(notes=_notes(config))
    if offline:
        return found
    tokenizer = load_tokenizer(config.model, light=True)
    stream = load_prompts(config, tokenizer)
    found.rows = len(stream)
    found.prompt = prompt = stream.next(1)[0]
    columns = {*prompt.columns, *(["answer"] if prompt.answer is not None else [])}
    check_rewards(reward_specs(config.reward), columns)
    held_out = load_eval(config, tokenizer)
    found.held_out, found.held_out_dropped = len(held_out), held_out.dropped
    return found


def _notes(config: Config) -> list[str]:
    """What is allowed, but may not be meant."""
    notes = []
    if config.selector.keep == config.generator.rollouts_per_prompt:
        notes.append("selector.keep equals generator.rollouts_per_prompt: plain GRPO, nothing is left out")
    if config.selector.keep % 2:
        notes.append(
            f"selector.keep: {config.selector.keep} is odd: with binary rewards one side gets one more, by seed"
        )
    if config.data.eval is None:
        notes.append("data.eval is left out: the run will not be evaluated on held-out rows")
    if all(reward.weight == 0 for reward in config.reward):
        notes.append("every reward has weight 0: all rollouts score alike and no group has a signal")
    return notes


def show(config: Config, found: Checked, console: Console) -> None:
    """Print the plan, the prompt and the notes."""
    console.print(Panel(_plan_table(config, found), title=f"[bold]{config.run.name}[/] plan", title_align="left"))
    if found.prompt is not None:
        tokens = len(found.prompt.token_ids)
        body: list[RenderableType] = [Text(found.prompt.text)]
        if found.prompt.answer is not None:
            answer = found.prompt.answer
            body.append(Text(f"\nanswer: {answer if len(answer) <= 300 else answer[:300] + ' …'}", style="dim"))
        title = f"first prompt, as the engine reads it ({tokens} tokens)"
        console.print(Panel(Group(*body), title=title, title_align="left"))
    for note in found.notes:
        console.print(Text("note: " + note, style="yellow"))


def _plan_table(config: Config, found: Checked) -> Table:
    plan = plan_of(config)
    generator, learner = config.generator, config.learner
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()

    def row(name: str, text: str) -> None:
        table.add_row(name, Text(text))

    row("model", f"{config.model.path} ({config.model.dtype}{', LoRA' if learner.lora else ''})")
    if found.rows is not None:
        held_out = f", {found.held_out:,} held out" if found.held_out else ""
        dropped = f" ({found.held_out_dropped} too long)" if found.held_out_dropped else ""
        row("data", f"{config.data.path}: {found.rows:,} rows to train on{held_out}{dropped}")
    else:
        row("data", f"{config.data.path} (not looked at: --offline)")
    row("rewards", " + ".join(f"{reward.weight:g} × {reward.name}" for reward in config.reward))
    tensor = f" × {generator.tensor_parallel} GPUs" if generator.tensor_parallel > 1 else ""
    row("generators", f"{generator.workers} {generator.engine} worker(s){tensor}, "
        f"{generator.max_sequences} rollouts in flight each, up to {generator.max_tokens} tokens")  # fmt: skip
    row(
        "selector",
        f"{config.selector.rule}: {config.selector.keep} of {generator.rollouts_per_prompt} rollouts a prompt",
    )
    row("learners", f"{learner.workers} rank(s), ZeRO-{learner.zero_stage}, learning rate {learner.learning_rate:g} "
        f"({learner.schedule}, {learner.warmup_steps} warm-up steps)")  # fmt: skip
    low, high = plan.sequences_per_rank
    each = f"{low}" if low == high else f"{low} to {high}"
    row("one step", f"{plan.groups} prompts → {plan.generated:,} rollouts generated → {plan.trained:,} trained "
        f"({each} a rank, at most {plan.microbatches_at_most} micro-batches)")  # fmt: skip
    row("asymmetry", f"{plan.asymmetry:.2f} rollouts generated for each one trained")
    row("staleness", "0: on-policy, the pools take turns" if not config.staleness
        else f"up to {config.staleness} version(s), at most {plan.out_at_most} groups out")  # fmt: skip
    row(
        "the run",
        f"{config.run.steps} steps: {plan.total_generated:,} rollouts generated, {plan.total_trained:,} trained",
    )
    return table
