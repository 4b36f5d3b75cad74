"""What a job takes with it, and what it refuses to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods_cluster.client import bundle, jobs
from pods_cluster.client.bundle import BundleError, bundle_of
from pods_cluster.client.jobs import JobError, exit_code, prepare
from pods_cluster.client.paths import run_folder
from pods_cluster.config import parse_config
from tests.run.parts import YAML


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with much that a job does not need."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yaml").write_text(YAML)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("def short(): ...\n")
    (tmp_path / "mine").mkdir()
    for name in ("__init__.py", "rules.py", "parts.py"):
        (tmp_path / "mine" / name).write_text("")
    (tmp_path / "mine" / "__pycache__").mkdir()
    (tmp_path / "mine" / "__pycache__" / "rules.pyc").write_text("compiled")
    for unneeded in ("runs/first/checkpoints/state.bin", ".venv/bin/python", "notes.txt"):
        path = tmp_path / unneeded
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("large")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_the_configuration_names_goes(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    config = parse_config(YAML, ["reward.0.name=rewards.py:short", "selector.rule=mine.rules:best"])
    target = tmp_path_factory.mktemp("sent")
    bundle_of(config, Path("configs/run.yaml")).copy_to(target)
    assert names(target) == {
        "configs/run.yaml",
        "data.jsonl",
        "rewards.py",
        "mine/__init__.py",
        "mine/rules.py",
        "mine/parts.py",
    }


def test_more_can_be_included_and_what_lies_elsewhere_stays_there(folder: Path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("shared") / "rows.jsonl"
    elsewhere.write_text("{}\n")
    config = parse_config(YAML, [f"data.path={elsewhere}"])
    found = bundle_of(config, Path("configs/run.yaml"), [Path("notes.txt")])
    assert found.paths == (Path("configs/run.yaml"), Path("notes.txt"))
    with pytest.raises(BundleError, match="lies outside of"):
        bundle_of(config, Path("configs/run.yaml"), [elsewhere])
    with pytest.raises(BundleError, match="there is no such file"):
        bundle_of(config, Path("configs/run.yaml"), [Path("absent.txt")])


def test_files_too_large_for_a_job_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_BYTES", 2**20)
    (folder / "data.jsonl").write_bytes(b" " * 2**21)
    with pytest.raises(BundleError, match=r"data\.jsonl: takes 2 MiB, a job's files at most 1 MiB; put it where"):
        bundle_of(parse_config(YAML), Path("configs/run.yaml"))


def test_a_job_is_described_without_its_secrets(folder: Path):
    job = prepare(
        Path("configs/run.yaml"),
        ["run.steps=7", "run.name=first run".replace(" ", "-")],
        env=["HF_TOKEN"],
        pip=["einops", "requirements.txt"] if (folder / "requirements.txt").write_text("# x\nsix==1.17  # y\n") else [],
        environment={"HF_TOKEN": "hf_secret"},
        resume=True,
    )
    assert job.entrypoint == (
        f"python -m pods_cluster.client.cli train configs/run.yaml run.steps=7 run.name=first-run "
        f"run.dir={folder / 'runs'} --plain --resume"
    )
    assert "hf_secret" not in repr(job)
    sent = job.runtime_env(Path("/sent"))
    assert sent["env_vars"]["HF_TOKEN"] == "hf_secret"
    assert sent["pip"] == ["einops", "six==1.17"]
    (package,) = sent["py_modules"]
    assert (Path(package) / "client" / "cli.py").is_file()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"env": ["ABSENT"]}, "--env ABSENT: is not set here"),
        ({"env": ["KEY=hf_secret"]}, r"--env KEY=…: give the name alone"),
        ({"pip": ["absent.txt"]}, r"--pip absent\.txt: cannot be read"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(folder: Path, options, text):
    with pytest.raises(JobError, match=text) as error:
        prepare(Path("configs/run.yaml"), environment={}, **options)
    assert "hf_secret" not in str(error.value)


def test_no_job_server_is_told_with_the_fix():
    with pytest.raises(JobError, match=r"127\.0\.0\.1:1: no job server can be reached.*ray start --head"):
        jobs.connect("http://127.0.0.1:1")


@pytest.mark.parametrize(("status", "driver", "code"), [("SUCCEEDED", 0, 0), ("FAILED", 3, 3), ("FAILED", None, 1),
                                                        ("STOPPED", None, 1), ("FAILED", -9, 1)])  # fmt: skip
def test_exit_codes(status, driver, code):
    assert exit_code(status, driver) == code


def test_a_run_of_a_job_does_not_lie_in_the_jobs_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    files.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(files)
    assert run_folder("runs") == tmp_path / "runs"
    assert run_folder("/elsewhere") == Path("/elsewhere")
    monkeypatch.chdir(tmp_path)
    assert run_folder("mine") == tmp_path / "mine"
