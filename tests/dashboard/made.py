"""Run folders for the tests: written as a run writes them, by the recorder itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pods_cluster.config import dump_config, load_config
from pods_cluster.telemetry.jsonl import JsonLinesWriter
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import Record, SampleGroup, sample_record, step_record
from pods_cluster.types import Fate, GroupId
from tests.telemetry.synthetic import rollouts, told_steps

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> &lt;b&gt;"
CONFIG = """
model: {path: models/tiny}
data: {path: train.jsonl}
reward: [{name: exact_match}]
generator: {rollouts_per_prompt: 64}
selector: {keep: 16}
"""


def config_text(root: Path, name: str, steps: int) -> str:
    source = root / f"{name}.source.yaml"
    source.write_text(CONFIG)
    text = dump_config(load_config(source, [f"run.name={name}", f"run.dir={root}", f"run.steps={steps}"]))
    source.unlink()
    return text


def make_failing_run(root: Path, name: str = "failing", steps: int = 20) -> RunFolder:
    """A run whose reward fails until nothing is left to train on: as it is told by a run, to its end."""
    folder = RunFolder.create(root, name, config_text(root, name, steps * 2))
    message = "ConnectionError: judge.internal refused the connection (rewards.py:7)"
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.event("starting", "starting 2 generators and 1 learner rank")
        for step, values in told_steps(steps):
            if step > steps // 2 and "loss" in values:
                lost = values["rollouts/generated"]
                values |= {"rollouts/excluded": lost, "updates": 0, "groups/trained": 0, "groups/too_few_valid": 8}
                values["scoring/failures/error/judge"] = lost
            recorder.step(step, values)
        told = {"reward": "judge", "failure": "error", "share": 0.5, "message": message}
        for count in (1, 10, 5120):
            recorder.warning(
                "reward_failed", f"reward 'judge' gave no number in {count} of 10,240", count=count, **told
            )
        recorder.event("worker_failed", "failing/generator/1: killed by the kernel (memory); others take 3 groups")
        dropped = sample(steps)
        dropped.kept, dropped.fate = (), Fate.TOO_FEW_VALID
        dropped.reason = "dropped: 0 of 8 rollouts can be trained on, 16 are needed"
        for rollout in dropped.rollouts:
            rollout.reward, rollout.reward_errors = None, (f"judge (error): {message}",)
        recorder.samples(steps, [dropped])
        recorder.event("failed", f"RunError: step {steps} has no group to train on; {message}", level="error")
        assert recorder.flush()
    return folder


def make_run(root: Path, name: str = "tiny", steps: int = 60, *, ended: bool = True, seed: int = 0) -> RunFolder:
    """A run of `steps` steps with events and sampled groups, one of them hostile."""
    root.mkdir(parents=True, exist_ok=True)
    folder = RunFolder.create(root, name, config_text(root, name, max(steps, 1)))
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.event("starting", "starting 1 generator and 2 learner ranks")
        for step, values in told_steps(steps, seed=seed):
            recorder.step(step, values)
            if step % 20 == 10 and "loss" in values:
                recorder.samples(step, [sample(step), sample(step, HOSTILE)])
        recorder.warning("worker_failed", "tiny/generator/0: killed; other workers take 3 groups")
        if ended:
            recorder.event("finished", f"done: {steps} steps")
        assert recorder.flush()
    return folder


def sample(step: int, text: str = "") -> SampleGroup:
    group = GroupId(0, step, 0)
    return SampleGroup(
        group,
        f"What is 17 + {step}? {text}",
        rollouts(group, 8, text),
        kept=[1, 2],
        answer="42",
        rule="max_variance",
        reason=f"2 of 8 scored rollouts by max_variance {text}",
    )


def step_line(step: int, **values: Any) -> Record:
    return step_record(step, values, time=1_700_000_000.0 + step, elapsed=float(step))


def sample_line(step: int, text: str = "") -> Record:
    return sample_record(step, sample(step, text), time=1_700_000_000.0 + step, elapsed=float(step))


def append(path: Path, *lines: Record) -> None:
    writer = JsonLinesWriter(path)
    for line in lines:
        assert writer.write(line)
    writer.close()
