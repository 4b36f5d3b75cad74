"""The page that lists the vLLM engine's own options says what the code takes."""

from __future__ import annotations

import re
from pathlib import Path

from pods_cluster.config.vllm_options import _CHOICES, VllmOptions

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_lists_every_option_with_its_values_and_default():
    section = PAGE.read_text().split("## vllm")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert list(rows) == list(VllmOptions.__dataclass_fields__)
    default = VllmOptions()
    for name, choices in _CHOICES.items():
        shown = [str(choice).lower() if isinstance(choice, bool) else choice for choice in choices]
        assert sorted(re.findall(r"`(\w+)`", rows[name])) == sorted(shown)
        value = getattr(default, name)
        assert f"**`{str(value).lower() if isinstance(value, bool) else value}`**" in rows[name]
