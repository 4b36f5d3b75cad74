"""The registry refuses what it does not know, and documents what it does."""

import subprocess
import sys
from pathlib import Path

import pytest

from pods_cluster.config.reference import config_reference
from pods_cluster.telemetry.catalog import STAGES, registry
from pods_cluster.telemetry.metric_registry import Kind, Metric, Registry, UnknownMetric
from pods_cluster.types import Fate

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "rollout_to_update_ratio/tokens_cumulative",
        "sampling/importance_sampling_ratio/mean",
        "rewards/math_answer/mean",
        "rewards/path/to/file.py:function/mean",
        "scoring/failures/timeout/my.module:score",
        *(f"groups/{fate.value}" for fate in Fate),
        *(f"timing_s/{stage}" for stage in STAGES),
    ],
)
def test_known_names(name: str) -> None:
    registry.check({name: 1.0})
    assert registry[name].meaning


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rewrad", "reward"),
        ("groups/vanished", "groups/"),
        ("timing_s/generation", "timing_s/generate"),
        ("scoring/failures/sulked/math", "scoring/failures/<kind>"),
        ("rewards/two words/mean", "rewards/<name>/mean"),
        ("", "catalog"),
        ("rewards//mean", "rewards/"),
    ],
)
def test_unknown_names_are_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UnknownMetric, match=hint) as caught:
        registry.check({"reward": 1.0, name: 2.0})
    assert repr(name) in str(caught.value)


def test_every_unknown_name_is_told() -> None:
    with pytest.raises(UnknownMetric, match=r"'nope_1'.*'nope_2'"):
        registry.check({"nope_1": 1, "reward": 1, "nope_2": 1})


def test_a_plugin_adds_a_metric_once() -> None:
    own = Registry({"One": [Metric("a/<x>", "", "A family.", choices={"x": ("p", "q")})]})
    assert "plugin/depth" not in own
    own.register(Metric("plugin/depth", "m", "How deep."), section="Plug-in")
    assert own["plugin/depth"].unit == "m"
    assert "a/p" in own
    assert "a/r" not in own
    with pytest.raises(ValueError, match="registered already"):
        own.register(Metric("plugin/depth", "m", "Again."))
    with pytest.raises(ValueError, match="needs a meaning"):
        own.register(Metric("plugin/silent", "m", ""))
    with pytest.raises(ValueError, match="cannot name a metric"):
        own.register(Metric("white space", "m", "Bad."))


def test_every_metric_is_documented() -> None:
    page = registry.markdown()
    for metric in registry:
        assert f"| `{metric.name}` | {metric.unit} | {metric.kind.value} | {metric.meaning}" in page
        assert metric.meaning.endswith(".")
        assert (metric.kind is Kind.COUNT) <= (metric.unit not in ("share", "ratio", "1/s"))


@pytest.mark.parametrize(
    ("page", "made", "module"),
    [
        ("metrics.md", registry.markdown, "pods_cluster.telemetry.catalog"),
        ("config.md", config_reference, "pods_cluster.config.reference"),
    ],
)
def test_reference_pages_are_up_to_date(page: str, made, module: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == made(), f"run: python -m {module} > docs/{page}"


@pytest.mark.parametrize("module", ["pods_cluster.telemetry.catalog", "pods_cluster.config.reference"])
def test_reference_pages_print_from_the_command_line(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("# ")
    assert done.stdout.endswith("|\n")
    assert "Warning" not in done.stderr


def test_telemetry_imports_nothing_heavy() -> None:
    """The controller and the driver load it at their start."""
    code = (
        "import sys; from pods_cluster.telemetry import recorder, progress, report;"
        "heavy = ('torch', 'ray', 'vllm', 'deepspeed', 'matplotlib', 'tensorboard', 'wandb');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_config_reference_names_every_field() -> None:
    from pods_cluster.config import Config
    from pods_cluster.config.reference import field_texts

    page = config_reference()

    def walk(model, prefix=""):
        texts = field_texts(model)
        for name, field in model.model_fields.items():
            assert f"| `{name}` |" in page or f"## `{prefix}{name}`" in page
            documented = texts.get(name) or "Config" in str(field.annotation)
            assert documented, f"{prefix}{name} has no documentation"
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation, f"{prefix}{name}.")

    walk(Config)
    assert "## `data.eval`" in page
    assert "## `learner.lora`" in page
    assert "PydanticUndefined" not in page
    assert "<class" not in page
    assert "typing." not in page
