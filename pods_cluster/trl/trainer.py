"""`GRPOTrainer` with TRL's arguments, which runs on this package's pools."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pods_cluster.api.environments import tool_section
from pods_cluster.api.inputs import held_rows
from pods_cluster.api.result import TrainResult
from pods_cluster.api.rewards import reward_entries
from pods_cluster.api.train import StepCallback, configure, default_engine, has_gpu, run
from pods_cluster.config import Config, ConfigError
from pods_cluster.migrate.translation import LeftOut
from pods_cluster.migrate.trl_fields import translate_trl
from pods_cluster.scoring.builtin import BUILTINS
from pods_cluster.trl.config import given_settings
from pods_cluster.wording import counted

TIMEOUT = 60.0
"""Seconds that one call of a reward may take, where `config` does not say otherwise; TRL waits without end."""


MANY_TURNS = 100


class GRPOTrainer:
    """Trains as TRL's `GRPOTrainer` does, on generators and learners of this package.

    model: folder or hub name. reward_funcs, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config:
        as in TRL; a `GRPOConfig` of TRL or of `pods_cluster.trl`.
    config: fields of the configuration (docs/config.md), nested or dotted, which go before those of `args`:
        `{"selector.keep": 4, "generator.workers": 2}`. `num_generations: 16` with `selector.keep: 4` is PODS.

    Settings without a part in a run are told in one warning, those without which something else would be computed in an
    error, before anything starts. Attributes: `config` (the run's configuration), `left_out` (settings that did not carry
    over, each with its reason), `result` (after `train`). Raises ConfigError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        _refuse_several_processes()
        for name, value, fix in (
            (
                "reward_processing_classes",
                reward_processing_classes,
                "give reward functions, which tokenise for themselves",
            ),
            ("optimizers", None if tuple(optimizers) == (None, None) else optimizers, "set learner.optimizer"),
            ("quantization_config", quantization_config, "use learner.lora on a model that is not quantised"),
            ("rollout_func", rollout_func, "engines make rollouts, an environment answers them (docs/environments.md)"),
            (
                "environment_factory",
                environment_factory,
                "make it a pods_cluster.environments.Environment, and give config={'environment': its class}",
            ),
        ):
            if value is not None:
                raise ConfigError(f"{name}: has no counterpart here; leave it out: {fix}")
        if train_dataset is None or reward_funcs is None:
            missing = "train_dataset" if train_dataset is None else "reward_funcs"
            raise ConfigError(f"{missing}: missing; the trainer needs one")
        rows = held_rows(train_dataset, "train_dataset")
        if rows is None:
            raise ConfigError(
                "train_dataset: a text; give a datasets.Dataset, as load_dataset(…, split='train') returns it"
            )
        given = dict(given_settings(args))
        calls = given.pop("max_tool_calling_iterations", None)
        told = translate_trl(
            given, rows=len(rows), conversational=not isinstance(rows.first.get("prompt"), str), has_gpu=has_gpu()
        )
        self.left_out: list[LeftOut] = told.left_out
        _tell(self.left_out)
        fields = {"generator.engine": default_engine(), **told.fields, **_adapter(peft_config)}
        if template := getattr(processing_class, "chat_template", None):
            fields["model.chat_template"] = template
        if tools:
            # without a bound of calls TRL goes on until the tokens are used up
            fields["environment"] = tool_section(tools) | {"max_turns": MANY_TURNS if calls is None else calls + 1}
        fields["reward"] = _rewards(reward_funcs, given.get("reward_weights"))
        self._named = "run.name" in fields
        if not self._named:
            fields["run.name"] = _free_name(f"{Path(model).name}-GRPO")
        self.config: Config = configure(
            model,
            train_dataset,
            eval_dataset=eval_dataset if fields.get("run.eval.every") else None,
            config=_nested(fields, config or {}),
        )
        self._callbacks = [_adapted(callback, self.config.run.steps) for callback in callbacks or ()]
        self.result: TrainResult | None = None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainResult:
        """Run to the end and return the result; with `resume_from_checkpoint` go on from the newest checkpoint."""
        self.result = run(self.config, self._callbacks, resume=bool(resume_from_checkpoint))
        return self.result

    def save_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Copy the trained model to a folder. Raises RuntimeError before `train`."""
        if self.result is None or self.result.model_path is None:
            raise RuntimeError("there is no trained model yet; call train() first (with run.export: true)")
        shutil.copytree(self.result.model_path, output_dir, dirs_exist_ok=True)


def _refuse_several_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE: {os.environ['WORLD_SIZE']} processes were launched, and each would start a run; start the script "
            f"with python alone, and set config={{'learner.workers': …}} for several ranks"
        )


def _tell(left_out: Sequence[LeftOut]) -> None:
    """Raise for settings that matter, warn of the others."""
    matter = [item for item in left_out if item.matters]
    if matter:
        raise ConfigError.listing("GRPOConfig", matter)
    if left_out:
        lines = "\n".join(f"  - {item}" for item in left_out)
        warnings.warn(
            f"GRPOConfig: {counted(len(left_out), 'setting')} without a part in a run\n{lines}",
            UserWarning,
            stacklevel=3,
        )


def _rewards(functions: Any, weights: Sequence[float] | None) -> list[dict[str, Any]]:
    several = list(functions) if isinstance(functions, list | tuple) else [functions]
    for index, function in enumerate(several):
        is_name = isinstance(function, str) and (function in BUILTINS or ":" in function)
        if not (
            is_name or isinstance(function, Mapping) or (callable(function) and not hasattr(function, "parameters"))
        ):
            raise ConfigError(
                f"reward_funcs.{index}: {function!r} is a model, and rewards are functions here; wrap it into one that "
                f"loads it on its first call, or name a built-in reward ({', '.join(sorted(BUILTINS))})"
            )
    entries = reward_entries(several, {"none": "skip", "timeout": TIMEOUT})
    if weights is not None:
        if len(weights) != len(entries):
            raise ConfigError(
                f"reward_weights: {len(weights)} weights for {len(entries)} reward_funcs; give one for each"
            )
        for entry, weight in zip(entries, weights, strict=True):
            entry["weight"] = float(weight)
    return entries


def _adapter(peft_config: Any) -> dict[str, Any]:
    """Fields of a `peft.LoraConfig`."""
    if peft_config is None:
        return {}
    kind = str(getattr(getattr(peft_config, "peft_type", ""), "value", getattr(peft_config, "peft_type", "")))
    if kind != "LORA":
        raise ConfigError(
            f"peft_config: {kind or type(peft_config).__name__} has no counterpart; give a peft.LoraConfig"
        )
    targets = peft_config.target_modules
    fields: dict[str, Any] = {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "dropout": float(peft_config.lora_dropout),
        "target_modules": targets if targets in (None, "all-linear") else sorted(targets),
    }
    return {"learner.lora": {name: value for name, value in fields.items() if value is not None}}


def _nested(fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    from pods_cluster.config.load import changed

    return changed(changed({}, fields), config)


def _free_name(wanted: str, folder: Path = Path("runs")) -> str:
    """A name that no run in `folder` has: TRL writes over an earlier run of this script, here each is kept."""
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, 10**6))
    return next(name for name in names if not (folder / name).exists())


def _adapted(callback: Any, max_steps: int) -> StepCallback:
    """A `TrainerCallback` (`on_log`, `on_step_end`) or a plain function, as a function of a step's record."""
    methods = [getattr(callback, name) for name in ("on_step_end", "on_log") if hasattr(callback, name)]
    if not methods:
        if callable(callback):
            return callback
        raise ConfigError(f"callbacks: {callback!r} is neither a function of a step's record nor a TrainerCallback")
    state, control = SimpleNamespace(global_step=0, max_steps=max_steps, log_history=[]), SimpleNamespace()
    control.should_training_stop = False

    def call(record: dict[str, Any]) -> None:
        state.global_step = record["step"]
        state.log_history.append(record)
        for method in methods:
            method(None, state, control, logs=record)
        if control.should_training_stop:
            raise StopIteration

    return call
