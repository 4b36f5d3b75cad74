"""Responses of the API on runs side by side."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from pods_cluster.client.run_state import Status
from pods_cluster.dashboard.schemas import Number


class Figures(BaseModel):
    """Final and best values of a run. Final ones are means over the last ten steps that have them, best ones over any ten in a
    row; accuracies are single evaluations.
    """

    run: str
    status: Status
    step: int | None
    accuracy_final: Number
    accuracy_best: Number
    accuracy_best_step: int | None
    reward_final: Number
    reward_best: Number
    seconds: Number = Field(description="Seconds that the run has worked.")
    gpu_seconds: Number = Field(description="Seconds times the cards that the pools held; null where they held none.")
    rollouts_scored: Number
    rollouts_trained: Number
    ratio: Number = Field(description="Rollouts scored per rollout trained, over the run.")
    tokens_sampled: Number


class SettingDifference(BaseModel):
    """A setting that differs between the runs; `values` in the order of `figures`, null where a run has none."""

    name: str
    values: list[Any]


class ArmCurve(BaseModel):
    """Held-out accuracy, or reward, of one arm against the asked axis: the mean over its runs, which differ in their seed
    alone, and its 95 % interval (over seeds, or of a single run's held-out rows).
    """

    label: str
    runs: list[str]
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


class SpeedUp(BaseModel):
    """How much sooner an arm reaches the target than the baseline, on one axis. Both ends of the interval are null with one
    pair of seeds; `high` alone is null where it has no bound, and `value` where one of the two never gets there. Then the
    other's end bounds it: `at_least` where the baseline never does, `at_most` where the arm never does.
    """

    arm: str
    axis: str
    target: float
    baseline_at: Number
    arm_at: Number
    value: Number
    low: Number
    high: Number
    at_least: Number
    at_most: Number
    seeds: int


class Arms(BaseModel):
    """Arms beside a baseline. `left_out` says which axes cannot be had, and why."""

    metric: str
    axis: str
    baseline: str
    curves: list[ArmCurve]
    speed_ups: list[SpeedUp]
    left_out: dict[str, str]


class Comparison(BaseModel):
    """Runs side by side; `arms` is null where no run was evaluated, or the runs cannot be compared by what was asked."""

    figures: list[Figures]
    settings: list[SettingDifference]
    arms: Arms | None
