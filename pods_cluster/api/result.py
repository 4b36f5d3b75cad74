"""The result of a run that Python started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pods_cluster.run import checkpoints
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import merge_steps
from pods_cluster.telemetry.summary import Summary

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A run that has ended: `status` is `finished`, or `stopped` where Ctrl-C, a signal or a callback ended it."""

    name: str
    folder: Path
    """The run's folder; docs/getting-started.md says what lies in it."""
    status: str
    steps: int
    """Steps that were made, those of earlier starts included."""
    summary: Summary

    @property
    def model_path(self) -> Path | None:
        """Folder of the trained model in Hugging Face format, or None with `run.export: false`."""
        path = RunFolder(self.folder).model
        return path if (path / "config.json").is_file() else None

    @property
    def best_model_path(self) -> Path | None:
        """Folder of the model of the best evaluation, with `run.checkpoint.best`; None without one."""
        path = RunFolder(self.folder).best
        return path if (path / "config.json").is_file() else None

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, from which `resume=True` goes on; None where none was saved."""
        return checkpoints.latest(RunFolder(self.folder).checkpoints)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Metrics of each step, in rising step; docs/metrics.md explains every name."""
        return merge_steps(RunFolder(self.folder).read_metrics())

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics as a data frame: one row a step (the index), one column a metric, NaN where a step has none.

        Raises ImportError where pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "TrainResult.metrics: pandas is not installed; pip install pandas, or use .records"
            ) from error
        return pandas.DataFrame(self.records).set_index("step")

    @property
    def evaluation(self) -> dict[str, float]:
        """Metrics `eval/…` of the last evaluation; empty where the run had no held-out rows."""
        evaluated = [record for record in self.records if "eval/rows" in record]
        return {name: value for name, value in evaluated[-1].items() if name.startswith("eval/")} if evaluated else {}

    def __repr__(self) -> str:
        accuracy = self.evaluation.get("eval/greedy_accuracy")
        shown = "" if accuracy is None else f", greedy accuracy {accuracy:.1%}"
        return (
            f"TrainResult({self.name}: {self.status}, {self.steps} steps{shown}, model_path={str(self.model_path)!r})"
        )
