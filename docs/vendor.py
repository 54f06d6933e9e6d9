"""Fetch the parts of the page that others wrote, from npm, as runner/interface/page/vendor/vendor.json names them.

usage: python -m docs.vendor

To take a newer version, write it into vendor.json and run this: files, digests and the integrity of
the package are written anew. Fails where a package is not what npm says that it published.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parents[1] / "runner" / "interface" / "page" / "vendor"


def fetch(part: dict[str, Any], folder: Path) -> None:
    """Replace the files of one package.  Raises SystemExit where its integrity is another."""
    named = f"{part['name']}@{part['version']}"
    published = npm("view", named, "dist.integrity")
    packed = (
        folder / npm("pack", "--silent", named, "--pack-destination", str(folder))
    ).read_bytes()
    integrity = f"sha512-{base64.b64encode(hashlib.sha512(packed).digest()).decode()}"
    if integrity != published:
        raise SystemExit(f"{named}: the package has {integrity}, npm published {published}")
    part["integrity"] = integrity
    archive = folder / "package.tgz"
    archive.write_bytes(packed)
    with tarfile.open(archive) as files:
        for name, file in part["files"].items():
            found = files.extractfile(f"package/{file['from']}")
            if found is None:
                raise SystemExit(f"{named} has no file {file['from']}")
            data = found.read()
            (VENDOR / name).write_bytes(data)
            file["sha256"] = hashlib.sha256(data).hexdigest()


def npm(*words: str) -> str:
    """What a command of npm prints."""
    answer = subprocess.run(["npm", *words], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


def main() -> None:
    listed = VENDOR / "vendor.json"
    parts = json.loads(listed.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            fetch(part, Path(folder))
    listed.write_text(json.dumps(parts, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
