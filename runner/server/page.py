"""Static files of the web page. The page loads its data from /v1 with the reader's token."""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..interface.page import HERE, bundle

router = APIRouter(include_in_schema=False)

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:;"
    " media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}


def _text(name: str) -> str:
    return (HERE / name).read_text("utf-8")


_MADE: Final[Mapping[str, Callable[[], str]]] = {
    "app.html": functools.partial(_text, "app.html"),
    "icon.svg": functools.partial(_text, "icon.svg"),
    "app.css": functools.partial(
        bundle.style,
        "vendor/uPlot.min.css",
        "base.css",
        "app.css",
        "outputs.css",
        "start.css",
        "machines.css",
    ),
    "libraries.js": bundle.libraries,
    "app.js": functools.partial(bundle.script, "app"),
    "licences.txt": bundle.licences,
}
PARTS: Final[Mapping[str, str]] = {
    "/": "app.html",
    **{f"/page/{name}": name for name in _MADE if name != "app.html"},
}
"""File name by URL path."""


class StaticFile(NamedTuple):
    """A static file: content, gzip-compressed content, and ETag."""

    data: bytes
    packed: bytes
    tag: str


@functools.cache
def _file(name: str) -> StaticFile:
    data = _MADE[name]().encode()
    return StaticFile(
        data, gzip.compress(data, 9, mtime=0), f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    )


def part(request: Request) -> Response:
    """Return a file of the page, or status 304 if the browser has the current version."""
    name = PARTS[request.url.path]
    file, kind = _file(name), _TYPES[name.rpartition(".")[2]]
    headers = {
        "content-security-policy": _POLICY,
        "cache-control": "no-cache",
        "etag": file.tag,
        "vary": "accept-encoding",
    }
    known = (
        each.strip().removeprefix("W/")
        for each in request.headers.get("if-none-match", "").split(",")
    )
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    data = file.data
    if accepts_gzip(request):
        data = file.packed
        headers["content-encoding"] = "gzip"
    return Response(data, media_type=f"{kind}; charset=utf-8", headers=headers)


SMALL: Final = 1024
"""Responses below this size in bytes are not compressed."""


def accepts_gzip(request: Request) -> bool:
    """Return True if the client accepts gzip compression."""
    for offered in request.headers.get("accept-encoding", "").split(","):
        word, _, quality = offered.partition(";")
        if word.strip().lower() == "gzip" and quality.replace(" ", "") not in ("q=0", "q=0.0"):
            return True
    return False


def compressed_response(request: Request, text: str, media_type: str) -> Response:
    """Return a text response, compressed if it is large and the client accepts gzip."""
    data, headers = text.encode(), {"vary": "accept-encoding"}
    if len(data) >= SMALL and accepts_gzip(request):
        # The fastest level compresses JSON lines to a third, in a tenth of the time of the best
        # level.
        data, headers["content-encoding"] = gzip.compress(data, 1, mtime=0), "gzip"
    return Response(data, media_type=media_type, headers=headers)


for _path in PARTS:
    router.add_api_route(_path, part, methods=["GET"])
