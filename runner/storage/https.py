"""What a server of https says of a file, asked by its first byte: an address that is signed is signed for GET alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from fsspec.implementations.http import HTTPFileSystem

_RANGE: Final = re.compile(r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]+)")
_EMPTY: Final = 416


class Answer(NamedTuple):
    """The size of a file, and what changes when it does."""

    size: int | None
    version: str


def first_byte(store: HTTPFileSystem, address: str) -> Answer:
    """What the server says of a file.  Raises what the client raises: `aiohttp.ClientResponseError` has the `status`."""
    from fsspec.asyn import sync

    return Answer(*sync(store.loop, _first_byte, store, address))


async def _first_byte(store: HTTPFileSystem, address: str) -> Answer:
    session = await store.set_session()
    async with session.get(store.encode_url(address), headers={"Range": "bytes=0-0", "Accept-Encoding": "identity"}) as answer:
        if answer.status != _EMPTY:
            answer.raise_for_status()
        headers = answer.headers
        whole = _RANGE.fullmatch(headers.get("Content-Range", ""))
        size = whole[1] if whole else headers.get("Content-Length") if answer.status == 200 and not headers.get("Content-Encoding") else None
        return Answer(int(size) if size is not None else None, str(headers.get("ETag") or headers.get("Last-Modified")))
