"""The files of a model, looked at before anything is started: what could not be loaded or trained is refused by name.

Imports no torch and no transformers. Only local folders are looked into; for the name of a hub the run finds out.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pods_cluster.config import Config
from pods_cluster.data.errors import DataError
from pods_cluster.data.file_kinds import LFS_POINTER
from pods_cluster.data.model_settings import GENERATION, TOKENIZER, refuse_config, refuse_settings

INDEX = "model.safetensors.index.json"
OTHER_TASK = re.compile(r"For(MaskedLM|\w+Classification|QuestionAnswering|MultipleChoice|Pretraining)$", re.IGNORECASE)


def check_models(config: Config, prompt_ids: Sequence[int] = (), *, weights: bool = True) -> list[str]:
    """Check the model that is trained and the reference model; `prompt_ids` are token ids of a prompt.

    Without `weights` a folder that holds none is no fault: a configuration may be checked where the run is not made.
    Returns notes for the user. Raises DataError naming the field, the value and the fix.
    """
    settings, names = _check(config.model.path, "model.path", config.model.trust_remote_code)
    notes = _no_weights(config.model.path, "model.path", settings, names, weights)
    text = settings.get("text_config")
    vocabulary = (text if isinstance(text, Mapping) else settings).get("vocab_size")
    if isinstance(vocabulary, int) and prompt_ids and max(prompt_ids) >= vocabulary:
        raise DataError(
            f"model.path: the tokenizer of {config.model.path!r} gives token {max(prompt_ids)}, and the model knows "
            f"{vocabulary} (vocab_size in its config.json); tokenizer and model do not belong together"
        )
    _check_sizes(config.model.path, "model.path", settings, names)
    lora = config.learner.lora
    if lora is not None and names and not isinstance(lora.target_modules, str):
        _check_targets(lora.target_modules, names)
    reference = config.learner.kl.reference
    if reference is not None:
        found = _check(reference, "learner.kl.reference", config.model.trust_remote_code)
        notes += _no_weights(reference, "learner.kl.reference", *found, weights)
        _check_sizes(reference, "learner.kl.reference", *found)
    if config.model.attention.startswith("flash") and importlib.util.find_spec("flash_attn") is None:
        notes.append(
            f"model.attention: {config.model.attention} needs the package flash-attn, which is not installed here"
        )
    return notes


def _check(path: str, field: str, trusted: bool) -> tuple[Mapping[str, Any], Shapes]:
    """Settings of a model and the shapes of its weights, both empty where they are not here."""
    folder = Path(path).expanduser()
    if folder.is_file():
        raise DataError(f"{field}: {path!r} is a file; give the folder of a model in Hugging Face format")
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")):
            raise DataError(f"{field}: {path!r} does not exist; give the folder of a model, or a Hugging Face hub name")
        return {}, {}
    settings = _settings(folder, path, field)
    kind = settings.get("model_type")
    if not isinstance(kind, str | None):
        raise DataError(f"{field}: model_type of {path!r} is {kind!r}, no text; copy its config.json again")
    _check_beside(folder, path, field)
    remote = isinstance(auto := settings.get("auto_map"), Mapping) and "AutoModelForCausalLM" in auto
    known = _causal_types()
    named = settings.get("architectures")
    architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if known and kind not in known and not (remote and trusted):
        fix = "set model.trust_remote_code: true" if remote else "give a causal language model, or update transformers"
        raise DataError(
            f"{field}: {path!r} is of type {kind!r}, which transformers has no causal language model of; {fix}"
        )
    if not remote and (settings.get("is_encoder_decoder") or any(OTHER_TASK.search(name) for name in architectures)):
        raise DataError(
            f"{field}: {path!r} is no causal language model (its architecture is {', '.join(architectures) or kind}); "
            f"give one that completes texts"
        )
    if quantisation := settings.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise DataError(
            f"{field}: {path!r} is quantised ({method}), and quantised weights cannot be trained; give the model that it "
            f"was made from"
        )
    refuse_config(settings, path, field)
    return settings, _weights(folder, path, field)


def _check_beside(folder: Path, path: str, field: str) -> None:
    """Refuse values of the settings files beside config.json that transformers does not take."""
    for name, kinds in (("generation_config.json", GENERATION), ("tokenizer_config.json", TOKENIZER)):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (
            OSError,
            ValueError,
            RecursionError,
        ):  # absent or torn: the first is left alone, a tokenizer is refused later
            continue
        if not isinstance(found, Mapping):
            if kinds is GENERATION:
                raise DataError(f"{field}: {str(folder / name)!r} holds no object; copy the model again, or remove it")
            continue
        refuse_settings(found, kinds, name, path, field)


Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


def _no_weights(path: str, field: str, settings: Mapping[str, Any], names: Shapes, needed: bool) -> list[str]:
    """A note, or where they are `needed` a DataError, on a model in a local folder without weights."""
    if names or not settings or any(Path(path).expanduser().glob("pytorch_model*.bin")):
        return []
    text = f"{field}: {path!r} holds no weights (model.safetensors); finish the download, or give another folder"
    if needed:
        raise DataError(text)
    return [text]


def _settings(folder: Path, path: str, field: str) -> Mapping[str, Any]:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            base = _json(folder / "adapter_config.json", field).get("base_model_name_or_path")
            raise DataError(
                f"{field}: {path!r} holds an adapter alone; merge it into {base or 'its base model'} and give that folder"
            )
        raise DataError(
            f"{field}: {path!r} has no config.json; give the folder of a model in Hugging Face format, as "
            f"save_pretrained writes it"
        )
    return _json(folder / "config.json", field)


def _json(file: Path, field: str) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{field}: {str(file)!r} cannot be read ({error}); copy the model again") from error
    if not isinstance(found, Mapping):
        raise DataError(f"{field}: {str(file)!r} holds no object; copy the model again")
    return found


def _weights(folder: Path, path: str, field: str) -> Shapes:
    """The weights in safetensors files; empty where the model has others. Raises DataError for torn files."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX, field)
        where = index.get("weight_map")
        files = sorted({str(name) for name in where.values()}) if isinstance(where, Mapping) else []
        if not files or any(Path(name).name != name for name in files):
            raise DataError(
                f"{field}: {str(folder / INDEX)!r} names no files of weights beside it; copy the model again"
            )
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise DataError(
                f"{field}: {path!r} lacks {len(missing)} of {len(files)} files of weights ({', '.join(missing[:3])}); "
                f"finish the download"
            )
        if "metadata" not in index:
            raise DataError(f"{field}: {str(folder / INDEX)!r} has no `metadata`, which loaders read; copy it again")
    elif (folder / "model.safetensors").is_file():
        files, where = ["model.safetensors"], None
    else:
        return {}
    found: Shapes = {}
    for name in files:
        found |= _shapes(folder / name, field)
    if absent := sorted(set(where or ()) - found.keys()):
        raise DataError(
            f"{field}: {str(folder / INDEX)!r} names {len(absent)} tensors that its files do not hold ({absent[0]}, …); copy "
            f"the model again"
        )
    return found


def _shapes(file: Path, field: str) -> Shapes:
    """The tensors of a safetensors file, of which only the header is read. Raises DataError where it is cut short."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise DataError(
                f"{field}: {str(file)!r} is a pointer of Git LFS in place of the file; run git lfs pull there"
            )
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, size)))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        end, shapes = size + 1, {}
    if end != size:
        raise DataError(f"{field}: {str(file)!r} is cut short or damaged ({size:,} bytes); copy it again")
    return shapes


def _check_sizes(path: str, field: str, settings: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse sizes in config.json that the weights beside it do not have.

    Only what every decoder has by the same name is looked at; the loading of the model finds the rest.
    """
    text = settings.get("text_config") or settings
    width, vocabulary = text.get("hidden_size"), text.get("vocab_size")
    layers = {int(found[1]) for name in shapes if (found := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name))}
    wanted = text.get("num_hidden_layers", 0)
    embedding = next(
        (shape for name, shape in shapes.items() if name.endswith(("embed_tokens.weight", "wte.weight"))), ()
    )
    if layers and wanted > len(layers):
        told = f"num_hidden_layers {wanted}, and its weights have {len(layers)} layers"
    elif len(embedding) == 2 and width and "word_embed_proj_dim" not in text and embedding[1] != width:
        told = f"hidden_size {width}, and its weights have {embedding[1]}"
    elif len(embedding) == 2 and vocabulary and text is settings and embedding[0] < vocabulary:
        told = f"vocab_size {vocabulary}, and its weights have {embedding[0]} tokens"
    else:
        return
    raise DataError(f"{field}: config.json of {path!r} says {told}: they do not belong together; copy the model again")


def _check_targets(targets: Iterable[str], names: Iterable[str]) -> None:
    modules = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    for target in targets:
        if not any(module == target or module.endswith("." + target) for module in modules):
            layers = sorted({module.rpartition(".")[2] for module in modules if module.endswith("proj")})
            raise DataError(
                f"learner.lora.target_modules: {target!r} is no layer of the model"
                + (f"; it has {', '.join(layers)}" if layers else "")
                + "; correct the name, or use all-linear"
            )


def _causal_types() -> set[str]:
    """Types of model that transformers has a causal language model of, read from its source: importing it takes torch
    along. Empty where it cannot be read."""
    package = importlib.util.find_spec("transformers")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        try:
            text = (Path(folder) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        except OSError:
            continue
        section = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", text, re.DOTALL | re.MULTILINE)
        if section is not None:
            return set(re.findall(r'\("([\w.-]+)",', section.group()))
    return set()
