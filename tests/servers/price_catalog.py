"""A mirror of the catalog of list prices that gpuhunt reads."""

from __future__ import annotations

import csv
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COLUMNS = (
    "instance_name",
    "location",
    "price",
    "cpu",
    "memory",
    "gpu_count",
    "gpu_name",
    "gpu_memory",
    "spot",
    "disk_size",
    "gpu_vendor",
    "flags",
)
VERSION = "20991231-1"


def row(
    name: str, zone: str, price: float, gpu: str, *, count: int = 1, spot: bool = False
) -> dict[str, str]:
    return dict(
        zip(
            COLUMNS,
            (
                name,
                zone,
                str(price),
                "8",
                "32.0",
                str(count),
                gpu,
                "24.0",
                str(spot),
                "",
                "nvidia",
                "",
            ),
            strict=True,
        )
    )


def both(
    name: str, zone: str, gpu: str, on_demand: float, spot: float, count: int = 1
) -> list[dict[str, str]]:
    return [
        row(name, zone, on_demand, gpu, count=count),
        row(name, zone, spot, gpu, count=count, spot=True),
    ]


@contextmanager
def mirror(folder: Path) -> Iterator[str]:
    """The address of a server of `folder`, in which nothing is published yet."""
    (folder / "gcp" / VERSION).mkdir(parents=True)
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def publish(folder: Path, rows: Iterable[dict[str, str]] | None) -> None:
    """Publish a table; None: the one that is in the folder already."""
    if rows is not None:
        with (folder / "gcp.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    with zipfile.ZipFile(folder / "gcp" / VERSION / "catalog.zip", "w") as archive:
        archive.write(folder / "gcp.csv", "gcp.csv")
    (folder / "gcp" / "version").write_text(f"{VERSION}\n")
