"""Current list prices of Compute Engine, downloaded from the gpuhunt catalog to a file of this
installation.

dstack publishes the catalog each day for its client gpuhunt (https://github.com/dstackai/gpuhunt).
`gcp/version` names the newest version, and `gcp/VERSION/catalog.zip` contains `gcp.csv`.  The
client itself is not used, because it installs packages called `tests` and `resources`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from .base import Rejected, Unreachable
from .gcp_prices import SHAPES, SHIPPED, T4, V100, PriceList, Rate
from .installation import Installation
from .web import price

CATALOG: Final = "https://dstack-gpu-pricing.s3.eu-west-1.amazonaws.com/v3"
PATIENCE: Final = 30.0
"""Network timeout of the download in seconds."""
LARGEST: Final = 64 << 20
"""Maximum size in bytes of the catalog and of its table."""
_ATTACHED: Final = {"T4": T4, "V100": V100}


def file_of(installation: Installation) -> Path:
    """Return the path of the downloaded price list."""
    return installation.folder / "gcp-prices.json"


def latest(file: Path) -> PriceList:
    """Return the downloaded price list, or the shipped list if it is newer or the only one."""
    try:
        found = _read_prices(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return SHIPPED
    if found.date < SHIPPED.date or not any(found.rates.values()):
        return SHIPPED
    return found


def _read_prices(kept: Any) -> PriceList:
    """Parse the downloaded price list, without machine shapes that are unknown or lack a price.

    Raises ValueError, TypeError, KeyError, AttributeError or IndexError for anything else.
    """
    rates: dict[str, dict[str, Rate]] = {}
    for region, listed in kept["rates"].items():
        of_region = rates.setdefault(str(region), {})
        for name, each in listed.items():
            if name not in SHAPES:
                continue
            on_demand = price(each[0])
            if not on_demand:
                continue
            spot = price(each[1])
            if spot:
                of_region[name] = Rate(on_demand, spot)
    return PriceList(str(kept["date"]), rates)


def update(file: Path) -> PriceList:
    """Download the newest price list to `file`.

    Raises Unreachable if the catalog cannot be downloaded, Rejected if it lists none of the
    supported machines.
    """
    base = os.environ.get("GPUHUNT_CATALOG_URL", CATALOG).rstrip("/")
    try:
        with httpx.Client(timeout=PATIENCE) as client:
            version = _read(client, f"{base}/gcp/version").decode("ascii").strip()
            if not re.fullmatch(r"[\w.-]{1,64}", version):
                raise ValueError("it names no version")
            data = _read(client, f"{base}/gcp/{version}/catalog.zip")
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open("gcp.csv") as table:
            rates = rates_of(csv.DictReader(io.StringIO(table.read(LARGEST).decode("utf-8"))))
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        zipfile.BadZipFile,
        csv.Error,
        KeyError,
        ValueError,
        NotImplementedError,
    ) as error:
        raise Unreachable(
            f"cannot read the price catalog at {base}: {error or type(error).__name__}"
        ) from error
    if not rates:
        raise Rejected(
            f"the price catalog at {base} has no prices for the supported machine types; keeping the earlier prices"
        )
    found = PriceList(f"{datetime.now(UTC):%Y-%m-%d}", rates)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps(found._asdict()) + "\n", "utf-8")
    new.replace(file)
    return found


def rates_of(rows: Iterable[Mapping[str, str]]) -> dict[str, dict[str, Rate]]:
    """Return the rates by region and machine shape from catalog rows.

    The most expensive zone of a region counts. A shape without one of its two prices is left out,
    but a spot-only shape needs only the spot price. Raises KeyError, ValueError.
    """
    seen: dict[tuple[str, str], dict[bool, float]] = {}
    for row in rows:
        name, count = row["instance_name"], int(row["gpu_count"] or 0)
        usd = float(row["price"])
        gpu = _ATTACHED.get(row["gpu_name"])
        if gpu is not None:
            name = f"{name}+{count}x{gpu}"
        if name not in SHAPES or SHAPES[name].gpus != count:
            continue
        # Rows with flags are for clients that ask for these machines.
        if row.get("flags") or not price(usd):
            continue
        prices = seen.setdefault((row["location"].rpartition("-")[0], name), {})
        sold_spot = row["spot"].lower() == "true"
        prices[sold_spot] = max(usd, prices.get(sold_spot, 0.0))
    rates: dict[str, dict[str, Rate]] = {}
    for (region, name), prices in sorted(seen.items()):
        spot, on_demand = prices.get(True), prices.get(False)
        if on_demand is None and SHAPES[name].spot_only:
            on_demand = spot
        if spot is not None and on_demand is not None:
            rates.setdefault(region, {})[name] = Rate(round(on_demand, 5), round(spot, 5))
    return rates


def _read(client: httpx.Client, url: str) -> bytes:
    found = bytearray()
    with client.stream("GET", url) as reply:
        reply.raise_for_status()
        for data in reply.iter_bytes():
            found += data
            if len(found) > LARGEST:
                raise ValueError(f"it has more than {LARGEST >> 20} MB")
    return bytes(found)
