"""The warm start: it stops where it is told, its folder is whole or absent, and the same settings are made once."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from pods_cluster.quickstart import __main__ as cli
from pods_cluster.quickstart import warm_start
from pods_cluster.quickstart.answer_batch import Accuracy, accuracy, encode
from pods_cluster.quickstart.task import make_splits
from pods_cluster.quickstart.tiny_model import ModelSize
from pods_cluster.quickstart.warm_start import WarmStart, prepare

SHORT = WarmStart(
    size=ModelSize(hidden=64, layers=1, heads=1, mlp=64),
    test_problems=32,
    warm_problems=64,
    batch=16,
    check_every=2,
    check_rows=16,
    max_steps=6,
)


def test_the_folder_holds_a_loadable_model_its_data_and_a_true_report(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, SHORT)
    tokenizer = AutoTokenizer.from_pretrained(prepared.model)
    model = AutoModelForCausalLM.from_pretrained(prepared.model, dtype=torch.float32)
    rows = {
        name: [json.loads(line) for line in (prepared.data / f"{name}.jsonl").read_text().splitlines()]
        for name in ("warm", "train", "test")
    }
    assert rows == make_splits(SHORT.seed, test=SHORT.test_problems, warm=SHORT.warm_problems).as_dict()
    assert prepared.report.rows == {name: len(items) for name, items in rows.items()}
    measured = accuracy(model, encode(tokenizer, rows["test"]))
    assert measured.greedy == pytest.approx(prepared.report.greedy)
    assert measured.sampled == pytest.approx(prepared.report.sampled, rel=1e-4)
    assert prepared.report.steps == SHORT.max_steps


def test_the_same_settings_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path, SHORT)
    monkeypatch.setattr(warm_start, "_build", lambda *_: pytest.fail("made again"))
    again = prepare(tmp_path, SHORT)
    assert (first.reused, again.reused) == (False, True)
    assert (again.folder, again.report) == (first.folder, first.report)


def test_other_settings_have_another_folder() -> None:
    assert SHORT.digest() == dataclasses.replace(SHORT).digest()
    assert len({SHORT.digest(), dataclasses.replace(SHORT, seed=1).digest(), WarmStart().digest()}) == 3


def test_an_interrupted_warm_start_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(step: int, loss: float, check: Accuracy) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, SHORT, threads=threads + 1, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


def test_the_first_of_two_makers_wins(tmp_path: Path) -> None:
    rival = []

    def make_it_too(step: int, loss: float, check: Accuracy) -> None:
        if not rival:
            rival.append(prepare(tmp_path, SHORT))

    late = prepare(tmp_path, SHORT, progress=make_it_too)
    assert late.folder == rival[0].folder
    assert late.report == rival[0].report
    assert [path.name for path in tmp_path.iterdir()] == [late.folder.name]


def test_it_stops_at_the_target(tmp_path: Path) -> None:
    assert prepare(tmp_path, dataclasses.replace(SHORT, target=0.0)).report.steps == SHORT.check_every


def test_the_command_points_at_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "WarmStart", lambda seed: dataclasses.replace(SHORT, seed=seed))
    assert cli.main([str(tmp_path), "--seed", "0"]) == 0
    assert cli.main([str(tmp_path), "--seed", "1"]) == 0
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert (tmp_path / "model").resolve().parent.name == f"quickstart-{dataclasses.replace(SHORT, seed=1).digest()}"
    assert len((tmp_path / "data" / "test.jsonl").read_text().splitlines()) == SHORT.test_problems
    assert "held-out accuracy, greedy" in capsys.readouterr().out


def test_the_command_does_not_replace_a_folder_of_the_users(tmp_path: Path) -> None:
    prepared = prepare(tmp_path / "cache", SHORT)
    (tmp_path / "out" / "model").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="not made by the quickstart"):
        cli.publish(prepared, tmp_path / "out")


def test_saving_leaves_other_libraries_words_out_and_gives_them_back(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        with warm_start._quiet_libraries():
            assert not transformers_logging.is_progress_bar_enabled()
            logger.warning("no GPU here")
            logger.error("this is wrong")
        logger.warning("heard again")
    finally:
        logger.removeHandler(handler)
    assert transformers_logging.is_progress_bar_enabled()
    said = capfd.readouterr().err
    assert "no GPU here" not in said
    assert "this is wrong" in said
    assert "heard again" in said
