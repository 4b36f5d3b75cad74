"""Options of the built-in engine (`generator.engine_options` with `engine: transformers`) and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

OPTIONS = ("device", "kv_cache_gb", "prefill_tokens")


def wrong_options(options: Mapping[str, Any]) -> Iterator[str]:
    """A sentence with field, value and fix for each option that the built-in engine cannot take."""
    for name, value in options.items():
        field = f"generator.engine_options.{name}: {value!r}"
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield f"{field}: the transformers engine has no such option; {hint}it has {', '.join(OPTIONS)}"
        elif name == "device" and not isinstance(value, str):
            yield f"{field} must be the name of a device, as cpu or cuda"
        elif name == "kv_cache_gb" and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
            yield f"{field} must be a number above 0"
        elif name == "prefill_tokens" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{field} must be a whole number above 0"
