"""A judge over HTTP as a reward: a model behind an OpenAI-compatible endpoint (vLLM, SGLang, a provider) grades completions.

    reward:
      - name: pods_cluster.scoring.judge:judge
        batch: 16
        timeout: 120
        range: [0, 1]
        options: {url: "http://judge:8000/v1", model: Qwen/Qwen2.5-72B-Instruct, highest: 10}

One call of the reward asks for all its completions at once, at most `concurrency` at a time. A request that fails for want
of capacity (429, 5xx, no connection) is tried again after a growing pause; what still fails counts as a failed reward.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROMPT = """Grade how well the response answers the question, from 0 (wrong or no answer) to {highest} (right and complete).
{reference}
[question]
{question}

[response]
{response}

End with one line: Score: <number>"""
REFERENCE = "A right answer is:\n{answer}\n"
PAUSE_SECONDS = 0.5
"""Before the second attempt; doubled before each further one."""


class JudgeError(Exception):
    """The judge gave no grade; the text has the endpoint's answer."""


def judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[str | None] | None = None,
    *,
    url: str,
    model: str,
    template: str = PROMPT,
    highest: float = 10.0,
    concurrency: int = 16,
    attempts: int = 3,
    seconds: float = 60.0,
    max_tokens: int = 512,
    key_variable: str = "OPENAI_API_KEY",
    **_: Any,
) -> list[float]:
    """Grades divided by `highest`, one for each completion, within [0, 1].

    url: the endpoint's base, as in http://host:8000/v1. template: a text with {question}, {response}, and as wished
    {reference} and {highest}; the last number of the judge's reply is the grade. seconds: deadline of one request.
    key_variable: the environment variable of the scorer with the key. Raises JudgeError where one has no grade.
    """
    golds = list(answer) if answer is not None else [None] * len(completions)
    texts = [
        _filled(template, question=_text(prompt), response=_text(completion), highest=f"{highest:g}",
                reference=REFERENCE.format(answer=gold) if gold else "")
        for prompt, completion, gold in zip(prompts, completions, golds, strict=True)
    ]  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_variable):
        headers["Authorization"] = f"Bearer {key}"

    def grade(text: str) -> float:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": max_tokens,
        }
        request = urllib.request.Request(
            f"{url.rstrip('/')}/chat/completions", data=json.dumps(body).encode(), headers=headers, method="POST"
        )
        return grade_of(_answer(request, attempts, seconds), highest)

    with ThreadPoolExecutor(max(1, min(concurrency, len(texts)))) as threads:
        return list(threads.map(grade, texts))


def grade_of(reply: str, highest: float) -> float:
    """The last number of a reply divided by `highest`, within [0, 1]. Raises JudgeError where there is none."""
    numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:\s*(?:/|out of)\s*\d+)?", reply)  # 7, 7.5, 7/10, 7 out of 10
    if not numbers:
        raise JudgeError(f"the judge's reply has no number: {reply[-200:]!r}")
    return min(1.0, max(0.0, float(re.split(r"/|o", numbers[-1])[0]) / highest))


def _answer(request: urllib.request.Request, attempts: int, seconds: float) -> str:
    problem = "none was made"
    for attempt in range(1, attempts + 1):
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                reply = json.load(response)
            return str(reply["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code != 429 and error.code < 500:
                raise JudgeError(f"{request.full_url}: {problem}") from None
        except (OSError, TimeoutError) as error:  # URLError is one: no connection, or none in time
            problem = str(error)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise JudgeError(f"{request.full_url}: the answer is none of a chat completion ({error!r})") from None
        if attempt < attempts:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
    raise JudgeError(f"{request.full_url}: {attempts} attempts failed, the last by {problem}")


def _filled(template: str, **values: str) -> str:
    """The template with its places filled; other braces stay as they are."""
    return re.sub(r"\{(question|response|reference|highest)\}", lambda found: values[found[1]], template)


def _text(value: Any) -> str:
    """A text, or the messages of a conversation one after another."""
    return value if isinstance(value, str) else "\n\n".join(str(message["content"]) for message in value)
