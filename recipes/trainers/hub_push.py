"""Step `publish`: put a folder on the Hugging Face Hub, as one commit of a repository that is made if need be.  Does not know what is in the folder.

The token is $HF_TOKEN (the recipe's secret `hf_token`), the Hub is $HF_ENDPOINT where that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import HfApi

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class CannotPush(Exception):
    """The folder is not on the Hub."""


def push(api: HfApi, folder: Path, to: str, *, private: bool, message: str) -> dict[str, object]:
    """Upload all of `folder` to the model repository `to` (`org/name`).  Where it is now comes back: `repo`, `url`, `commit`, `files`, `bytes`.

    An equal folder pushed again changes nothing.  Raises CannotPush.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    files = [file for file in sorted(folder.rglob("*")) if file.is_file()] if folder.is_dir() else []
    if not files:
        raise CannotPush(f"{folder} holds no file to push")
    if not NAME.fullmatch(to):
        raise CannotPush(f'push_to "{to}" is no name of a repository: org/name, letters, digits and . _ -')
    try:
        api.create_repo(to, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=to, folder_path=folder, commit_message=message)
    except OfflineModeIsEnabled as error:
        raise CannotPush("HF_HUB_OFFLINE is set here: unset it to push, or leave push_to empty") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        hint = {401: "; is HF_TOKEN set, and a token that may write?", 403: f"; may this token write to {to}?"}.get(status, "")
        raise CannotPush(f"the Hub refused {to}: {' '.join(str(error).split())}{hint}") from error
    except Exception as error:  # requests, httpx or httpx2 have errors of their own, and which it is changes with the version of huggingface_hub
        raise CannotPush(f"the upload to {to} failed: {type(error).__name__}: {error}") from error
    size = sum(file.stat().st_size for file in files)
    return {"repo": to, "url": done.commit_url, "commit": done.oid, "files": len(files), "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--to", required=True, help="org/name")
    parser.add_argument("--private", type=lambda word: word == "true", default=True)
    parser.add_argument("--message", default="Trained by recipe")
    parser.add_argument("--receipt", type=Path, required=True, help="where to write what was pushed, as JSON")
    options = parser.parse_args()
    # Bars of progress are for terminals, and this is a log.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        sys.exit("publish: huggingface_hub is not installed in this step's Python: add it to the lock, or leave push_to empty")
    try:
        receipt = push(HfApi(), options.folder, options.to, private=options.private, message=options.message)
    except CannotPush as error:
        sys.exit(f"publish: {error}")
    options.receipt.write_text(json.dumps(receipt, indent=2) + "\n")
    print(f"publish: {receipt['files']} files, {int(str(receipt['bytes'])) / 1e6:.1f} MB, at {receipt['url']}")


if __name__ == "__main__":
    main()
