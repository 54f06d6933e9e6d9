"""Addresses of models, datasets and files: schemes, embedded secrets, canonical form."""

from __future__ import annotations

import os
import re
from typing import Literal, TypeAlias

from runner.errors import did_you_mean

from .bad_values import BadValue, show

Kind: TypeAlias = Literal["path", "hf", "s3", "gs", "https"]
AddressType: TypeAlias = Literal["file", "dataset", "model"]

_SCHEMES: tuple[Kind, ...] = ("hf", "s3", "gs", "https")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB = re.compile(rf"(?:hf://(?:datasets/)?)?{_PART}/{_PART}(?:@[A-Za-z0-9][A-Za-z0-9._/-]*)?")
_HTTPS = re.compile(r"https://(?:([^/?#@]*)@)?([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.DOTALL)
_WHITE_SPACE = re.compile(r"[\s\x00-\x1f]")
_SHORTEST_SIGNATURE = 16  # characters

NOUNS: dict[str, str] = {
    "file": "the path of a file",
    "dataset": "the address of a dataset",
    "model": "the address of a model",
}


def kind_of(address: str) -> Kind:
    """Return the scheme of an address, or `path` for a local path."""
    found = _SCHEME.match(address)
    if found is None:
        return "path"
    return next((scheme for scheme in _SCHEMES if scheme == found[1]), "path")


def split_secrets(address: str) -> tuple[str, tuple[str, ...]]:
    """Split an https address into its public form and its secrets.

    The public form keeps host and path. Secrets are the login, the query, and each query value that
    is long enough to be a signature.
    """
    found = _HTTPS.fullmatch(address)
    if found is None:
        return address, ()
    login, place, query = found[1] or "", found[2], found[3] or ""
    secrets = [part for part in (login, query) if part]
    for pair in query.split("&"):
        # Servers may print the value of a parameter alone, for example the signature.
        _, _, value = pair.partition("=")
        if len(value) >= _SHORTEST_SIGNATURE:
            secrets.append(value)
    return f"https://{place}", tuple(secrets)


def normalize(kind: AddressType, value: object) -> str:
    """Return the canonical form of a path or address.  Raises BadValue.

    A Hub address starts with `hf:`.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise _wrong_type(kind, value)
    if type(value) is not str:
        # The output of another step has its own type.
        return value
    if not value or "\0" in value:
        raise _wrong_type(kind, value)
    found = _SCHEME.match(value)
    if found is None:
        return _normalize_path(kind, value)
    scheme = found[1]
    _check_scheme(kind, scheme)
    if scheme == "hf":
        value = _normalize_hub_address(kind, value)
    if "::" in value:
        message = f"is an address within an address: {show(value)}"
        raise BadValue("not-allowed", message, "use the address of the file or directory itself")
    bucket, _, key = value[found.end() :].partition("/")
    in_bucket = scheme in ("s3", "gs")
    # A key may have spaces within.
    without_spaces = bucket + key.replace(" ", "") if in_bucket else value
    is_padded = value != value.strip()
    has_white_space = is_padded or _WHITE_SPACE.search(without_spaces)
    if has_white_space or len(value) == found.end():
        raise BadValue("not-allowed", f"is an incomplete address or has spaces: {show(value)}")
    if in_bucket:
        _check_key(key)
    return value


def _check_key(key: str) -> None:
    """Raise BadValue for an object key that is not a valid path."""
    if not key:
        return  # the address of a whole bucket
    parts = key.removesuffix("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        message = f'has an empty name, "." or ".." in its key: {show(key)}'
        raise BadValue(
            "not-allowed", message, "copy the object to a key without them, and use that key"
        )


def _wrong_type(kind: AddressType, value: object) -> BadValue:
    return BadValue("wrong-type", f"must be {NOUNS[kind]}, not {show(value)}")


def _normalize_path(kind: AddressType, value: str) -> str:
    """Convert a model name `org/name` to a Hub address, and return other paths unchanged."""
    if kind != "model" or value[0] in "./~":
        return value
    return f"hf://{value}" if _HUB.fullmatch(value) else value


def _check_scheme(kind: AddressType, scheme: str) -> None:
    if kind == "file" and scheme == "hf":
        message = "has type file, but an hf:// address is a whole dataset or model"
        raise BadValue("wrong-type", message, "use an input of type dataset or model")
    if scheme not in _SCHEMES:
        fix = did_you_mean(scheme, _SCHEMES)
        fix = fix or "use a path, or an address that starts with hf://, s3://, gs:// or https://"
        raise BadValue("not-allowed", f'has the unknown scheme "{scheme}://"', fix)


def _normalize_hub_address(kind: AddressType, value: str) -> str:
    """Return the canonical form of a Hub address. Datasets and models have separate namespaces."""
    is_foreign = kind == "model" and value.startswith("hf://datasets/")
    if is_foreign or not _HUB.fullmatch(value):
        message = f"must be hf://org/name or hf://org/name@revision, not {show(value)}"
        raise BadValue("not-allowed", message)
    if kind == "dataset":
        return f"hf://datasets/{value.removeprefix('hf://').removeprefix('datasets/')}"
    return value
