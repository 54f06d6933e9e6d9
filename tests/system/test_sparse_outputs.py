"""What a step leaves with holes has holes wherever it goes: in the store, published, on a host, on the way back, and in a shared store."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.execution.terms import Settings
from tests.support import Space

MB = 1 << 20


def on_disk(path: Path) -> int:
    """Bytes of the disk that a file, or all files below a folder, take."""
    found = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.lstat().st_blocks for each in found) * 512


@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_an_output_with_holes_takes_no_more_of_any_disk(tmp_path: Path, driver: str) -> None:
    space = Space(tmp_path / "work")
    hole = "truncate -s 96M $O; printf end >> $O"
    space.recipe(
        {
            "steps": {
                "file": {
                    "run": hole,
                    "env": {"O": "{{ outputs.o }}"},
                    "outputs": {"o": "big.bin"},
                },
                "tree": {
                    "run": f"mkdir -p $D; O=$D/a; {hole}; cp --sparse=never /bin/true $D/b",
                    "env": {"D": "{{ outputs.d }}"},
                    "outputs": {"d": "tree/"},
                },
                "reads": {
                    "run": "tail -c 3 big.bin > {{ outputs.t }}; tail -c 3 tree/a >> {{ outputs.t }}",
                    "deps": ["big.bin", "tree/"],
                    "outputs": {"t": "t.txt"},
                },
            }
        }
    )
    store = tmp_path / "store"
    store.mkdir()
    space.write("recipe.toml", f'store = "s"\n[stores.s]\nurl = "{store}"\npush = true\n')
    space.run(settings=Settings(driver=driver))
    assert space.read("t.txt") == "endend"
    assert (space.root / "big.bin").stat().st_size == 96 * MB + 3
    assert on_disk(tmp_path) < 16 * MB, {
        str(path): on_disk(path) for path in tmp_path.rglob("*") if on_disk(path) > MB
    }
    other = Space(tmp_path / "other")
    other.write("recipe.toml", f'store = "s"\n[stores.s]\nurl = "{store}"\n')
    other.write("recipe.yaml", space.read("recipe.yaml"))
    assert other.run() == []
    assert (other.root / "big.bin").stat().st_size == 96 * MB + 3
    assert on_disk(other.root) < 16 * MB
