"""Upload of a run's model to the Hugging Face hub, after its last step."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from pods_cluster.telemetry.number_format import first_line

UPLOAD_SECONDS = 3600.0
"""Deadline of an upload; the run ends without it then."""


async def push(folder: Path, repository: str, *, private: bool) -> tuple[bool, str]:
    """Upload the model in `folder` to `repository`, which is made where it is not there; whether it is up, in a sentence.

    The token is that of HF_TOKEN, or of `hf auth login`, on the controller's node. A hub that refuses, or does not answer in
    time, costs the upload alone: the model stays in the run's folder, and the sentence has the command that sends it.
    """
    try:
        url = await asyncio.wait_for(asyncio.to_thread(_upload, folder, repository, private), UPLOAD_SECONDS)
    except Exception as error:  # the library raises many kinds
        cause = f"no answer within {UPLOAD_SECONDS:g} s" if isinstance(error, TimeoutError) else first_line(error)
        return False, (
            f"run.push_to_hub: {repository} could not be reached or refuses the model ({cause}); it is in {folder}: send it "
            f"with: hf upload {repository} {folder}"
        )
    return True, f"the model is at {url}"


def _upload(folder: Path, repository: str, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Model trained with PODS cluster")
    finally:
        if shown:
            with contextlib.suppress(Exception):  # turned off for the whole process by an environment variable
                enable_progress_bars()
    return str(url)
