"""The loopback as a provider that rents machines: what `recipe.toml` says of it, and what it did."""

from __future__ import annotations

import json

from tests.support import Space


def cloud(space: Space, **settings: object) -> None:
    """What `recipe.toml` says of the provider, whose machines lie beside all workspaces."""
    given = {
        "root": str(space.root.parent / "cloud"),
        "price": 1.2,
        "gpus": 1,
        "hosts": 3,
        **settings,
    }
    lines = [
        f"{name} = {json.dumps(json.dumps(value) if isinstance(value, dict) else value)}"
        for name, value in given.items()
    ]
    space.write("recipe.toml", "[drivers.loopback]\n" + "\n".join(lines) + "\n")


def provider(space: Space) -> list[str]:
    """What the provider did."""
    path = space.root.parent / "cloud" / "provider.jsonl"
    return (
        [json.loads(line)["what"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
