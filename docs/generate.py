"""Write the generated parts of the documents anew: what stands between their markers.  Tests say when they are out of date."""

from __future__ import annotations

from runner.interface.cli import manual
from runner.language import library, reference, schema

if __name__ == "__main__":
    guide, commands = library.home() / "docs" / "recipes.md", library.home() / "docs" / "cli.md"
    guide.write_text(reference.refreshed(guide.read_text("utf-8"), schema.load()), "utf-8")
    commands.write_text(manual.refreshed(commands.read_text("utf-8")), "utf-8")
