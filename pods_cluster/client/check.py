"""`pods check`: resolves and shows all that can be known before a run; rewards are tried in a process of their own.

Imports no ray and no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pods_cluster.client.refusals import check_names
from pods_cluster.config import Config
from pods_cluster.data import load_eval, load_prompts, load_tokenizer, resolved, reward_columns
from pods_cluster.data.context import unsavable_settings, without_end_token
from pods_cluster.data.model_files import check_models
from pods_cluster.data.survey import SECONDS, survey
from pods_cluster.data.tokenizer import PromptTokenizer
from pods_cluster.environments.description import check_turns, desk_of
from pods_cluster.environments.host import EnvironmentFailed
from pods_cluster.scoring import ScoreRequest
from pods_cluster.scoring.reward_probe import Probe, probe_rewards
from pods_cluster.scoring.reward_registry import check_rewards
from pods_cluster.telemetry.run_folder import refuse_place
from pods_cluster.types import Prompt
from pods_cluster.wording import counted

DUMMY = "42"
"""The completion that rewards are tried on where the first row has no answer."""
PRINTED_LINES = 20
"""Most lines shown of what rewards printed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one optimiser step and of the whole run, in rollouts and tokens (upper bounds where lengths count)."""

    groups: int
    generated: int
    trained: int
    total_generated: int
    total_trained: int
    sequences_per_rank: tuple[int, int]
    microbatches_at_most: int
    out_at_most: int

    @property
    def rollouts_per_trained(self) -> float:
        """Rollouts per trained rollout, before replacements: n / m."""
        return self.generated / self.trained


def plan_of(config: Config) -> Plan:
    """Compute the plan of a configuration."""
    groups, trained = config.learner.prompts_per_step, config.trained_per_step
    ranks = config.learner.workers
    longest = config.data.max_prompt_tokens + config.generator.max_tokens
    per_microbatch = max(1, config.learner.tokens_per_microbatch // longest)
    most = -(-trained // ranks)
    return Plan(
        groups=groups,
        generated=config.rollouts_per_step,
        trained=trained,
        total_generated=config.rollouts_per_step * config.run.steps,
        total_trained=trained * config.run.steps,
        sequences_per_rank=(trained // ranks, most),
        microbatches_at_most=-(-most // per_microbatch),
        out_at_most=(config.staleness + 1) * groups,
    )


@dataclass(slots=True)
class CheckResult:
    """Result of a check: the first prompt as the engine reads it, and the datasets' sizes (None when offline)."""

    prompt: Prompt | None = None
    rows: int | None = None
    steps: int | None = None
    held_out: int | None = None
    held_out_dropped: int = 0
    notes: list[str] = field(default_factory=list)
    probe: Probe | None = None
    tried: str | None = None
    """The completion that the rewards were tried on."""
    played: str | None = None
    """The environment's answer to it."""


def check(config: Config, *, offline: bool = False, rewards: bool = True, seconds: float = SECONDS) -> CheckResult:
    """Resolve rule and rewards and, unless `offline`, tokenizer and datasets. Raises ConfigError and its kinds.

    The rows are surveyed for so many `seconds`. With `rewards` they are imported in a process of their own and, unless
    `offline`, tried on the first row.
    """
    check_names(config)
    refuse_place(config.run.dir)
    found = CheckResult(notes=_notes(config))
    if offline:
        if rewards and config.environment is not None:
            desk_of(config)
        if rewards:
            found.probe = probe_rewards(config.reward, config.scoring)
        return found
    check_models(config, weights=False)
    tokenizer = load_tokenizer(config.model, light=True)
    stream = load_prompts(config, tokenizer)
    found.rows = len(stream)
    found.steps = resolved(config, tokenizer, found.rows).run.steps
    found.prompt = prompt = stream.next(1)[0]
    found.notes += check_models(config, prompt.token_ids, weights=False)
    found.notes += [*survey(stream, seconds)[0], *unsavable_settings(config.model.path)]
    if not config.generator.stop_strings:
        found.notes += without_end_token(config.model.path, tokenizer)
    if found.rows < config.learner.prompts_per_step:
        found.notes.append(
            f"learner.prompts_per_step: {config.learner.prompts_per_step} is more than the {found.rows} rows of the "
            f"dataset: a step meets rows twice"
        )
    columns = reward_columns(stream)
    check_rewards(config.reward, columns)
    if rewards:
        found.tried = DUMMY if prompt.answer is None else prompt.answer
        ids = tuple(tokenizer.encode(found.tried, add_special_tokens=False))
        given = _play_turn(config, tokenizer, prompt, found) if config.environment is not None else None
        request = ScoreRequest(
            prompt.text, found.tried, prompt.answer, prompt.messages, prompt.columns, ids, environment_reward=given
        )
        found.probe = probe_rewards(config.reward, config.scoring, columns, request)
        found.notes += _complaints(found)
    held_out = load_eval(config, tokenizer)
    found.held_out, found.held_out_dropped = len(held_out), held_out.dropped
    return found


def _play_turn(config: Config, tokenizer: PromptTokenizer, prompt: Prompt, found: CheckResult) -> float | None:
    """Play one turn with the environment, and return its reward; it may rightly refuse a dummy one."""
    check_turns(config, tokenizer)
    desk, tried = desk_of(config), found.tried or DUMMY
    try:
        answer, reward = desk.play({**prompt.columns, "answer": prompt.answer}, tried)
    except EnvironmentFailed as failure:
        found.notes.append(f"environment: failed at a dummy turn ({_short(tried)}): {failure.kind}: {failure.message}")
        return None
    finally:
        if not desk.description.prompts:
            desk.close()
    said = "; ".join(f"{message['role']}: {_short(message['content'])}" for message in answer) or "the rollout ends"
    found.played = said + (f"; reward {reward:g}" if reward is not None else "")
    return reward


def _complaints(found: CheckResult) -> list[str]:
    """Rewards that gave no number for the dummy completion: it may be right to refuse that one."""
    assert found.probe is not None
    return [
        f"reward {trial.reward!r} gave no number for a dummy completion ({_short(found.tried or '')}): {trial.problem}"
        for trial in found.probe.trials
        if trial.problem is not None
    ]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _notes(config: Config) -> list[str]:
    """Settings that are allowed, but may not be meant."""
    notes = []
    if config.selector.keep == config.generator.rollouts_per_prompt:
        notes.append("selector.keep equals generator.rollouts_per_prompt: plain GRPO, nothing is left out")
    if config.selector.keep % 2:
        notes.append(
            f"selector.keep: {config.selector.keep} is odd: with binary rewards one side gets one more, by seed"
        )
    if config.data.eval is None:
        notes.append("data.eval is left out: the run will not be evaluated on held-out rows")
    return notes


def show(config: Config, found: CheckResult, console: Console) -> None:
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
    printed = found.probe.printed.lines if found.probe is not None else ()
    for line in printed[-PRINTED_LINES:]:
        console.print(Text(f"{line.reward} prints: {line.text}", style="dim"))
    for note in found.notes:
        console.print(Text("note: " + note, style="yellow"))


def _plan_table(config: Config, found: CheckResult) -> Table:
    if found.steps is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": found.steps, "epochs": None})})
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
    if (environment := config.environment) is not None:
        row("environment", f"{environment.name}, up to {environment.max_turns} turns")
        if found.played is not None:
            row("answers", f"to {_short(found.tried or DUMMY)}: {found.played}")
    tensor = f" × {generator.tensor_parallel} GPUs" if generator.tensor_parallel > 1 else ""
    if found.probe is not None and found.tried is not None:
        values = ", ".join(
            f"{trial.reward} {'nothing' if trial.value is None else f'{trial.value:g}'}" for trial in found.probe.trials
        )
        what = "a dummy completion" if found.prompt is None or found.prompt.answer is None else "the first row's answer"
        row("tried", f"on {what}, {_short(found.tried)}: {values}")
    row("generators", f"{counted(generator.workers, f'{generator.engine} worker')}{tensor}, "
        f"{counted(generator.max_sequences, 'rollout')} in flight each, up to {generator.max_tokens} tokens")  # fmt: skip
    row(
        "selector",
        f"{config.selector.rule}: {config.selector.keep} of {generator.rollouts_per_prompt} rollouts a prompt",
    )
    row("learners", f"{counted(learner.workers, 'rank')}, ZeRO-{learner.zero_stage}, learning rate {learner.learning_rate:g} "
        f"({learner.schedule}, {learner.warmup(config.run.steps)} warm-up steps)")  # fmt: skip
    low, high = plan.sequences_per_rank
    each = f"{low}" if low == high else f"{low} to {high}"
    row("one step", f"{plan.groups} prompts → {plan.generated:,} rollouts generated → {plan.trained:,} trained "
        f"({each} a rank, at most {counted(plan.microbatches_at_most, 'micro-batch')})")  # fmt: skip
    row("n / m", f"{plan.rollouts_per_trained:.2f} rollouts per trained rollout")
    row("staleness", "0: on-policy, the pools take turns" if not config.staleness
        else f"up to {counted(config.staleness, 'version')}, at most {plan.out_at_most} groups out")  # fmt: skip
    if config.run.epochs is not None:
        row("the run", f"{config.run.epochs:g} epochs; the rows say how many steps that is")
    else:
        made = f"{plan.total_generated:,} rollouts generated, {plan.total_trained:,} trained"
        row("the run", f"{config.run.steps} steps: {made}")
    return table
