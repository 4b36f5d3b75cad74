"""The page changes a real run on the CPU: a generator more, then the end with a saved state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from pods_cluster.client.demo import CONFIG
from pods_cluster.client.run_handle import controls_of
from pods_cluster.config import load_config
from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from pods_cluster.run import checkpoints
from pods_cluster.run.run_actors import start_controller
from pods_cluster.telemetry.run_folder import RunFolder
from tests.dashboard.conftest import SECRET, Served
from tests.dashboard.test_page import CHROMIUM, browser, page, until  # noqa: F401 (fixtures)
from tests.tiny_run import Made, made_in

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install chromium")
CURVE = "document.querySelector('[data-chart=reward] .js-plotly-plot')?.data?.[0].x"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_in(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(cluster: None, made: Made, tmp_path: Path) -> Iterator[Any]:
    """A run without end that is alive; its result."""
    settings = [
        "generator.engine=paced",
        "generator.engine_options={tokens_per_second: 600, shortest: 4, longest: 12}",
        "generator.rollouts_per_prompt=8",
        "selector.no_signal=keep",
        "learner.prompts_per_step=4",
        "run.name=live",
        "run.steps=100000",
        "run.eval.every=0",
        "run.export=false",
    ]
    controller = start_controller(load_config(CONFIG, [*made.overrides(tmp_path), *settings]), resume=False)
    yield controller.run.remote()
    ray.kill(controller)  # and with it all that it started


@pytest.mark.slow  # a whole run
def test_a_run_is_scaled_and_stopped_from_the_page(page: Any, run: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = RunFolder(tmp_path / "live")
    while not folder.metrics.is_file() or len(folder.read_metrics()) < 2:
        assert not ray.wait([run], timeout=0.2)[0], ray.get(run)
    with Served(create_app([tmp_path], token=Token(SECRET), controls=controls_of([tmp_path]))) as served:
        page.goto(f"{served.url}/#run=live")
        # The run's curve moves by itself while it trains.
        until(page, f"{CURVE}?.length > 1")
        shown = page.evaluate(f"{CURVE}.at(-1)")
        until(page, f"{CURVE}.at(-1) > {shown}")
        page.click("#manage")
        page.fill("dialog input[type=password]", SECRET)
        page.click("dialog button.primary")
        until(page, "document.querySelector('#live')?.textContent.includes('1 generators · 1 learners')")
        page.fill("dialog input[aria-label=generators]", "2")
        page.click("dialog fieldset button.primary")
        until(page, "document.querySelector('dialog .told').textContent.startsWith('generators go from 1 to 2')")
        until(page, "document.querySelector('#live').textContent.includes('2 generators · 1 learners')")
        page.click("dialog button.danger")
        page.click("dialog button.danger")
        until(page, "!/^(Asking|generators go)/.test(document.querySelector('dialog .told').textContent)")
        page.goto("about:blank")  # else the browser tells of what the page asks an ended run as an error
        assert ray.get(run, timeout=120).status == "stopped"
    assert checkpoints.latest(folder.checkpoints) is not None
    assert folder.read_metrics()[-1]["generator/workers"] == 2
