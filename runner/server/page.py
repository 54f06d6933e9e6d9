"""The page that shows runs in a browser: fixed files without any data.  What they show they ask of /v1, with the token of the reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..interface.page import HERE

router = APIRouter(include_in_schema=False)

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_NAMES: Final = (
    "report.css",
    "ui.css",
    "uPlot.min.css",
    "uPlot.iife.min.js",
    "curves.js",
    "shown.js",
    "ui.js",
    "icon.svg",
)
PARTS: Final[Mapping[str, str]] = {"/": "ui.html", **{f"/page/{name}": name for name in _NAMES}}
"""The files by their addresses."""


def part(request: Request) -> Response:
    """One file of the page."""
    name = PARTS[request.url.path]
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(
        (HERE / name).read_bytes(),
        media_type=f"{kind}; charset=utf-8",
        headers={"content-security-policy": _POLICY},
    )


for _path in PARTS:
    router.add_api_route(_path, part, methods=["GET"])
