"""Whatever keys a bucket has below the folder of an input: the files of it are those keys, or the input is refused by name."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import CannotRun
from runner.storage.sources import ask_identity, fetch
from runner.storage.workspace import Workspace

PARTS = ("a", "A", "b c", " d", "e%20", "f+", "%2F", "g\nh", "\u00e9", "e\u0301", "\U0001f600", "*?[x]", "#", "..", ".", "", "-", "~", "\\", "x" * 256)  # fmt: skip


def key_set(seed: int) -> dict[str, bytes]:
    """Random keys below a folder, and what each holds: most sets are files, some cannot be."""
    rng = random.Random(seed)
    parts = PARTS if rng.random() < 0.5 else PARTS[:13]
    found = {}
    for number in range(rng.randint(1, 8)):
        key = "/".join(rng.choice(parts) for _ in range(rng.randint(1, 3)))
        marks = rng.random() < 0.15
        found[f"{key}/" if marks else key] = b"" if marks else f"{number} {key}".encode()
    return found


def files_of(keys: Mapping[str, bytes]) -> dict[str, bytes] | None:
    """The files that these keys are; None where they cannot be file names in one directory."""
    files = {key: data for key, data in keys.items() if key and (key[-1] != "/" or data)}
    for key in files:
        parts = key.split("/")
        if {"", ".", ".."} & {*parts} or any(len(part.encode()) > 255 for part in parts):
            return None
        if any(other.startswith(f"{key}/") for other in files):
            return None
    return files


def demand_all_or_a_refusal(place: Path, server: Any, bucket: str, seeds: range) -> None:
    """Fetch each random set of keys, and demand that it is what the bucket holds, or refused for a key that is no file."""
    place.mkdir()
    (place / "recipe.toml").write_text(
        f'[stores.b]\nurl = "s3://{bucket}/x"\nendpoint = "{server.endpoint}"\n'
    )
    with Workspace.open(place) as ws:
        ends = [_of_set(ws, server.s3, bucket, seed) for seed in seeds]
    assert ends.count("fetched") > len(ends) / 4 and ends.count("refused") > len(ends) / 4, ends


def _of_set(ws: Workspace, s3: Any, bucket: str, seed: int) -> str:
    keys, folder = key_set(seed), f"set {seed}"
    for key, data in keys.items():
        with contextlib.suppress(s3.exceptions.ClientError):  # some servers take no such key
            s3.put_object(Bucket=bucket, Key=f"{folder}/{key}", Body=data)
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=f"{folder}/").get("Contents", ())
    there = [each["Key"].removeprefix(f"{folder}/") for each in listed]
    put = {key: keys[key] for key in there if key in keys}
    if len(put) < len(there):
        return ""  # a client or server that writes another key than it was given
    address = f"s3://{bucket}/{folder}/"
    expected = files_of(put)
    if not put or expected == {}:
        return ""
    try:
        arrived = fetch(ws, "s3", address, ask_identity(ws, "s3", address), ())
    except CannotRun as error:
        assert expected is None, (seed, put, str(error))
        assert "cannot be file names in one directory" in str(error), (seed, put, str(error))
        return "refused"
    else:
        assert expected == _files_below(arrived), (seed, put)
        return "fetched"


def _files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
