"""Secrets of a configuration leave neither the machine nor the owner's hands."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.secret_values import HIDDEN, holds_secrets, without_secrets
from pods_cluster.telemetry.sinks import WandbSink

WITH = "reward: [{name: judge, options: {api_key: sk-123, url: 'https://me:word@host/v1', model: judge-1}}]\n"
WITHOUT = "reward: [{name: judge, options: {model: judge-1, prefill_tokens: 5, token: 7}}]\n"


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "API-KEY".replace("-", ""), "token", "hf_token", "client_secret", "PASSWORD", "passwd", "Authorization",
     "credentials", "private_key", "passphrase"],
)  # fmt: skip
def test_fields_that_hold_secrets(name: str) -> None:
    assert without_secrets({"options": [{name: "sk-123"}]}) == {"options": [{name: HIDDEN}]}


def test_what_is_no_secret_stays() -> None:
    tree = {
        "max_tokens": 5,
        "template": "a {prompt}",
        "token": None,
        "path": "https://host/a@b",
        "pair": (1, 2),
        "password": "",
    }
    assert without_secrets(tree) == tree | {"pair": [1, 2]}
    assert without_secrets("redis://user:word@host:1/x") == f"redis://{HIDDEN}@host:1/x"


def test_a_configuration_with_secrets_is_for_its_owner_alone(tmp_path: Path) -> None:
    assert holds_secrets(WITH)
    assert not holds_secrets(WITHOUT)
    assert holds_secrets("a: [")
    modes = {}
    for name, text in (("with", WITH), ("without", WITHOUT)):
        folder = RunFolder.create(tmp_path, name, text)
        assert folder.config.read_text() == text  # a resume and an evaluation need it whole
        modes[name] = stat.S_IMODE(folder.config.stat().st_mode)
    assert modes == {"with": 0o600, "without": 0o644}
    folder = RunFolder.resume(tmp_path, "with", WITHOUT)
    assert stat.S_IMODE((folder.path / "config.1.yaml").stat().st_mode) == 0o600


def test_weights_and_biases_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(define_metric=lambda *_, **__: None, dir=str(tmp_path), url="")

    errors = SimpleNamespace(**dict.fromkeys(("AuthenticationError", "UsageError", "CommError"), Exception))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **_: None, errors=errors))
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbSink(RunFolder.create(tmp_path, "run", WITH), {"reward": [{"options": {"api_key": "sk-123", "model": "m"}}]})
    assert given["config"] == {"reward": [{"options": {"api_key": HIDDEN, "model": "m"}}]}
