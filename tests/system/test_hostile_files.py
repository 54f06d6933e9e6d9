"""A hostile file ends in an error within seconds and 256 MB, whatever it tries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = r"""
import re, sys, time
from pathlib import Path
from runner.errors import Invalid
from runner.interface.diagnostics import render
from runner.language.document import read
begun = time.process_time()
try:
    read(Path(sys.argv[1]))
except Invalid as error:
    shown = render(error.problems, "text")
else:
    shown = "NO ERROR"
# Not ru_maxrss: that starts from the peak of the process that forked this one.
peak = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(time.process_time() - begun, peak)
print(shown[:20000])
"""

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
FILES: dict[str, Callable[[], str]] = {
    "alias bomb": lambda: BOMB,
    "alias bomb of mappings": lambda: (
        "a: &k-1 {b: 1}\n"
        + "".join(f"k{i}: &k{i} {{x: *k{i - 1}, y: *k{i - 1}}}\n" for i in range(40))
    ),
    "many aliases": lambda: "a: &a [1]\nb: [" + "*a, " * 200_000 + "1]\n",
    "recursion": lambda: "a: &a [*a]\n",
    "recursion through a mapping": lambda: "a: &a {b: {c: *a}}\n",
    "one key twice": lambda: "a: 1\n" * 500_000,
    "one key twice, late": lambda: "".join(f"k{i}: 1\n" for i in range(30_000)) + "k7: 2\n",
    "a scalar of 10 MB": lambda: "a: " + "x" * 10_000_000 + "\n",
    "a quoted scalar of 22 MB": lambda: 'a: "' + "x y\\n" * 4_400_000 + '"\n',
    "a block of 22 MB": lambda: "a: |\n" + "  some text\n" * 1_800_000,
    "a comment of 22 MB": lambda: "#" * 22_000_000 + "\na: 1\n",
    "a comment of 22 MB and an emoji": lambda: "# 🙂" + "#" * 22_000_000 + "\na: 1\n",
    "100,000 lists in each other": lambda: "[" * 100_000,
    "100,000 mappings in each other": lambda: "{a: " * 100_000,
    "100,000 dashes": lambda: "- " * 100_000,
    "deep indentation": lambda: "".join(" " * i + "a:\n" for i in range(3000)),
    "too many values": lambda: "[" + "1," * 11_000_000 + "1]",
    "too many keys": lambda: "".join(f"{i:x}k: 1\n" for i in range(1_800_000)),
    "a larger file than we read": lambda: "a: 1 # " + "x" * 40_000_000,
    "a number of a million digits": lambda: "a: " + "9" * 999_999 + "\n",
    "a tag": lambda: "a: !!python/object/apply:os.system [true]\n",
    "an unclosed quote": lambda: 'a: "' + "x " * 400_000,
    "a terminal escape": lambda: "a: \x1b]0;owned\x07\n",
    "NUL": lambda: "a: \0\n",
    "a million anchors": lambda: "[" + "&a 1, " * 999_000 + "*b]",
    "all lines wrong": lambda: "a b\n" * 300_000,
    "unquoted expressions": lambda: "a: {{ x }}\n" * 100_000,
}


@pytest.mark.parametrize("what", FILES)
def test_a_hostile_file_is_refused_quickly_and_in_little_memory(what: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(FILES[what]())
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, _, shown = done.stdout.partition("\n")
    seconds, megabytes = map(float, first.split())
    assert "error" in shown and "NO ERROR" not in shown
    assert "\x1b" not in shown
    assert seconds < 6, f"{seconds:.1f} s"  # 1.4 for the slowest; without the limits it is minutes
    assert megabytes < 256, f"{megabytes:.0f} MB"
