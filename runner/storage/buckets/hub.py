"""Upload of results to the Hugging Face Hub as one commit (`--out hf://ORG/NAME`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from drivers import install_line

from ...errors import CannotRun, Infrastructure, Invalid, Problem
from .bucket import BucketUnreachable
from .results_folder import MANIFEST, UploadFile, manifest

_NAME = re.compile(r"(datasets/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
T = TypeVar("T")


def parse_repository(address: str) -> tuple[str, str]:
    """Return the type (`model` or `dataset`) and the name of a Hub repository.

    Raises Invalid.
    """
    found = _NAME.fullmatch(address.removeprefix("hf://").rstrip("/"))
    if found is None:
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    f"{address} is not a Hub repository",
                    fix="use hf://ORG/NAME, or hf://datasets/ORG/NAME",
                )
            ]
        )
    return "dataset" if found[1] else "model", found[2]


def offline(environ: Mapping[str, str]) -> bool:
    """Return True if HF_HUB_OFFLINE is set, by the rules of the Hub's client."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def snapshots(name: str) -> Path:
    """Return the directory with a model's snapshots in the local Hub cache."""
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    return Path(home) / f"models--{name.replace('/', '--')}" / "snapshots"


def check(address: str, environ: Mapping[str, str]) -> None:
    """Check the Hub login before a run.

    Raises CannotRun, Infrastructure.
    """
    if offline(environ):
        raise CannotRun(
            f"cannot reach {address}: HF_HUB_OFFLINE is set",
            fix="unset HF_HUB_OFFLINE, or pass a local directory to `--out`",
        )
    _ask_hub(address, lambda: _api(environ).whoami())


def is_there(address: str, environ: Mapping[str, str]) -> bool:
    """Return True if the Hub repository has a results manifest.

    Raises Infrastructure.
    """
    kind, name = parse_repository(address)
    api = _api(environ)
    return bool(_ask_hub(address, lambda: api.file_exists(name, MANIFEST, repo_type=kind)))


def upload(
    address: str,
    wanted: Sequence[UploadFile],
    facts: Mapping[str, object],
    environ: Mapping[str, str],
    beside: Path,
) -> int:
    """Commit files and their manifest to a Hub repository, created as private if missing.

    Returns the total bytes.

    A single directory becomes the repository's root, so that a model loads by the repository's
    name. Raises Infrastructure.
    """
    from huggingface_hub import CommitOperationAdd

    kind, name = parse_repository(address)
    outputs = facts.get("outputs")
    tops = {file.name.split("/")[0] for file in wanted if _is_output(file.name, outputs)}
    alone = f"{next(iter(tops))}/" if len(tops) == 1 else ""
    laid = []
    for file in wanted:
        if _is_output(file.name, outputs):
            laid.append(file._replace(name=file.name.removeprefix(alone)))
        else:
            laid.append(file)
    beside.mkdir(parents=True, exist_ok=True)
    listing = beside / MANIFEST
    listing.write_bytes(manifest(laid, facts, complete=True))

    def commit() -> None:
        api = _api(environ)
        api.create_repo(name, repo_type=kind, private=True, exist_ok=True)
        operations = [
            CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.path) for file in laid
        ]
        operations.append(CommitOperationAdd(path_in_repo=MANIFEST, path_or_fileobj=str(listing)))
        api.create_commit(
            name,
            operations,
            commit_message=f"{facts['recipe']}, run {facts['run'] or '-'}",
            repo_type=kind,
        )

    _ask_hub(address, commit)
    return sum(file.size for file in laid)


def _is_output(name: str, outputs: object) -> bool:
    if not isinstance(outputs, Mapping):
        return False
    return any(name == path or name.startswith(f"{path}/") for path in outputs.values())


def _api(environ: Mapping[str, str]) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise Infrastructure(
            "hf:// requires huggingface_hub, which is not installed", fix=install_line("hub")
        ) from error
    return HfApi(endpoint=environ.get("HF_ENDPOINT") or None, token=environ.get("HF_TOKEN") or None)


def _is_temporary(error: Exception, status: object) -> bool:
    """Return True if the same request may succeed later."""
    if status == 429 or (isinstance(status, int) and status >= 500):
        return True
    return isinstance(error, OSError) or type(error).__module__ == "httpx"


def _ask_hub(address: str, ask: Callable[[], T]) -> T:
    """Return the Hub's response to a request.

    Raises Infrastructure with a fix, Unreachable for temporary errors.
    """
    try:
        return ask()
    except Infrastructure:
        raise
    except Exception as error:  # the HTTP client has its own network errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        words = " ".join(str(error).split())[:300]
        if status in (401, 403) or type(error).__name__ == "LocalTokenNotFoundError":
            raise Infrastructure(
                f"{address}: the Hub rejected the login ({words})",
                fix="set HF_TOKEN to a token with write access",
            ) from error
        if not _is_temporary(error, status):
            raise Infrastructure(
                f"{address}: the Hub rejected the upload ({words})",
                fix="check the repository name and its write access",
            ) from error
        raise BucketUnreachable(
            f"cannot reach the Hugging Face Hub for {address}: {words}",
            fix="check the network connection",
        ) from error
