"""`recipe pack`: print a dataset's content id, archive it in tar shards, or verify an archive.

`storage.content.packed` defines the formats.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...errors import NotFound
from ...language.inputs import BadValue, convert, kind_of, split_secrets
from ...language.recipe import Input
from ...language.units import about, count_text
from ...retry import backoff, retry
from ...storage.content import packed
from ...storage.content.files import Changed, Content, Entry, entries, scan
from ...storage.content.pack import Shard, shards
from ...storage.sources import ask_identity, fetch
from ...storage.workspace import Workspace, local_folder
from ...survey import input_manifests
from ..tail import canvas, safe_line
from .flags import JSON_HELP
from .targets import open_for_reading

TRIES = 3


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="Dataset: a directory, a file, or an s3://, gs://, hf:// or https:// address",
    )
    parser.add_argument(
        "--out",
        type=local_folder,
        metavar="DIR",
        help="Write a dataset archive to DIR: tar shards, manifest.json, SHA256SUMS",
    )
    parser.add_argument(
        "--verify",
        metavar="DIR|ID",
        help=(
            "Verify the archive in DIR. With PATH, list every difference between PATH and "
            "the archive in DIR, or the dataset ID"
        ),
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "The first output line is the dataset ID, which cache keys use. With -q, it is "
        "the only line.\n\n"
        "Examples:\n  recipe pack data/\n  recipe pack data/ --out packed/ && (cd packed "
        "&& sha256sum -c SHA256SUMS)\n  recipe pack --verify packed/\n  recipe pack data/ "
        "--verify packed/"
    )


def run(args: argparse.Namespace) -> int:
    if args.path is None and args.verify is None:
        raise NotFound("no path given", fix="pass a directory or a file: `recipe pack data/`")
    if args.verify is None:
        with Workspace.open(args.workspace) as ws:
            return _pack(ws, args)
    if args.out is not None:
        raise NotFound("--verify and --out exclude each other", fix="remove one of the two flags")
    with open_for_reading(args.workspace) as ws:
        if args.path is None:
            return _check(ws, args)
        return _compare(ws, args)


# -- packing ---------------------------------------------------------------------------------------


class _Pack(NamedTuple):
    """A dataset's content id, manifest and shards."""

    content: Content
    manifest: list[Entry]
    shards: list[Shard]


def _pack(ws: Workspace, args: argparse.Namespace) -> int:
    path = _fetch_dataset(ws, args)
    out = None if args.out is None else ws.absolute(args.location.typed(str(args.out)))
    _check_folders(ws, path, out)
    pack = retry(
        partial(_make_pack, ws, args, path, out),
        backoff(Changed, TRIES, 0.0, 0.0),
        on_retry=partial(_print_retry, args),
    )
    if pack.content[0] == "t":
        input_manifests.store_entries(ws, pack.content, pack.manifest)
    doubts = packed.doubts(pack.manifest)
    if args.json:
        _print_json(pack, doubts, out)
    else:
        _print_summary(args, pack, out)
    if args.quiet < 2:
        for doubt in doubts:
            print(f"recipe: warning: {safe_line(doubt)}", file=sys.stderr)
    return 0


def _check_folders(ws: Workspace, path: Path, out: Path | None) -> None:
    """Raise NotFound if the dataset contains the archive to write, or the store of recipe."""
    if out is not None and path in (out, *out.parents):
        message = f"{out} is inside the directory to pack"
        raise NotFound(message, fix="write the pack outside that directory")
    if path in ws.home.parents:
        message = f"{path} contains {ws.home}, which changes while recipe runs"
        raise NotFound(message, fix="pass the data directory only")


def _make_pack(ws: Workspace, args: argparse.Namespace, path: Path, out: Path | None) -> _Pack:
    """Hash the dataset, and write its archive to `out` if given.

    Raises Changed if the dataset changes meanwhile.
    """
    with ProgressBar(args, "hashing") as bar:
        ws.cache.progress = bar
        content, manifest = _read_manifest(ws, path)
    ws.save_cache()
    pack = _Pack(content, manifest, shards(manifest))
    if out is not None:
        root = path if content[0] == "t" else path.resolve().parent
        with ProgressBar(args, "writing") as bar:
            packed.write(str(root), content, manifest, out, bar)
    return pack


def _print_retry(args: argparse.Namespace, error: Exception) -> None:
    if args.quiet < 2:
        print(f"recipe: {error}; trying again", file=sys.stderr)


def _fetch_dataset(ws: Workspace, args: argparse.Namespace) -> Path:
    """Return the dataset's path; for an address, download its current version unless it is stored.

    Raises NotFound.
    """
    path = ws.absolute(args.location.typed(args.path))
    if path.exists():
        return path
    if "://" not in args.path:
        raise NotFound(f"{args.path} does not exist", fix="pass an existing directory or file")

    given = _address(args.path)
    kind = kind_of(given)
    address, _ = split_secrets(given)
    ws.addresses[address] = given
    identity = ask_identity(ws, kind, address)
    if not args.quiet and not args.json:
        print(
            f"recipe: {safe_line(address)} will be downloaded into this workspace, unless it is already there",
            file=sys.stderr,
        )
    return fetch(ws, kind, address, identity, ())


def _address(word: str) -> str:
    """Return an address in the form that inputs of type `dataset` accept.  Raises NotFound."""
    try:
        return str(convert(Input("dataset", "dataset"), word))
    except BadValue as error:
        raise NotFound(f"{word} {error.message}", fix=error.fix) from error


def _read_manifest(ws: Workspace, path: Path) -> tuple[Content, list[Entry]]:
    """Return the content id and manifest of `path`; only files that may have changed are hashed.

    Raises Changed if the file disappears.
    """
    if path.is_dir():
        manifest = ws.cache.entries(str(path))
        return packed.content_of(manifest, "t"), manifest
    content = ws.cache.content_of(str(path))
    if content is None or content[0] == "t":
        raise Changed(str(path))
    return content, packed.file_manifest(path.resolve().name, content, path.stat().st_size)


def _print_summary(args: argparse.Namespace, pack: _Pack, out: Path | None) -> None:
    print(pack.content)
    if args.quiet:
        return
    sizes = _file_sizes(pack)
    files, cut = _format_count(len(sizes), "file"), _format_count(len(pack.shards), "shard")
    written = f", written to {safe_line(str(args.out))}" if out else ""
    print(f"{files}, {about(sum(sizes))}, in {cut}{written}")
    for shard in pack.shards:
        count = _format_count(len(shard.entries), "entry", "entries")
        first = safe_line(shard.entries[0].path)
        print(f"  {shard.name[:12]}  {about(shard.size):>8}  {count:>14}  from {first}")


def _print_json(pack: _Pack, doubts: Sequence[str], out: Path | None) -> None:
    sizes = _file_sizes(pack)
    parts = [
        {
            "name": shard.name,
            "size": shard.size,
            "entries": len(shard.entries),
            "first": shard.entries[0].path,
        }
        for shard in pack.shards
    ]
    place = None if out is None else str(out)
    facts = {
        "id": pack.content,
        "files": len(sizes),
        "bytes": sum(sizes),
        "entries": len(pack.manifest),
        "shards": parts,
        "warnings": list(doubts),
        "out": place,
    }
    print(json.dumps(facts, indent=2))


def _file_sizes(pack: _Pack) -> list[int]:
    """Return the sizes of the files, without directories and links."""
    return [entry.size for entry in pack.manifest if entry.kind in "fx"]


def _format_count(count: int, noun: str, plural: str = "") -> str:
    return count_text(count, noun, plural, form=",")


# -- checking --------------------------------------------------------------------------------------


def _check(ws: Workspace, args: argparse.Namespace) -> int:
    """Verify an archive against its own manifest; return 1 if it has faults."""
    folder = ws.absolute(args.location.typed(args.verify))
    pack = packed.read(folder)
    with ProgressBar(args, "checking") as bar:
        faults = list(packed.faults(folder, pack, bar))
    if args.json:
        print(json.dumps({"id": pack.content, "ok": not faults, "faults": faults}, indent=2))
        return 1 if faults else 0
    for fault in faults:
        print(safe_line(fault))
    if not faults and not args.quiet:
        entry_count = _format_count(len(pack.manifest), "entry", "entries")
        shard_count = _format_count(len(pack.shards), "shard")
        print(f"{pack.content} is intact: {entry_count} in {shard_count}")
    return 1 if faults else 0


def _compare(ws: Workspace, args: argparse.Namespace) -> int:
    """Compare a dataset with an archive or an id; return 1 if they differ."""
    path = _fetch_dataset(ws, args)
    expected, before = _expected_content(ws, args)
    content, now = _read_uncached(path, before)
    is_equal = content == expected
    differences: list[tuple[str, str]] = []
    if not is_equal and before is not None:
        differences = packed.differences(before, now)
    if args.json:
        rows = None
        if before is not None:
            rows = [{"what": what, "path": name} for what, name in differences]
        facts = {
            "id": content,
            "expected": expected,
            "ok": is_equal,
            "differences": rows,
        }
        print(json.dumps(facts, indent=2))
        return 0 if is_equal else 1
    for what, name in differences:
        print(f"{what:<8} {safe_line(name)}")
    if is_equal:
        if not args.quiet:
            print(f"{safe_line(args.path)} is {content}")
        return 0
    print(f"{safe_line(args.path)} is {content}, not {expected}", file=sys.stderr)
    if before is None and expected[0] == "t":
        print(
            "  the earlier version's file list is not stored here, so the changed files cannot be named",
            file=sys.stderr,
        )
    return 1


def _read_uncached(path: Path, before: Sequence[Entry] | None) -> tuple[Content, list[Entry]]:
    """Return the content id and manifest of `path`, and hash each file anew.

    A single file gets its name in the manifest `before`, so that only its content is compared.
    """
    if path.is_dir():
        manifest = entries(path)
        return packed.content_of(manifest, "t"), manifest
    content = scan(path)
    name = before[0].path if before else path.name
    return content, packed.file_manifest(name, content, path.stat().st_size)


def _expected_content(
    ws: Workspace, args: argparse.Namespace
) -> tuple[Content, list[Entry] | None]:
    """Return the expected content id, and its manifest or None if it is not stored here."""
    word = args.verify
    if not re.fullmatch(r"[fxt]:[0-9a-f]{64}", word):
        pack = packed.read(ws.absolute(args.location.typed(word)))
        return pack.content, pack.manifest
    # A single file has no manifest: its content id is that of its bytes.
    manifest = input_manifests.load_entries(ws, word) if word[0] == "t" else None
    return Content(word), manifest


# -- progress --------------------------------------------------------------------------------------


class ProgressBar:
    """A progress bar with speed and remaining time; prints nothing without a terminal."""

    def __init__(self, args: argparse.Namespace, what: str) -> None:
        self._what = what
        is_unwanted = args.quiet or os.environ.get("TERM") == "dumb"
        self._on = sys.stderr.isatty() and not is_unwanted
        self._begun = self._last = time.monotonic()
        self._drawn = False

    def __enter__(self) -> Callable[[int, int], None]:
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=canvas(sys.stderr), flush=True)

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._on or now - self._last < 0.1:
            return
        self._last = now
        rate = done / max(now - self._begun, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        print(
            f"\r{self._what} {about(done)} of {about(total)}, {about(int(rate))}/s{left}\x1b[K",
            end="",
            file=canvas(sys.stderr),
            flush=True,
        )
        self._drawn = True
