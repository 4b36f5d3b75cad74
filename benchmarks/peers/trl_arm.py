"""TRL's GRPO trainer for one arm, in a process of its own: `python -m benchmarks.peers.trl_arm ARM.json OUT`.

The best of its documented settings: vLLM colocated (in server mode: a vLLM server with a card of its own), Liger's layer
kernels, its fused output layer (always on), no activation checkpointing, all of a batch's rollouts in one generation. The
policy's weights are float32 and computed in bfloat16, since optimiser steps of 2e-6 vanish in bfloat16 weights; ours keep
float32 master weights in the optimiser.

Writes OUT/steps.jsonl, one line a step as it ends, OUT/evals.jsonl, and OUT/end.json.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.arms import Arm, Settings

TEMPLATE = "{}\n\nReason step by step, and put your final answer within \\boxed{{}}."
"""What the `boxed` template of ours asks."""


def main() -> None:
    given, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    run(Arm(**given["arm"]), Settings(**given["settings"]), out)


def read_rows(path: Path, rows: int | None = None) -> list[dict[str, Any]]:
    """Prompts as messages, with their answers."""
    lines = path.read_text(encoding="utf-8").splitlines()[:rows]
    found = [json.loads(line) for line in lines]
    return [
        {"prompt": [{"role": "user", "content": TEMPLATE.format(row["question"])}], "answer": row["answer"]}
        for row in found
    ]


def run(arm: Arm, settings: Settings, out: Path) -> None:
    """Train until the arm's seconds of steps are over."""
    import torch
    from datasets import Dataset
    from transformers.trainer_callback import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    from pods_cluster.scoring.builtin import boxed_format, math_answer

    gpu = settings.device == "cuda"
    began = time.time()
    batch = arm.n * settings.prompts
    options = dict(arm.options)
    micro = min(options.pop("per_device_train_batch_size", batch), batch)
    if batch % micro:
        raise SystemExit(f"{arm.name}: {micro} rollouts a micro-batch do not divide a step's {batch}")
    vllm: dict[str, Any] = {"use_vllm": True, "bf16": True, "use_liger_kernel": True}
    if arm.serves:
        vllm |= {"vllm_server_base_url": settings.server}
    else:
        vllm |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 1024}
    config = GRPOConfig(
        output_dir=str(out / "trainer"),
        num_generations=arm.n,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.warmup_steps,
        max_completion_length=settings.max_tokens,
        temperature=1.0,
        beta=0.0,
        reward_weights=[1.0, 0.1],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        max_steps=100_000,
        seed=settings.seed,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        **((vllm if gpu else {"use_cpu": True, "bf16": False}) | options),
    )

    def text(completion: Any) -> str:
        return completion if isinstance(completion, str) else completion[-1]["content"]

    def correct(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        return [math_answer(text(each), right) for each, right in zip(completions, answer, strict=True)]

    def boxed(completions: Sequence[Any], **_: Any) -> list[float]:
        return [boxed_format(text(each)) for each in completions]

    clock = Clock(arm.seconds, out)

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
            if gpu:
                torch.cuda.synchronize()
            control.should_training_stop = clock.end(state.global_step)
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            clock.log(state.global_step, logs or {}, batch)
            last = clock.over
            if arm.evaluate and (last or state.global_step % arm.evaluate == 0) and clock.unevaluated:
                clock.evaluate(state.global_step, held_out)

    trainer = GRPOTrainer(
        settings.model,
        reward_funcs=[clock.timed("reward", correct), clock.timed("reward", boxed)],
        args=config,
        train_dataset=Dataset.from_list(read_rows(Path(settings.data) / "train.jsonl")),
        callbacks=[Callback()],
    )
    if gpu:
        engine: Any = trainer.vllm_generation
        engine.generate = clock.timed("generate", engine.generate)
        engine.sync_weights = clock.timed("publish", engine.sync_weights)

    if arm.serves and arm.evaluate:
        raise SystemExit(f"{arm.name}: held-out rows are not evaluated through a server; set --evaluate 0")
    rows = read_rows(Path(settings.data) / "test.jsonl", settings.held_out) if arm.evaluate else []

    def held_out() -> float:
        """Greedy accuracy of the weights as they are now."""
        return greedy_accuracy(trainer, rows, settings.max_tokens, math_answer) if gpu else 0.0

    if arm.evaluate:  # the engine has read the same weights from the same folder
        clock.evaluate(0, held_out)
    clock.started = time.time() - began
    trainer.train()
    allocated = torch.cuda.max_memory_allocated() if gpu else 0
    clock.finish({"start_seconds": clock.started, "allocated_gb": round(allocated / 1e9, 2)})


def greedy_accuracy(
    trainer: Any, rows: Sequence[dict[str, Any]], max_tokens: int, score: Callable[..., float]
) -> float:
    """Share of right answers through the trainer's own engine, after sending it the present weights."""
    from vllm import SamplingParams

    if trainer.state.global_step:
        trainer.vllm_generation.sync_weights()
    prompts = [
        {"prompt_token_ids": ids}
        for ids in trainer.processing_class.apply_chat_template(
            [row["prompt"] for row in rows], add_generation_prompt=True, return_dict=False
        )
    ]
    found = trainer.vllm_generation.llm.generate(
        prompts, sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False
    )
    return sum(score(each.outputs[0].text, row["answer"]) for each, row in zip(found, rows, strict=True)) / len(rows)


class Clock:
    """Times steps from end to end, evaluations left out, and writes what each step was."""

    def __init__(self, seconds: float, out: Path) -> None:
        self.seconds, self.out = seconds, out
        self.started = 0.0
        self.total = 0.0
        self.over = False
        self.unevaluated = True
        self._last: float | None = None
        self._stages: dict[str, float] = {}
        self._row: dict[str, Any] = {}

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its seconds added to a stage of the step."""

        @functools.wraps(call)
        def wrapped(*args: Any, **named: Any) -> Any:
            began = time.time()
            try:
                return call(*args, **named)
            finally:
                self._stages[stage] = self._stages.get(stage, 0.0) + time.time() - began

        return wrapped

    def begin(self) -> None:
        """A step begins; it counts from the end of the one before."""
        if self._last is None:
            self._last = time.time()
            self._stages = {}

    def end(self, step: int) -> bool:
        """A step has ended. Whether it was the last."""
        now = time.time()
        seconds = now - (self._last or now)
        self._last, self.total = now, self.total + seconds
        stages = {stage: round(value, 4) for stage, value in self._stages.items()}
        self._row = {"step": step, "time": now, "seconds": seconds, "at": self.total, "stages": stages}
        self._stages = {}
        self.unevaluated = True
        self.over = self.total >= self.seconds
        return self.over

    def log(self, step: int, logs: dict[str, Any], batch: int) -> None:
        """What the trainer says of the step that has just ended."""
        if self._row.get("step") != step or "reward" not in logs:
            return
        tokens = logs.get("completions/mean_length", 0.0) * batch
        row = self._row | {
            "correct": logs.get("rewards/correct/mean"),
            "reward": logs["reward"],
            "tokens_made": tokens,
            "tokens_trained": tokens,
            "mismatch": logs.get("sampling/sampling_logp_difference/mean"),
        }
        self._write("steps.jsonl", row)
        self._row = {}

    def evaluate(self, step: int, accuracy: Callable[[], float]) -> None:
        """Evaluate; its seconds do not count as those of a step."""
        began = time.time()
        found = accuracy()
        took = time.time() - began
        self._write("evals.jsonl", {"step": step, "at": self.total, "accuracy": found, "seconds": took})
        self.unevaluated = False
        self._stages = {}
        if self._last is not None:
            self._last += took

    def finish(self, values: dict[str, Any]) -> None:
        (self.out / "end.json").write_text(json.dumps(values), encoding="utf-8")

    def _write(self, name: str, row: dict[str, Any]) -> None:
        with (self.out / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
