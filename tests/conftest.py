"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import log_capture, warm_workers
from tests.heavy import HEAVY_IMPORTS, MODEL_IMPORTS, UNIT_OF, UNITS, part_of
from tests.law import QUICK, quick_laws

if TYPE_CHECKING:
    from tests.ray_cluster import RayCluster
    from tests.tiny_run import Made

ROOT = Path(__file__).parents[1]

# Processes that a test starts find this code and these tests.
if str(ROOT) not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *paths]))
os.environ.setdefault("PODS_STRICT_METRICS", "1")
# Ray would start an idle process for each CPU slot of a cluster, but an actor with environment variables of its own, as
# workers and ranks have them, gets another one.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray gives its workers the lowest priority but four. Beside a process that computes, as the tests of the other pytest process
# do, they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
# One thread a process: the processes of a test share few cores, and OpenMP threads that spin on them slow all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pure", action="store_true", help="leave out the modules of tests/heavy.py")
    parser.addoption("--part", choices=("models", "others"), help="of the pure tests, those of these folders alone")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("logging"):
        config.pluginmanager.register(log_capture)
    if config.getoption("pure"):
        os.environ[QUICK] = "1"
        quick_laws()
        # Hundreds of thousands of objects live as long as the process does, once torch and its like are imported: a
        # collector that looks at them again and again takes a third of the time.
        gc.set_threshold(100_000, 20, 20)
    elif not hasattr(config, "workerinput"):  # the processes of `-n` share it
        warm_workers.start(at_once=bool(config.getoption("numprocesses", None)))
    warm_workers.keep_settings()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the collection has made stays as long as the process does: the collector need not look at it again."""
    warm_workers.restore_settings()
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A heavy module is not imported either, nor a folder's conftest of the other part."""
    name, part = _module(collection_path), config.getoption("part")
    if config.getoption("pure") and name in UNIT_OF:
        return True
    apart = collection_path.is_dir() or collection_path.name.startswith("test_")
    return True if part and apart and name != "tests" and part_of(name) != part else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: UNIT_OF.get(_module(item.path), len(UNITS)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("pure") and (found := sorted(set(HEAVY_IMPORTS) & set(sys.modules))):
        pytest.exit(f"a pure test imported {', '.join(found)}: its module belongs into tests/heavy.py", returncode=1)
    if session.config.getoption("part") == "others" and (found := sorted(set(MODEL_IMPORTS) & set(sys.modules))):
        told = f"a test imported {', '.join(found)}: its folder belongs into MODEL_FOLDERS of tests/heavy.py"
        pytest.exit(told, returncode=1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what tests measured, as `record_property("measured", ...)` has it: seconds of recovery, say. And how workers started
    (tests/warm_workers.py): each cold one costs a core five seconds."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    found = [text for report in reports for name, text in getattr(report, "user_properties", ()) if name == "measured"]
    if found:
        terminalreporter.section("measured")
        for text in dict.fromkeys(found):
            terminalreporter.write_line(text)
    if workers := warm_workers.seen():
        terminalreporter.section("Ray's workers")
        for text, number in workers.items():
            terminalreporter.write_line(f"{number} {text}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `-n`: each process takes the next unit, the longest first."""
    from tests.units import Units

    return Units(config, log)


def _module(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


@pytest.fixture(scope="module", autouse=True)
def settings_as_begun() -> None:
    """What a module starts has not the settings that another one's libraries have made for this process."""
    warm_workers.restore_settings()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers start as a user's do, and descend from the command that the test runs."""
    monkeypatch.delenv(warm_workers.VARIABLE, raising=False)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    from tests.ray_cluster import RayCluster

    ray_cluster = RayCluster()
    yield ray_cluster
    ray_cluster.close()


@pytest.fixture(scope="module")
def cluster(ray_cluster: RayCluster) -> None:
    """Ray is up. Actors live until their test ends them; names are those of the test's run."""
    ray_cluster.use()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from tests.tiny_run import made_in  # imports torch, which few tests need

    return made_in(tmp_path_factory.mktemp("made"))
