"""A trained model is saved whatever settings it came with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from pods_cluster.learning import model_export
from pods_cluster.learning.savable_config import savable_generation_config
from pods_cluster.learning.trainer import Trainer
from tests.learning.support import config_for

REFUSED: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.6},
    {"do_sample": False, "temperature": 0.0},
    {"num_beams": 1, "early_stopping": True},
    {"pad_token_id": -1, "eos_token_id": 2},
    {"do_sample": False, "top_k": 5, "pad_token_id": -1},
]


@pytest.mark.parametrize("settings", REFUSED)
def test_refused_settings_become_savable_and_keep_the_tokens(settings: dict[str, Any], tmp_path: Path) -> None:
    config = GenerationConfig(**{"bos_token_id": 1, "eos_token_id": [2, 3], **settings})
    with pytest.raises(ValueError, match="invalid"):
        config.save_pretrained(tmp_path)
    savable, note = savable_generation_config(config)
    savable.save_pretrained(tmp_path)
    assert note is not None
    assert note.startswith("generation_config.json: ")
    assert savable.eos_token_id == config.eos_token_id
    assert savable.bos_token_id == 1


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.7}, {"nonsense": 3}, {"max_length": 40}])
def test_settings_that_can_be_saved_stay_as_they_are(settings: dict[str, Any]) -> None:
    config = GenerationConfig(**settings)
    savable, note = savable_generation_config(config)
    assert savable is config
    assert note is None
    assert savable_generation_config(None) == (None, None)


def trainer_of(model_folder: Path, tmp_path: Path, settings: dict[str, Any]) -> Trainer:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    file = folder / "generation_config.json"
    known = json.loads(file.read_text())
    known.pop("_from_model_config", None)
    file.write_text(json.dumps(known | settings))
    return Trainer(config_for(folder), 0, 1)


def same_weights(trainer: Trainer, folder: Path) -> bool:
    specs = trainer.model_weights.specs()
    tensors = trainer.model_weights.gather(0, len(specs))
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(loaded[spec.name], tensor) for spec, tensor in zip(specs, tensors, strict=True))


@pytest.mark.parametrize("settings", REFUSED[:2])
def test_a_model_with_refused_settings_is_exported(one_rank, model_folder, tmp_path, settings) -> None:
    trainer = trainer_of(model_folder, tmp_path, settings)
    (note,) = model_export.export(trainer, tmp_path / "export")
    assert "do_sample is set to true" in note
    assert same_weights(trainer, tmp_path / "export")


def test_a_model_that_transformers_refuses_to_save_keeps_its_weights(
    one_rank, model_folder, tmp_path, monkeypatch
) -> None:
    trainer = trainer_of(model_folder, tmp_path, {})

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("a config that cannot be written")

    monkeypatch.setattr(type(trainer.engine.policy.model), "save_pretrained", refuse)
    (note,) = model_export.export(trainer, tmp_path / "export")
    assert "RuntimeError: a config that cannot be written" in note
    assert same_weights(trainer, tmp_path / "export")


def test_a_tokenizer_that_no_longer_loads_does_not_cost_the_model(one_rank, model_folder, tmp_path) -> None:
    trainer = trainer_of(model_folder, tmp_path, {})
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "up"}))
    (note,) = model_export.export(trainer, tmp_path / "export")
    assert "the tokenizer is not beside the model (ModelError: model.path: " in note
    assert same_weights(trainer, tmp_path / "export")
