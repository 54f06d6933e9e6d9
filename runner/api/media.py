"""Media type of a file by name and content, and the training step in its path. Pure functions."""

from __future__ import annotations

import re
from typing import Final

HEAD: Final = 512
"""Number of leading bytes from which the type is detected."""
BYTES: Final = "application/octet-stream"
HTML: Final = "text/html"
SVG: Final = "image/svg+xml"
PARQUET: Final = "application/vnd.apache.parquet"
SAFETENSORS: Final = "application/vnd.safetensors"
PICTURES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
AUDIO: Final = frozenset({"audio/wav", "audio/mpeg", "audio/flac", "audio/ogg"})
TABLES: Final = frozenset({"text/csv", "text/tab-separated-values", "application/jsonl"})
_BY_SUFFIX: Final = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp", "svg": SVG,
    "wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg", "opus": "audio/ogg",
    "html": HTML, "htm": HTML, "xhtml": HTML, "md": "text/markdown", "json": "application/json",
    "csv": "text/csv", "tsv": "text/tab-separated-values", "jsonl": "application/jsonl", "ndjson": "application/jsonl",
    "parquet": PARQUET, "safetensors": SAFETENSORS,
    **dict.fromkeys(("txt", "log", "yaml", "yml", "toml", "ini", "cfg", "py", "sh", "diff", "patch"), "text/plain"),
}  # fmt: skip
_BY_HEAD: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"PAR1", PARQUET),
)
_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_MARKUP: Final = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype\s+)?(html|svg)\b", re.I | re.S
)
_STEP: Final = re.compile(
    r"(?:^|[^a-z])(?:global[-_]?step|step|steps|iter|iteration|checkpoint|ckpt|epoch|sample|samples)"
    r"[-_ =]*0*(\d{1,12})(?!\d)",
    re.I,
)


def type_of(path: str, head: bytes = b"") -> str:
    """Return the media type of a file.

    The content takes precedence over the name, so HTML in a file named `.png` is HTML. With an
    empty `head`, the name alone decides.
    """
    by_name = _type_by_name(path)
    if not head:
        return by_name or BYTES
    by_content = _type_by_content(head)
    if by_content:
        return by_content
    if by_name in PICTURES or by_name == PARQUET:
        return BYTES  # the content of such a file would have been detected
    if by_name:
        return by_name
    return "text/plain" if is_text(head) else BYTES


def _type_by_name(path: str) -> str:
    """Return the media type of a file name's suffix; empty if unknown."""
    _, dot, suffix = path.rpartition(".")
    return _BY_SUFFIX.get(suffix.lower(), "") if dot else ""


def _type_by_content(head: bytes) -> str:
    """Return the media type that the first bytes of a file show; empty if unknown."""
    markup = _MARKUP.match(head.removeprefix(b"\xef\xbb\xbf"))
    if markup:
        return SVG if markup[2].lower() == b"svg" else HTML
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    return next((kind for magic, kind in _BY_HEAD if head.startswith(magic)), "")


def is_text(data: bytes) -> bool:
    """Return True if the bytes look like readable text."""
    if b"\0" in data:
        return False
    wrong = data.decode("utf-8", "replace").count("\N{REPLACEMENT CHARACTER}")
    return wrong <= 1 + len(data) // 50  # the last character may be incomplete


def step_of(path: str) -> int | None:
    """Return the training step in a path, for example 250 in `samples/step-000250/cat.png`, or
    None.

    If several path components contain a step, the last one counts.
    """
    for part in reversed(path.split("/")):
        found = _STEP.findall(part)
        if found:
            return int(found[-1])
    return None
