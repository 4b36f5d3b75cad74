"""Generation settings of a model in a form that transformers agrees to save.

Models come with a `generation_config.json` that loads with a warning and is refused on saving: a temperature without
sampling, a negative padding token. A trained model must not be lost over that.
"""

from __future__ import annotations

import copy
from typing import Any

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def savable_generation_config(config: Any) -> tuple[Any, str | None]:
    """(config, None) where it can be saved as it is, else (a config that can be, what was changed).

    Sampling flags without `do_sample` are taken as meant: sampling is switched on. Where that does not help, everything
    but the special tokens is left out.
    """
    if config is None or (refused := _refusal(config)) is None:
        return config, None
    sampling = copy.deepcopy(config)
    sampling.do_sample = True
    if _refusal(sampling) is None:
        return (
            sampling,
            f"generation_config.json: do_sample is set to true, as its flags are refused without ({refused})",
        )
    plain = type(config)()
    kept = []
    for name in TOKENS:
        value = getattr(config, name, None)
        setattr(plain, name, value)
        if _refusal(plain) is not None:
            setattr(plain, name, None)
        elif value is not None:
            kept.append(name)
    return (
        plain,
        f"generation_config.json: only {', '.join(kept) or 'nothing'} is kept, the rest is refused ({refused})",
    )


def _refusal(config: Any) -> str | None:
    """Why transformers would not save it, in a line; None where it would."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
        return (lines or [str(error)])[0][:160]
    return None
