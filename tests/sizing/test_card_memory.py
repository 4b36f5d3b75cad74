"""The memory of a card that both pools share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import load_config
from pods_cluster.sizing.card_memory import LEFT, CardMemory, ModelSizes, card_memory

CONFIG = Path(__file__).parents[2] / "configs" / "gsm8k-1gpu.yaml"
# Qwen2.5-0.5B in bfloat16: 494 million parameters; keys and values of 24 layers, 2 heads, 64 numbers.
QWEN = ModelSizes(weights=2 * 494_032_768, token=2 * 24 * 2 * 64 * 2)


def planned(*overrides: str, card: float = 80e9, learner: float = 35e9) -> CardMemory:
    found = card_memory(load_config(CONFIG, overrides), QWEN, card=card, learner=learner)
    assert found is not None
    return found


def test_the_shipped_configuration_is_the_plan_for_80_gb() -> None:
    config = load_config(CONFIG)
    found = planned()  # 35 GB: measured with its micro-batches, docs/update-speed.md
    assert found.fits
    assert found.engines == config.generator.workers == 2
    assert config.generator.engine_options["kv_cache_gb"] == found.cache_gib == 6.0
    assert "kv_cache_gb=6" in found.describe()
    assert config.learner.tokens_per_microbatch == 32768


def test_a_smaller_card_says_what_to_lower() -> None:
    found = planned(card=48e9)
    assert not found.fits
    assert f"generator.max_sequences={found.sequences_that_fit} or" in found.describe()
    # what the configuration's head says about 48 GB, with the 26 GB of smaller micro-batches
    assert planned("generator.max_sequences=256", card=48e9, learner=26e9).fits
    assert "Lower learner.tokens_per_microbatch" in planned(card=24e9).describe()


def test_engines_share_what_the_rank_leaves() -> None:
    found = planned("generator.workers=1", "generator.gpus_per_worker=0.5", "generator.max_sequences=1024")
    assert (found.engines, found.cache_gib) == (1, 12.0)
    alone = load_config(CONFIG, ["learner.gpus_per_worker=1"])
    assert card_memory(alone, QWEN, card=80e9, learner=35e9) is None


@given(
    card=st.floats(8e9, 300e9),
    learner=st.floats(0, 200e9),
    engines=st.integers(1, 4),
    weights=st.integers(10**8, 10**11),
    token=st.integers(10**3, 10**6),
    sequences=st.integers(1, 4096),
)
def test_as_many_fit_as_it_says(
    card: float, learner: float, engines: int, weights: int, token: int, sequences: int
) -> None:
    found = CardMemory(card, learner, engines, weights, sequences * 1000 * token, sequences, 1000)
    most = found.sequences_that_fit
    if found.fits:
        assert most >= sequences
    for count in (most, most + 1):
        if count:
            other = replace(found, cache=count * 1000 * token, sequences=count)
            assert other.fits == (count == most) or other.left == pytest.approx(LEFT * card)


def test_weights_that_arrive_beside_the_steps_take_their_size_again() -> None:
    automatic = "weights.staged=auto"
    assert not load_config(CONFIG).stages_weights
    assert not load_config(
        CONFIG, [automatic]
    ).stages_weights  # the learner's peak is still to come when the engine looks for room
    once, twice = (
        card_memory(load_config(CONFIG, overrides), QWEN, card=80e9, learner=20e9)
        for overrides in ([], ["weights.staged=true"])
    )
    assert once is not None
    assert twice is not None
    assert twice.weights == 2 * once.weights
    assert twice.left == once.left - twice.engines * QWEN.weights
    assert load_config(CONFIG, [automatic, "learner.gpus_per_worker=1", "generator.gpus_per_worker=1"]).stages_weights
