"""The tokenizer for prompts: it renders a chat template to text and encodes text to ids.

`AutoTokenizer` serves a run; it imports torch. `LightTokenizer` reads the same files with `tokenizers` and `jinja2`
alone, so that a configuration can be checked, and a prompt rendered, where torch is not wanted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pods_cluster.config import ModelConfig
from pods_cluster.data.chat_template import ChatTemplateError, render_chat
from pods_cluster.data.errors import DataError
from pods_cluster.data.prompt_template import read_text

LIGHT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


class PromptTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need; the classes behind `AutoTokenizer` have it."""

    @property
    def chat_template(self) -> Any:
        """The tokenizer's own chat template, or None."""
        ...

    @property
    def bos_token_id(self) -> Any:
        """Id of the start token, or None."""
        ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Encode a text to token ids."""
        ...

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        tools: Any = None,
        **variables: Any,
    ) -> Any:
        """Render a conversation to text, with `tokenize` to ids."""
        ...


class LightTokenizer:
    """Reads `tokenizer.json` and its chat template without transformers or torch, with the same results."""

    def __init__(self, backend: Any, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> LightTokenizer:
        """Load the tokenizer of a folder. Raises FileNotFoundError where it has no `tokenizer.json`."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(file)
        settings = _read_json(folder / "tokenizer_config.json")
        names = {key: value for key, value in settings.items() if key.endswith("_token")}
        names = _read_json(folder / "special_tokens_map.json") | {key: value for key, value in names.items() if value}
        special = {key: text for key, value in names.items() if (text := _token_text(value)) is not None}
        backend = Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, special, _chat_template(folder, settings))

    @property
    def bos_token_id(self) -> int | None:
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> Any:
        """Render the conversation to text, with `tokenize` to ids. Raises ChatTemplateError."""
        template = chat_template or self.chat_template
        if template is None:
            raise ChatTemplateError("the tokenizer has no chat template")
        text = render_chat(
            template,
            conversation,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def load_tokenizer(model: ModelConfig, *, light: bool = False) -> PromptTokenizer:
    """Load the tokenizer of `model.path`, with `model.chat_template` instead of its own where that is set.

    `light`: without torch where the folder (or the hub repository) has a `tokenizer.json`; else as a run loads it.
    Raises DataError naming model.path.
    """
    tokenizer: Any = _load_light(model) if light and not model.trust_remote_code else None
    if tokenizer is None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        except Exception as error:
            raise DataError(
                f"model.path: the tokenizer of {model.path!r} cannot be loaded ({type(error).__name__}: {error}); "
                f"give a folder with tokenizer.json, or a reachable Hugging Face hub name"
            ) from error
    override = resolve_chat_template(model.chat_template)
    if override is not None:
        tokenizer.chat_template = override
    return tokenizer


def resolve_chat_template(value: str | None) -> str | None:
    """Return `model.chat_template` as text: it is one, or a path to one. Raises DataError."""
    if value is None or "{" in value or "\n" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise DataError(
            f"model.chat_template: {value!r} is neither a Jinja template (it has no braces) nor a file; correct it"
        )
    return read_text(path, "model.chat_template")


def _load_light(model: ModelConfig) -> LightTokenizer | None:
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        try:
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model.path, revision=model.revision, allow_patterns=list(LIGHT_FILES)))
        except Exception as error:
            raise DataError(
                f"model.path: {model.path!r} is no folder, and its tokenizer could not be had from the Hugging Face "
                f"hub ({type(error).__name__}: {error}); give a folder with tokenizer.json, or make the hub reachable"
            ) from error
    try:
        return LightTokenizer.from_folder(folder)
    except FileNotFoundError:
        return None
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
        raise DataError(f"model.path: the tokenizer files of {model.path!r} are damaged ({error})") from error


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default chat template; a file of its own takes precedence over the settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):
        found = {item["name"]: item["template"] for item in found}.get("default")
    return found


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
