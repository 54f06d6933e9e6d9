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
from pathlib import Path

from ...errors import NotFound
from ...language.inputs import BadValue, convert, kind_of, split_secrets
from ...language.recipe import Input
from ...language.units import about
from ...retry import backoff, retry
from ...storage.content import packed
from ...storage.content.files import Changed, Content, Entry, entries, scan
from ...storage.content.pack import Shard, shards
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
        return _check(ws, args) if args.path is None else _compare(ws, args)


# -- packing -----------------------------------------------------------------------------------------------------------------------------------------


def _pack(ws: Workspace, args: argparse.Namespace) -> int:
    path = _fetch_dataset(ws, args)
    out = None if args.out is None else ws.absolute(args.location.typed(str(args.out)))
    if out is not None and (out == path or path in out.parents):
        raise NotFound(
            f"{out} is inside the directory to pack", fix="write the pack outside that directory"
        )
    if path in ws.home.parents:
        raise NotFound(
            f"{path} contains {ws.home}, which changes while recipe runs",
            fix="pass the data directory only",
        )

    def pack() -> tuple[Content, list[Entry], list[Shard]]:
        with Bar(args, "hashing") as bar:
            ws.cache.progress = bar
            content, manifest = _read_manifest(ws, path)
        ws.save_cache()
        cut = shards(manifest)
        if out is not None:
            with Bar(args, "writing") as bar:
                root = str(path) if content[0] == "t" else str(path.resolve().parent)
                packed.write(root, content, manifest, out, bar)
        return content, manifest, cut

    def once_more(error: Exception) -> None:
        if args.quiet < 2:
            print(f"recipe: {error}; trying again", file=sys.stderr)

    content, manifest, cut = retry(pack, backoff(Changed, TRIES, 0.0, 0.0), on_retry=once_more)
    if content[0] == "t":
        input_manifests.store_entries(ws, content, manifest)
    doubts = packed.doubts(manifest)
    if args.json:
        _print_json(content, manifest, cut, doubts, out)
    else:
        _print_summary(args, content, manifest, cut, out)
    if args.quiet < 2:
        for doubt in doubts:
            print(f"recipe: warning: {safe_line(doubt)}", file=sys.stderr)
    return 0


def _fetch_dataset(ws: Workspace, args: argparse.Namespace) -> Path:
    """Return the dataset's path; download the current version of an address unless already here.

    Raises NotFound.
    """
    path = ws.absolute(args.location.typed(args.path))
    if path.exists():
        return path
    if "://" not in args.path:
        raise NotFound(f"{args.path} does not exist", fix="pass an existing directory or file")
    from ...storage.sources import ask, fetch

    given = _address(args.path)
    kind, (address, _) = kind_of(given), split_secrets(given)
    ws.addresses[address] = given
    identity = ask(ws, kind, address)
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


def _print_summary(
    args: argparse.Namespace,
    content: Content,
    manifest: Sequence[Entry],
    cut: Sequence[Shard],
    out: Path | None,
) -> None:
    print(content)
    if args.quiet:
        return
    files = [entry.size for entry in manifest if entry.kind in "fx"]
    print(
        f"{_format_count(len(files), 'file')}, {about(sum(files))}, in {_format_count(len(cut), 'shard')}"
        + (f", written to {safe_line(str(args.out))}" if out else "")
    )
    for shard in cut:
        count, first = _format_count(len(shard.entries), "entry", "entries"), shard.entries[0].path
        print(f"  {shard.name[:12]}  {about(shard.size):>8}  {count:>14}  from {safe_line(first)}")


def _print_json(
    content: Content,
    manifest: Sequence[Entry],
    cut: Sequence[Shard],
    doubts: Sequence[str],
    out: Path | None,
) -> None:
    files = [entry.size for entry in manifest if entry.kind in "fx"]
    facts = {
        "id": content,
        "files": len(files),
        "bytes": sum(files),
        "entries": len(manifest),
        "shards": [
            {
                "name": shard.name,
                "size": shard.size,
                "entries": len(shard.entries),
                "first": shard.entries[0].path,
            }
            for shard in cut
        ],
        "warnings": list(doubts),
        "out": None if out is None else str(out),
    }
    print(json.dumps(facts, indent=2))


def _format_count(count: int, word: str, plural: str = "") -> str:
    return f"{count:,} {word if count == 1 else plural or word + 's'}"


# -- checking ----------------------------------------------------------------------------------------------------------------------------------------


def _check(ws: Workspace, args: argparse.Namespace) -> int:
    """Verify an archive against its own manifest; return 1 if it has faults."""
    folder = ws.absolute(args.location.typed(args.verify))
    pack = packed.read(folder)
    with Bar(args, "checking") as bar:
        wrong = list(packed.faults(folder, pack, bar))
    if args.json:
        print(json.dumps({"id": pack.content, "ok": not wrong, "faults": wrong}, indent=2))
    else:
        for fault in wrong:
            print(safe_line(fault))
        if not wrong and not args.quiet:
            print(
                f"{pack.content} is intact: {_format_count(len(pack.manifest), 'entry', 'entries')} in {_format_count(len(pack.shards), 'shard')}"
            )
    return 1 if wrong else 0


def _compare(ws: Workspace, args: argparse.Namespace) -> int:
    """Compare a dataset with an archive or an id; return 1 if they differ."""
    path = _fetch_dataset(ws, args)
    wanted, before = _expected_content(ws, args)
    if path.is_dir():
        now = entries(path)
        content = packed.content_of(now, "t")
    else:
        content = scan(path)
        now = packed.file_manifest(
            before[0].path if before else path.name, content, path.stat().st_size
        )
    differ = [] if content == wanted or before is None else packed.differences(before, now)
    if args.json:
        rows = [{"what": what, "path": name} for what, name in differ]
        print(
            json.dumps(
                {
                    "id": content,
                    "expected": wanted,
                    "ok": content == wanted,
                    "differences": rows if before is not None else None,
                },
                indent=2,
            )
        )
        return 0 if content == wanted else 1
    for what, name in differ:
        print(f"{what:<8} {safe_line(name)}")
    if content == wanted:
        if not args.quiet:
            print(f"{safe_line(args.path)} is {content}")
        return 0
    print(f"{safe_line(args.path)} is {content}, not {wanted}", file=sys.stderr)
    if before is None and wanted[0] == "t":
        print(
            "  the earlier version's file list is not stored here, so the changed files cannot be named",
            file=sys.stderr,
        )
    return 1


def _expected_content(
    ws: Workspace, args: argparse.Namespace
) -> tuple[Content, list[Entry] | None]:
    """Return the expected content id, and its manifest or None if it is not stored here."""
    word = args.verify
    if re.fullmatch(r"[fxt]:[0-9a-f]{64}", word):
        return Content(word), input_manifests.load_entries(ws, word) if word[0] == "t" else None
    pack = packed.read(ws.absolute(args.location.typed(word)))
    return pack.content, pack.manifest


# -- progress ----------------------------------------------------------------------------------------------------------------------------------------


class Bar:
    """A progress bar with speed and remaining time; prints nothing without a terminal."""

    def __init__(self, args: argparse.Namespace, what: str) -> None:
        self._what = what
        self._on = sys.stderr.isatty() and not args.quiet and os.environ.get("TERM") != "dumb"
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
