"""Answer requests about files of a root, one at a time. `attach` starts this program as `files`.

A request is a frame `q` with JSON `[sender, function, arguments…]`, then frames `d` with bytes,
then an empty frame. The answer is frames `d` with bytes, then `r` with the JSON result, or `e` with
the kind of error and a message.
"""

from __future__ import annotations

import os

from . import attempts, neighbours, objects, pulling
from .frames import BadFrame
from .request import AgentRequest, Over

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTIONS: dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        *(
            objects.adopt,
            objects.alike,
            objects.base,
            objects.batch,
            objects.begin,
            objects.chunks,
            objects.delete,
            objects.free,
            objects.have,
        ),
        *(
            objects.listing,
            objects.place_files,
            objects.place_tree,
            objects.retract,
            objects.seals,
            objects.survey,
            objects.write,
        ),
        *(
            attempts.clear,
            attempts.keep,
            attempts.look,
            attempts.matching,
            attempts.note,
            attempts.read,
            attempts.release,
            attempts.remains,
        ),
        *(attempts.remove, attempts.send, attempts.stage, attempts.take),
        *(neighbours.draw, neighbours.meet, neighbours.same, pulling.pull, pulling.settle),
    )
}
FOLDERS = ("attempts", "objects", "partial", "pieces", "seals", "states", "used")


def serve(root: str) -> None:
    """Answer file requests until the client disconnects."""
    for name in FOLDERS:
        os.makedirs(name, exist_ok=True)
    os.umask(0o022)
    request = AgentRequest(root, boot())
    while True:
        try:
            name, arguments = request.begin()
            os.chdir(root)
            try:
                request.end(b"r", FUNCTIONS[name](request, *arguments))
            except objects.ObjectGone:
                request.end(b"e", ["gone", ""])
            except OSError as error:
                words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                request.end(b"e", ["failed", words])
            except ValueError as error:
                request.end(b"e", ["failed", f"{name}: {error}"])
        except (Over, BadFrame, BrokenPipeError):
            return


def boot() -> str:
    """Return an ID of this machine's current boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        import subprocess

        said = subprocess.run(
            ["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False
        )
        return said.stdout.strip() or "unknown"
