"""Write the generated parts of the documents anew: what stands between their markers.  Tests say when they are out of date."""

from __future__ import annotations

from docs import published, rulebook
from runner.interface import datasheet
from runner.interface.cli import manual, show
from runner.language import library, reference, schema

if __name__ == "__main__":
    guide, commands = library.home() / "docs" / "recipes.md", library.home() / "docs" / "cli.md"
    guide.write_text(reference.refreshed(guide.read_text("utf-8"), schema.load()), "utf-8")
    commands.write_text(manual.refreshed(commands.read_text("utf-8")), "utf-8")
    memory = library.home() / "docs" / "memory.md"
    memory.write_text(published.refreshed(memory.read_text("utf-8")), "utf-8")
    rules = library.home() / "docs" / "preflight.md"
    rules.write_text(rulebook.refreshed(rules.read_text("utf-8")), "utf-8")
    page = library.home() / "docs" / "library.md"
    page.write_text(datasheet.refreshed(page.read_text("utf-8"), show.library_sheets()), "utf-8")
