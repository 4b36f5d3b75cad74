"""The page in a real browser."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.dashboard import history
from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from pods_cluster.dashboard.history import History
from pods_cluster.dashboard.run_view import RunView
from tests.dashboard.conftest import SECRET, Served
from tests.dashboard.made import HOSTILE, append, make_failing_run, make_run, step_line

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("PODS_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
PATIENCE = 60_000
CURVE = "[data-chart=reward] .js-plotly-plot .scatterlayer .trace"


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true on the page (Playwright's own waiting is stopped by the page's policy)."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    make_run(root, "first", 60)
    make_run(root, "second", 40, seed=3)
    make_failing_run(root)
    hostile = make_run(root, "hostile", 30, ended=False)
    append(hostile.metrics, step_line(31, **{"reward": 0.5, "<img/src=x/onerror=hacked()>": 1.0}))
    hostile.path.rename(root / "<img src=x onerror=hacked()>")
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    with Served(create_app([root], token=Token(SECRET))) as served:
        yield served


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page on which nothing may fail: no error on the console, no request that leaves this machine."""
    options = getattr(request, "param", {"viewport": {"width": 1280, "height": 900}})
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda text: problems.append(text.text) if text.type in ("error", "warning") else None)
    inside = ("http://127.0.0.1:", "data:", "blob:")
    page.on("request", lambda sent: None if sent.url.startswith(inside) else problems.append(sent.url))
    yield page
    assert page.evaluate("window.hacked") is None
    context.close()
    assert not problems


def test_the_overview_shows_curves_and_the_ratio(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first")
    page.wait_for_selector(CURVE)
    assert page.locator("#progress b").inner_text() == "step 60"
    ratio = page.locator("[data-tile=ratio] .big").all_inner_texts()
    assert len(ratio) == 2
    assert all(4 <= float(value) < 7 for value in ratio)
    points = page.evaluate("document.querySelector('[data-chart=reward] .js-plotly-plot').data[0].y.length")
    assert points == 61
    names = page.evaluate("[...document.querySelectorAll('.node-name')].map((node) => node.firstChild.textContent)")
    assert names == ["Dataset", "Generators", "Scorers", "Selector", "Learner"]
    assert page.locator(".back-text").inner_text().startswith("weights v60 back")
    assert "worker_failed" in page.locator("main").inner_text()


def test_a_step_that_is_written_moves_the_curves(page: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "live", 10, ended=False)
    with Served(create_app([tmp_path], token=Token(SECRET))) as served:
        page.goto(served.url)
        page.wait_for_selector(CURVE)
        append(folder.metrics, step_line(11, reward=0.9375, **{"rollouts/scored": 64.0, "timing_s/step": 1.0}))
        page.wait_for_selector("#progress b[data-step='11']")
        until(page, "document.querySelector('[data-chart=reward] .js-plotly-plot').data[0].y.at(-1) === 0.9375")
        append(
            folder.events,
            {"time": 1.0, "elapsed": 1.0, "step": 11, "kind": "failed", "level": "error", "text": f"boom {HOSTILE}"},
        )
        page.wait_for_selector("#notice.error")
        assert page.locator("#notice").inner_text() == f"The run failed: boom {HOSTILE}"
        assert page.locator("#picker .pill").first.inner_text() == "failed"
        page.goto("about:blank")


def test_curves_of_a_run_that_is_still_read_become_whole(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh server shows what it has read so far; the page must come to all steps, whether the run goes on or not."""
    monkeypatch.setattr(history, "PREVIEW_ABOVE", 2**40)
    monkeypatch.setattr(RunView.advance, "__defaults__", (4096,))
    folder = make_run(tmp_path, "long", 0, ended=False)
    append(folder.metrics, *(step_line(step, reward=step / 2000, loss=1.0) for step in range(1, 601)))
    held = threading.Event()
    advance = History.advance

    def advance_while_allowed(self: History, limit: int) -> bool:
        return advance(self, limit) if held.is_set() or self.columns.rows < 200 else False

    monkeypatch.setattr(History, "advance", advance_while_allowed)
    steps = "document.querySelector('[data-chart=reward] .js-plotly-plot')?.data?.[0].x"
    with Served(create_app([tmp_path], token=Token(SECRET))) as served:
        page.goto(f"{served.url}/#run=long")
        until(page, f"200 <= {steps}?.length && {steps}.length < 300")
        assert page.locator("#notice").inner_text().startswith("Reading the history")
        held.set()
        until(page, f"{steps}.length === 601 && {steps}.at(-1) === 600")
        until(page, "document.querySelector('#notice').hidden")
        append(folder.metrics, *(step_line(step, reward=0.5) for step in range(601, 604)))
        until(page, f"{steps}.length === 604")
        page.goto("about:blank")


def test_a_step_that_the_stream_did_not_tell_is_fetched(page: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "gap", 10, ended=False)
    app = create_app([tmp_path], token=Token(SECRET))
    with Served(app) as served:
        page.goto(served.url)
        page.wait_for_selector(CURVE)
        tell, app.state.runs.on_change = app.state.runs.on_change, None
        append(folder.metrics, *(step_line(step, reward=0.25) for step in range(11, 15)))
        while app.state.runs.get("gap").history.columns.last_step != 14:
            page.wait_for_timeout(50)
        app.state.runs.on_change = tell
        append(folder.metrics, step_line(15, reward=0.75))
        steps = "document.querySelector('[data-chart=reward] .js-plotly-plot').data[0].x"
        until(page, f"{steps}.at(-1) === 15")
        until(page, f"{steps}.length === 16 && [11, 12, 13, 14].every((step) => {steps}.includes(step))")
        page.goto("about:blank")


def test_a_pool_that_was_scaled_is_not_two_of_one(page: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "scaled", 10, ended=False)
    sizes = {"generator/workers": 1, "generator/target": 2, "learner/workers": 1, "learner/target": 1}
    append(folder.metrics, step_line(11, **sizes))
    count = "document.querySelector('.node-1 .count')?.textContent"
    with Served(create_app([tmp_path], token=Token(SECRET))) as served:
        page.goto(served.url)
        until(page, f"{count} === '1 of 2'")
        append(folder.metrics, step_line(12, **{**sizes, "generator/workers": 2}))
        until(page, f"{count} === '×2'")
        assert "2 of 1" not in page.locator("main").inner_text()
        page.goto("about:blank")


def test_rollouts_open_and_hostile_ones_stay_text(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first&view=rollouts")
    page.wait_for_selector(".completion")
    assert page.locator(".completion pre").first.inner_text() == HOSTILE
    assert HOSTILE in page.locator("pre.prompt").inner_text()
    assert page.locator("main script, main img").count() == 0
    assert page.locator(".completion").count() == 8
    assert page.locator(".completion.kept header b").all_inner_texts()[0] == "#1"
    assert page.locator(".strip button.kept").all_inner_texts() == ["1", "2"]
    page.wait_for_selector(".group-detail .js-plotly-plot .bars .point")
    page.get_by_label("kept only").check()
    assert page.locator(".completion").count() == 2
    page.locator(".group").nth(1).click()
    until(page, "!document.querySelector('pre.prompt').textContent.includes('<')")


def test_a_hostile_name_of_a_run_stays_text(page: Any, served: Served) -> None:
    page.goto(served.url)
    page.wait_for_selector(CURVE)
    page.locator("#picker summary").click()
    row = page.locator("#picker li", has_text="img-src")
    assert row.count() == 1
    row.locator("a").click()
    until(page, "location.hash.includes('img-src')")
    page.wait_for_selector("#progress b[data-step='31']")
    page.locator("#tabs a", has_text="Charts").click()
    page.get_by_label("Filter curves").fill("<img")
    page.wait_for_selector(".chart .js-plotly-plot .trace")
    assert page.locator(".chart .title").inner_text() == "<img/src=x/onerror=hacked()>"
    page.locator(".chart .js-plotly-plot .nsewdrag").hover()


def test_runs_are_laid_over_each_other(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first&view=charts")
    page.wait_for_selector(CURVE)
    page.locator("#picker summary").click()
    page.get_by_label("compare second").check()
    until(page, "document.querySelectorAll('[data-chart=reward] .scatterlayer .trace').length === 4")
    assert page.locator("#picker .chip").inner_text().strip().startswith("second")
    page.get_by_label("take second away").click()
    until(page, "document.querySelectorAll('[data-chart=reward] .scatterlayer .trace').length === 2")


def test_curves_are_found_smoothed_and_zoomed(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first&view=charts")
    page.wait_for_selector(CURVE)
    page.get_by_label("Filter curves").fill("grad")
    page.wait_for_selector("[data-chart=grad] .js-plotly-plot .trace")
    assert page.locator(".chart").count() == 1
    page.get_by_label("Smoothing").fill("0.9")
    until(page, "document.querySelectorAll('[data-chart=grad] .scatterlayer .trace').length === 2")
    page.evaluate("window.podsPage.zoom([20, 29.5])")
    until(page, "document.querySelector('[data-chart=grad] .js-plotly-plot').data[0].x.length === 11")
    page.get_by_text("Whole range").click()
    until(page, "document.querySelector('[data-chart=grad] .js-plotly-plot').data[0].x.length === 61")


def test_a_failed_run_names_the_reward_its_message_and_the_worker(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=failing")
    page.wait_for_selector("[data-reward=judge]")
    problems = page.locator(".problems").inner_text()
    assert "ConnectionError: judge.internal refused the connection (rewards.py:7)" in problems
    assert "6,080 times" in problems, "the count of all steps: events tell it at 1, 10, 100, …"
    assert "killed by the kernel (memory)" in problems
    assert page.locator("#notice.error").inner_text().startswith("The run failed: RunError: step 20 has no group")
    health = page.locator("#health.error")
    assert "no update in the last 3 steps" in health.inner_text()
    page.locator("#health summary").click()
    link = page.locator("#health li[data-rule=no-update] a")
    assert link.is_visible()
    with page.context.expect_page() as opened:
        link.click()
    guide = opened.value
    guide.wait_for_load_state()
    assert guide.url.endswith("/docs/troubleshooting#no-update")
    assert guide.locator(":target").inner_text() == "no-update"
    guide.close()


def test_dropped_groups_are_marked_and_found_by_their_fate(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=failing&view=rollouts")
    page.wait_for_selector(".why .fate.too_few_valid")
    assert "dropped: 0 of 8 rollouts can be trained on" in page.locator(".why").inner_text()
    assert "ConnectionError" in page.locator(".completion pre.failed").first.inner_text()
    page.get_by_label("Fate of the group").select_option("no_signal")
    until(page, "document.querySelector('.group-detail').textContent === 'No sampled group had this fate.'")
    page.get_by_label("Fate of the group").select_option("dropped")
    page.wait_for_selector(".group .fate.too_few_valid")


def test_runs_side_by_side(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first&with=second,failing&view=compare")
    page.wait_for_selector(".compare [data-setting]")
    heads = page.locator(".compare thead th").all_inner_texts()
    assert [head.split()[0] for head in heads[1:]] == ["first", "second", "failing"]
    steps = page.locator(".compare [data-figure=Steps] td").all_inner_texts()
    assert steps == ["60", "40", "20"]
    assert page.locator(".compare [data-setting='run.steps'] td").all_inner_texts() == ["60", "40", "40"]
    assert page.locator(".compare [data-figure=accuracy_best] td.best").count() == 1
    # second and failing are alike in all but their name, and have one seed: what cannot be compared is told
    until(
        page, "document.querySelector('.arms').innerText.includes('failing has the seed 0 of another run of this arm')"
    )
    page.goto(f"{served.url}/#run=first&with=second&view=compare")
    until(page, "document.querySelector('.arms [data-arm=second]')?.innerText.includes('never') === false")
    page.wait_for_selector(".arms .plot svg.main-svg")
    page.get_by_label("Arms over").select_option("steps")
    until(page, "document.querySelector('.arms .xtitle')?.textContent === 'updates'")
    page.get_by_label("Baseline").select_option("second")
    until(page, "document.querySelector('.arms [data-arm] th')?.textContent === 'first'")
    page.get_by_label("Arms by").select_option("reward")
    until(page, "document.querySelector('.arms').innerText.includes('Rewards are means over ten steps')")
    page.get_by_label("Target").fill("0.25")
    page.get_by_label("Target").press("Enter")
    until(page, "document.querySelector('.arms .sooner th')?.textContent === 'Times sooner than second at 0.25'")
    page.get_by_label("Arms by").select_option("accuracy")
    until(page, "document.querySelector('.arms').innerText.includes('The target is 99 %')")


def test_events_and_configuration(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first&view=events")
    page.wait_for_selector(".event")
    assert page.locator(".event").count() == 3
    page.get_by_label("Level").select_option("problems")
    until(page, "document.querySelectorAll('.event').length === 1")
    page.goto(f"{served.url}/#run=first&view=config")
    until(page, "document.querySelector('pre.config')?.textContent.includes('rollouts_per_prompt: 64')")


@pytest.mark.parametrize(
    "page",
    [{"viewport": {"width": 360, "height": 740}, "has_touch": True, "color_scheme": "dark"}],
    indirect=True,
    ids=["phone"],
)
def test_a_phone_needs_no_sideways_scrolling(page: Any, served: Served) -> None:
    for view in ("overview", "charts", "rollouts", "events", "compare", "config"):
        page.goto(f"{served.url}/#run=first&view={view}")
        page.wait_for_selector(".tile, .chart, .completion, .event, .compare td, pre.config")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    page.wait_for_selector("#tabs a")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark, "the choice is kept"


@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 844}, "has_touch": True}], indirect=True)
def test_a_phone_leads_with_four_numbers_the_health_and_two_curves(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#run=first")
    page.wait_for_selector(CURVE)
    until(page, "document.querySelectorAll('.chart .js-plotly-plot').length === 2")
    assert page.locator(".tile:visible .label").count() == 4
    assert page.locator("#health").is_visible()
    assert page.locator(".chart:visible .title").all_inner_texts() == ["Rollouts per trained rollout", "Reward"]
    assert page.evaluate("document.documentElement.scrollHeight") < 2_000
    page.locator(".fold-curves summary").click()
    until(page, "document.querySelectorAll('.chart .js-plotly-plot').length > 2")
    page.get_by_text("More numbers").click()
    assert page.locator(".tile:visible").count() == 7
