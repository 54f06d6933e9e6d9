"""File downloads with optional byte ranges, sent as attachments that browsers do not display."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO, Final
from urllib.parse import quote

from fastapi.responses import StreamingResponse

from .answers import Refused

PIECE: Final = 1 << 18
_RANGE: Final = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")


def parse_range(asked: str, size: int) -> tuple[int, int] | None:
    """Parse a Range header to start and end offset, or None for the whole file.

    Raises Refused for several ranges, and for a range after the end of the file.
    """
    if not asked:
        return None
    found = _RANGE.fullmatch(asked.replace(" ", ""))
    if found is not None and found[3]:
        begin, end = max(0, size - int(found[3])), size
    elif found is not None:
        begin, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    if found is None or begin >= min(end, size):
        raise Refused(
            416,
            "bad-range",
            f"only one byte range below {size} is supported",
            "for example `Range: bytes=0-1023`",
        )
    return begin, end


def file_response(
    file: BinaryIO, asked: str, name: str, kind: str, *, tag: str = "", offset: int = 0
) -> StreamingResponse:
    """Return a response with the requested range of a file, or with its content from `offset`.

    Sending the response closes the file.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        part = parse_range(asked, size)
    except Refused:
        file.close()
        raise
    begin, end = part or (min(offset, size), size)
    headers = {
        "content-length": str(end - begin),
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
    }
    headers |= {"content-range": f"bytes {begin}-{end - 1}/{size}"} if part is not None else {}
    headers |= {"etag": f'"{tag}"'} if tag else {}
    return StreamingResponse(
        _pieces(file, begin, end), 206 if part is not None else 200, headers, kind
    )


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(begin)
        while begin < end and (data := file.read(min(PIECE, end - begin))):
            begin += len(data)
            yield data
