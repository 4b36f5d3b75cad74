"""Routes that read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request

from pods_cluster.dashboard import comparison, comparison_schemas, responses, schemas
from pods_cluster.dashboard.columns import plain
from pods_cluster.dashboard.journal import SampleEntry
from pods_cluster.dashboard.run_view import RunView
from pods_cluster.dashboard.watcher import RunWatcher
from pods_cluster.telemetry.curves import Axis

MAX_POINTS = 1_500
MAX_SERIES = 64
MAX_PAGE = 200
MAX_INT = 2**53 - 1

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._~-]{1,150}$", description="The run's id, as in `/api/runs`.")]
Before = Annotated[int | None, Query(ge=0, le=MAX_INT, description="Only older ones than this id.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="At most so many.")]
Step = Annotated[int | None, Query(ge=0, le=MAX_INT)]
REFUSED: dict[int | str, dict[str, Any]] = {
    401: {"model": schemas.Problem, "description": "The token is needed."},
    429: {"model": schemas.Problem, "description": "Too many requests; `Retry-After` says when to ask again."},
}
NO_RUN: dict[int | str, dict[str, Any]] = {
    404: {"model": schemas.Problem, "description": "There is no such run or item."}
}

router = APIRouter(prefix="/api", tags=["runs"], responses=REFUSED)


def view_of(request: Request, run: str) -> RunView:
    """Raises HTTPException 404."""
    runs: RunWatcher = request.app.state.runs
    try:
        return runs.get(run)
    except KeyError:
        raise HTTPException(404, f"{run}: there is no such run") from None


@router.get("/runs")
def list_runs(request: Request) -> schemas.RunList:
    """All runs, the one last written first."""
    runs: RunWatcher = request.app.state.runs
    items = []
    for found in runs.states():
        ratio = found.latest.get("rollout_to_update_ratio/cumulative")
        reward = found.latest.get("reward")
        items.append(
            schemas.RunItem(
                id=found.id,
                folder=found.path,
                status=found.status,
                status_text=found.text,
                step=found.step,
                steps=found.planned,
                updated=found.updated,
                elapsed=found.elapsed,
                reward=responses.number(reward),
                ratio=responses.number(ratio),
            )
        )
    return schemas.RunList(runs=items)


@router.get("/runs/{run}", responses=NO_RUN)
def run_detail(request: Request, run: RunId) -> schemas.RunDetail:
    """A run: its state, newest values, totals and rates, and the metrics it has."""
    view = view_of(request, run)
    with view.lock:
        columns = view.history.columns
        nonfinite = [
            schemas.Nonfinite(metric=name, count=len(steps), last_step=steps[-1])
            for name, steps in columns.nonfinite.items()
        ]
        return schemas.RunDetail(
            **responses.live(view),
            id=view.id,
            folder=str(view.folder.path),
            steps=view.steps_planned(),
            rows=columns.rows,
            has_summary=view.folder.summary.is_file(),
            bad_lines=view.history.bad_lines + view.events.bad_lines + view.samples.bad_lines,
            metrics=[responses.metric(name) for name in sorted(columns.names)],
            nonfinite=nonfinite,
        )


@router.get("/runs/{run}/series", responses=NO_RUN)
def series(
    request: Request,
    run: RunId,
    metric: Annotated[list[str], Query(min_length=1, max_length=MAX_SERIES, description="Metrics by name.")],
    start: Annotated[Step, Query(description="First step.")] = None,
    end: Annotated[Step, Query(description="Last step.")] = None,
    points: Annotated[int, Query(ge=2, le=MAX_POINTS, description="At most so many buckets.")] = 800,
    x: Annotated[Literal["step", "elapsed", "time", "num_tokens"], Query(description="What `x` holds.")] = "step",
) -> schemas.Series:
    """Curves of metrics: mean, lowest and highest value of each bucket of steps. Unknown metrics have no values."""
    view = view_of(request, run)
    with view.lock:
        found = view.history.columns.curves(
            dict.fromkeys(name[:300] for name in metric), start=start, end=end, points=points, x=x
        )
        progress, last_step = view.history.progress, view.history.columns.last_step
    wide = 12 if x in ("time", "elapsed") else 9
    return schemas.Series(
        run=view.id,
        axis=x,
        x=plain(found.x, wide),
        bucket=found.bucket,
        rows=found.rows,
        last_step=last_step,
        progress=progress,
        series={
            name: schemas.SeriesCurve(
                mean=plain(curve.mean),
                low=None if curve.low is None else plain(curve.low),
                high=None if curve.high is None else plain(curve.high),
            )
            for name, curve in found.curves.items()
        },
    )


@router.get("/runs/{run}/latest", responses=NO_RUN)
def latest(request: Request, run: RunId) -> schemas.Latest:
    """The newest step record."""
    view = view_of(request, run)
    with view.lock:
        return schemas.Latest(run=view.id, record=view.history.columns.record())


@router.get("/runs/{run}/events", responses=NO_RUN)
def events(
    request: Request,
    run: RunId,
    before: Before = None,
    limit: Limit = 50,
    level: Annotated[list[Literal["info", "warning", "error"]] | None, Query(max_length=3)] = None,
) -> schemas.EventPage:
    """The run's events, newest first."""
    view = view_of(request, run)
    with view.lock:
        entries, more = view.events.page(before, limit, lambda entry: not level or entry.level in level)
        total = len(view.events.entries)
    found = [(entry, view.events.line(entry)) for entry in entries]
    return schemas.EventPage(
        run=view.id,
        total=total,
        events=[responses.event(entry, line) for entry, line in found if line is not None],
        more=more,
    )


@router.get("/runs/{run}/samples", responses=NO_RUN)
def samples(
    request: Request,
    run: RunId,
    before: Before = None,
    limit: Limit = 50,
    start: Annotated[Step, Query(description="First step.")] = None,
    end: Annotated[Step, Query(description="Last step.")] = None,
    fate: Annotated[
        list[Literal["trained", "no_signal", "too_few_valid", "stale", "lost", "cancelled"]] | None,
        Query(max_length=6, description="What became of the group; all but `trained` were dropped."),
    ] = None,
) -> schemas.SamplePage:
    """Sampled groups, newest first."""
    view = view_of(request, run)

    def wanted(entry: SampleEntry) -> bool:
        in_range = (start is None or entry.step >= start) and (end is None or entry.step <= end)
        # older versions sampled trained groups alone, and gave them no fate
        return in_range and (not fate or (entry.fate or "trained") in fate)

    with view.lock:
        entries, more = view.samples.page(before, limit, wanted)
        total = len(view.samples.entries)
    return schemas.SamplePage(
        run=view.id, total=total, samples=[responses.sample(entry) for entry in entries], more=more
    )


@router.get("/runs/{run}/samples/{sample}", responses=NO_RUN)
def sample(
    request: Request, run: RunId, sample: Annotated[int, Path(ge=0, le=MAX_INT, description="The group's id.")]
) -> schemas.SampleDetail:
    """A whole group: prompt, completions, rewards by part, which were kept and why."""
    view = view_of(request, run)
    with view.lock:
        entry = view.samples.at(sample)
    line = None if entry is None else view.samples.line(entry)
    if entry is None or line is None:
        raise HTTPException(404, f"{sample}: there is no such group of rollouts (a resume may have taken it back)")
    known = {"step", "time", "elapsed", "group", "prompt", "answer", "fate", "rule", "reason", "rollouts"}
    return schemas.SampleDetail(
        id=sample,
        run=view.id,
        step=entry.step,
        time=responses.number(line.get("time")),
        group=entry.group,
        prompt=responses.text(line.get("prompt")),
        answer=None if line.get("answer") is None else responses.text(line["answer"]),
        fate=entry.fate,
        rule=entry.rule,
        reason=responses.text(line.get("reason")),
        rollouts=[responses.rollout(row) for row in line["rollouts"] if isinstance(row, dict)],
        fields={name: value for name, value in line.items() if name not in known},
    )


@router.get("/compare", responses=NO_RUN)
def compare(
    request: Request,
    run: Annotated[list[RunId], Query(min_length=1, max_length=20, description="Runs by id.")],
    x: Annotated[Axis, Query(description="What the arms are told against.")] = "training-minutes",
    y: Annotated[
        comparison.Compared, Query(description="Held-out accuracy, or the reward of training, in means over ten steps.")
    ] = "accuracy",
    baseline: Annotated[RunId | None, Query(description="A run of the arm that others are compared with.")] = None,
    target: Annotated[
        float | None,
        Query(description="Value to reach; left out: 99 % of the baseline's best.", allow_inf_nan=False),
    ] = None,
) -> comparison_schemas.Comparison:
    """Runs side by side: what each came to, the settings in which they differ, and the arms that they are."""
    views = [view_of(request, name) for name in dict.fromkeys(run)]
    return comparison_schemas.Comparison(
        figures=[comparison.figures(view) for view in views],
        settings=comparison.differences([view.config()[1] for view in views]),
        arms=comparison.arms_of(views, x, baseline, y, target) if len(views) > 1 else None,
    )


@router.get("/runs/{run}/config", responses=NO_RUN)
def config(request: Request, run: RunId) -> schemas.RunConfigText:
    """The run's resolved configuration."""
    view = view_of(request, run)
    text, tree = view.config()
    return schemas.RunConfigText(run=view.id, text=text, config=tree)


@router.get("/runs/{run}/summary", responses=NO_RUN)
def summary(request: Request, run: RunId) -> schemas.RunSummary:
    """The summary of a run that has ended."""
    view = view_of(request, run)
    found = view.summary()
    if found is None:
        raise HTTPException(404, f"{run}: has no summary yet; it is written when the run ends")
    return schemas.RunSummary(run=view.id, summary=found)
