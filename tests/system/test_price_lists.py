"""Prices of a provider that publishes a list: fetched from a catalog, kept, and believed until a newer one comes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers import gcp_catalog
from drivers.base import Unreachable
from drivers.gcp_prices import SHIPPED, T4, Rate
from tests.fake_provider import Provider, provider
from tests.rented import rents
from tests.servers.price_catalog import VERSION, both, mirror, publish, row
from tests.support import Space
from tests.tools import client

DUMP = """
import sys
from gpuhunt import AcceleratorVendor, CatalogItem
from gpuhunt._internal import storage
storage.dump([CatalogItem("gcp", "g2-standard-4", "us-east1-b", price, 4, 16.0, 1, "L4", 24.0, spot, None, AcceleratorVendor.NVIDIA)
              for price, spot in ((0.5, False), (0.25, True))], sys.argv[1])
"""


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a mirror of the catalog."""
    with mirror(tmp_path / "mirror") as url:
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
        yield tmp_path / "mirror"


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with provider("gcp", "--hosts", "none") as found:
        yield found


def test_offers_go_by_the_list_that_was_fetched_until_a_release_brings_a_newer_one(
    space: Space, market: Provider, catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "gcp")
    publish(catalog, both("g2-standard-4", "us-east1-b", "L4", 0.5, 0.25))
    code, out, said = space.command("offers", "--driver", "gcp", "--update", "--json")
    assert (
        code == 0
        and "recipe: gcp: list prices of " in said
        and said.rstrip().endswith(", of us-east1")
    )
    found = json.loads(out)[0]["offers"]
    assert (
        found
        and {each["region"] for each in found} == {"us-east1"}
        and all("/g2-standard-4" in each["id"] for each in found)
    )
    later = json.loads(space.command("offers", "--driver", "gcp", "--json")[1])[0]["offers"]
    assert [each["id"] for each in later] == [
        each["id"] for each in found
    ]  # another process, without --update
    file = Path(os.environ["XDG_CONFIG_HOME"], "recipe", "gcp-prices.json")
    assert gcp_catalog.latest(file).rates == {"us-east1": {"g2-standard-4": Rate(0.5, 0.25)}}
    kept = json.loads(file.read_text())
    for text in (
        json.dumps(kept | {"date": "2020-01-01"}),
        "[",
        '{"date": "2999-01-01", "rates": {}}',
        '{"date": "2999-01-01", "rates": {"r": {"g2-standard-4": 1}}}',
    ):
        file.write_text(text)
        assert gcp_catalog.latest(file) is SHIPPED


def test_a_catalog_that_cannot_be_had_leaves_the_prices_as_they_are(
    space: Space, market: Provider, catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "gcp")
    code, _, said = space.command("offers", "--driver", "gcp", "--update")
    assert (
        code == 5
        and "Client error '404" in said
        and "without `--update`" in said
        and "Traceback" not in said
    )
    publish(catalog, both("some-other-machine", "us-east1-b", "L4", 0.5, 0.25))
    code, _, said = space.command("offers", "--driver", "gcp", "--update")
    assert code == 5 and "has no prices for the supported machine types" in said
    for name, data in (
        ("version", b"../../x"),
        ("version", b"\xff"),
        (f"{VERSION}/catalog.zip", b"<html>"),
        (f"{VERSION}/catalog.zip", b""),
    ):
        publish(catalog, [])
        (catalog / "gcp" / name).write_bytes(data)
        with pytest.raises(Unreachable, match="cannot read"):
            gcp_catalog.update(catalog / "prices.json")
    publish(catalog, [row("g2-standard-4", "us-east1-b", 1.0, "L4") | {"price": "?"}])
    with pytest.raises(Unreachable, match="cannot read"):
        gcp_catalog.update(catalog / "prices.json")
    assert (
        not (catalog / "prices.json").exists()
        and space.command("offers", "--driver", "gcp")[0] == 0
    )


def test_a_provider_that_is_asked_each_time_has_no_list_to_update(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "key")
    code, _, said = space.command("offers", "--driver", "vastai", "--update")
    assert code == 2 and "has no price list to update" in said


def test_what_a_catalog_says_becomes_rates_by_region() -> None:
    rows = [
        *both("g2-standard-4", "us-east1-b", "L4", 0.5, 0.25), *both("g2-standard-4", "us-east1-c", "L4", 0.6, 0.2),  # the dearer zone counts
        *both("n1-standard-8", "us-west1-a", "T4", 0.7, 0.3), *both("n1-standard-16", "us-west1-a", "T4", 1.4, 0.6),  # no shape of ours
        row("a3-highgpu-1g", "us-west1-a", 3.0, "H100", spot=True),  # sold on the spot market alone
        row("g2-standard-8", "us-west1-a", 0.9, "L4"),  # its spot price is missing
        *both("g2-standard-12", "us-west1-a", "L4", float("nan"), 0.1), *both("g2-standard-16", "us-west1-a", "L4", 0.0, 0.0),
        *(each | {"flags": "gcp-new"} for each in both("g2-standard-32", "us-west1-a", "L4", 2.0, 1.0)),  # for clients that ask for it
    ]  # fmt: skip
    assert gcp_catalog.rates_of(rows) == {
        "us-east1": {"g2-standard-4": Rate(0.6, 0.25)},
        "us-west1": {f"n1-standard-8+1x{T4}": Rate(0.7, 0.3), "a3-highgpu-1g": Rate(3.0, 3.0)},
    }


def test_a_table_that_gpuhunt_itself_wrote_is_read(catalog: Path) -> None:
    subprocess.run([client("gpuhunt"), "-c", DUMP, catalog / "gcp.csv"], check=True)
    publish(catalog, None)
    assert gcp_catalog.update(catalog / "prices.json").rates == {
        "us-east1": {"g2-standard-4": Rate(0.5, 0.25)}
    }
