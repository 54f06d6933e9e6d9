"""Where a model that a step was given comes from: its name and commit on the Hub, and its licence.  Reads $RECIPE_SOURCES and model cards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

# Of bases that come without their card.
LICENCES = {
    "black-forest-labs/FLUX.1-dev": {
        "license": "other", "license_name": "flux-1-dev-non-commercial-license",
        "license_link": "https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md",
    },
    "black-forest-labs/FLUX.1-schnell": {"license": "apache-2.0"},
    "stabilityai/stable-diffusion-xl-base-1.0": {"license": "openrail++"},
}  # fmt: skip
LICENCE_FIELDS = ("license", "license_name", "license_link")  # as a model card's header calls them


class Origin(NamedTuple):
    """A model's name for people, and what the Hub knows it by."""

    name: str  # org/name, another address, or the name of a folder; never a path
    hub: str  # org/name where it is from the Hub, else empty
    revision: str  # its commit there, else empty


def origin_of(folder: Path) -> Origin:
    """Where the model at this path of a step comes from."""
    source = json.loads(os.environ.get("RECIPE_SOURCES", "{}")).get(str(folder))
    if source is None:
        return Origin(folder.name, "", "")
    address = source["address"]
    if not address.startswith("hf://"):
        return Origin(address, "", "")
    hub = address.removeprefix("hf://").partition("@")[0]
    return Origin(hub, hub, source["identity"].removeprefix("hf:"))


def licence_of(folder: Path, origin: Origin) -> dict[str, str]:
    """The fields of a model card's header that name the licence, from the model's own card; none where it is not known."""
    card = folder / "README.md"
    header = _header(card.read_text(encoding="utf-8")) if card.is_file() else {}
    found = {field: str(header[field]) for field in LICENCE_FIELDS if header.get(field)}
    if not found:
        return dict(LICENCES.get(origin.hub, {}))
    link = found.get("license_link", "")
    if link and "://" not in link:
        if origin.hub:
            found["license_link"] = f"https://huggingface.co/{origin.hub}/blob/{origin.revision or 'main'}/{link}"
        else:
            del found["license_link"]
    return found


def _header(text: str) -> dict[str, object]:
    """The YAML at the beginning of a model card."""
    import yaml

    parts = text.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        read = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return read if isinstance(read, dict) else {}
