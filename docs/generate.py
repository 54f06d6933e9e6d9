"""Write the generated parts of the documents anew: what stands between their markers.  Tests say when they are out of date."""

from __future__ import annotations

from docs import (
    cli_page,
    errors_page,
    faults_page,
    library_page,
    platforms_page,
    published,
    requests_page,
    rulebook,
    settings_page,
)
from runner.language import reference, schema
from runner.paths import shipped

if __name__ == "__main__":
    language, commands = shipped() / "docs" / "language.md", shipped() / "docs" / "cli.md"
    language.write_text(reference.refresh(language.read_text("utf-8"), schema.load()), "utf-8")
    commands.write_text(cli_page.refreshed(commands.read_text("utf-8")), "utf-8")
    memory = shipped() / "docs" / "memory.md"
    memory.write_text(published.refreshed(memory.read_text("utf-8")), "utf-8")
    rules = shipped() / "docs" / "preflight.md"
    rules.write_text(rulebook.refreshed(rules.read_text("utf-8")), "utf-8")
    page = shipped() / "docs" / "library.md"
    page.write_text(library_page.refreshed(page.read_text("utf-8"), library_page.sheets()), "utf-8")
    settings = shipped() / "docs" / "settings.md"
    settings.write_text(settings_page.refreshed(settings.read_text("utf-8")), "utf-8")
    errors = shipped() / "docs" / "errors.md"
    errors.write_text(errors_page.refreshed(errors.read_text("utf-8")), "utf-8")
    server = shipped() / "docs" / "server.md"
    requests = requests_page.refreshed(server.read_text("utf-8"))
    server.write_text(platforms_page.refreshed(requests), "utf-8")
    fakes = shipped() / "docs" / "fakes.md"
    fakes.write_text(faults_page.refreshed(fakes.read_text("utf-8")), "utf-8")
