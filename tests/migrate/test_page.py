"""docs/migrate.md: names of its table are read by the translations, or are answered where they are typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pods_cluster.config.foreign_names import field_of
from pods_cluster.migrate import openrlhf_flags, trl_names, verl_fields
from pods_cluster.trl.config import NAMES
from tests.docs.pages import ALL

PAGE = next(page for page in ALL if page.path == Path("docs/migrate.md"))
SOURCES = {
    1: "",
    2: Path(verl_fields.__file__).read_text(),
    3: Path(openrlhf_flags.__file__).read_text(),
}
ARGUMENTS = {"reward_funcs", "peft_config", "get_soft_overlong_punishment", "tools"}
"""Arguments of TRL's trainer, a reward and a column, which are not in its configuration."""


def cells() -> list[list[str]]:
    section = PAGE.text.split("\n## Side by side\n")[1].split("\n## ")[0]
    return [row.strip("|").split("|") for row in section.splitlines() if row.startswith("|")][2:]


@pytest.mark.parametrize("column", [0, 1, 2], ids=["TRL", "verl", "OpenRLHF"])
def test_names_of_the_table_are_known(column: int) -> None:
    named = [name for row in cells() for name in re.findall(r"`(?:--)?([^`]+)`", row[column])]
    assert len(named) > 20
    if column == 0:
        assert [name for name in named if name not in NAMES | ARGUMENTS] == []
        return
    source = SOURCES[column + 1]
    assert [name for name in named if field_of(name) is None and name not in source] == []


def test_what_is_not_here_is_refused_there() -> None:
    text = PAGE.text.split("\n## What is not here\n")[1]
    for name in ("num_iterations", "repetition_penalty"):
        assert name in text
        assert name in trl_names.NO_COUNTERPART


KNOBS = """
learner.mask_truncated generator.stop_strings generator.stop_tokens model.chat_template_kwargs model.revision model.overrides
learner.importance learner.objective learner.entropy_coefficient soft_overlong learner.warmup_ratio run.epochs generator.top_p
generator.top_k data.mix data.curriculum data.streaming pods_cluster.scoring.judge:judge run.checkpoint.best run.push_to_hub
run.trackio run.mlflow
"""


def test_what_users_of_other_trainers_look_for_has_a_row() -> None:
    here = {name for row in cells() for name in re.findall(r"`([^`]+)`", row[3])}
    assert [name for name in KNOBS.split() if name not in here] == []
