"""Write the generated parts of the documents anew: what stands between their markers.  Tests say when they are out of date."""

from __future__ import annotations

from runner.language import library, reference, schema

if __name__ == "__main__":
    guide = library.home() / "docs" / "recipes.md"
    guide.write_text(reference.refreshed(guide.read_text("utf-8"), schema.load()), "utf-8")
