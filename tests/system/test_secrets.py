"""A secret is given to its step, and appears nowhere else: in no file below `.recipe`, no shared store, and nothing that is printed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.secrets import encoded, escaped
from tests.support import RECIPE as COMMAND
from tests.support import Space

TOKEN = 'it\'s "pâté" & more/than+enough<1>'
RAW = b"caf\xe9-token-\xff-of-bytes"
PRINTS = """
import base64, html, json, os, shlex, sys
from urllib.parse import quote, quote_plus

def show(raw, text):
    out = sys.stdout.buffer
    shell, page, link = shlex.quote(text), html.escape(text), quote(text, errors="surrogateescape")
    forms = [text, repr(text), repr(raw), link, quote_plus(text, errors="surrogateescape"), quote(link), json.dumps(text), json.dumps(json.dumps(text))]
    forms += [json.dumps(text, ensure_ascii=False), shell, page, json.dumps(page), raw.hex(), raw.hex().upper()]
    for form in forms:
        out.write(b"form: " + os.fsencode(form) + b"\\n")
    for lead in (b"", b"a", b"bc", b"user:"):
        out.write(base64.encodebytes(lead + raw * 5) + b"\\n" + base64.urlsafe_b64encode(lead + raw) + b"\\n")
    out.flush()
    if "RECIPE_METRICS" in os.environ:
        with open(os.environ["RECIPE_METRICS"], "w", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps({text: 1, "deep": {link: text}}) + "\\n")

for name in ("TOKEN", "RAW"):
    show(os.environb[name.encode()], os.environ[name])
open("out.txt", "w").write("made")
sys.exit(int(sys.argv[1]))
"""
RECIPE = """
inputs:
  token: {type: secret, env: TOKEN}
  raw: {type: secret, env: RAW, required: false}
  code: {type: integer, default: 0}
steps:
  print:
    run: [python3, show.py, "{{ inputs.code }}"]
    deps: [show.py]
    secrets: [token, raw]
    metrics: true
    outputs: {out: out.txt}
"""


def forms() -> set[bytes]:
    """All that must not be found anywhere."""
    found = set(encoded(TOKEN.encode()) | encoded(RAW))
    found |= {form.encode("utf-8", "surrogateescape") for form in escaped(TOKEN, 2) | escaped(RAW.decode("utf-8", "surrogateescape"), 1)}
    return found | {b"caf\xef\xbf\xbd-token-", b"token-\\udcff", b"more/than", b"more%2Fthan", b"-of-bytes"}


def leaks(data: bytes) -> list[bytes]:
    flat = data.replace(b"\n", b"").replace(b"\r", b"")
    return [form for form in FORMS if form in flat]


FORMS = forms()


@pytest.fixture
def space(tmp_path: Path) -> Space:
    space = Space(tmp_path / "space")
    space.recipe(RECIPE)
    space.write("show.py", PRINTS)
    (tmp_path / "store").mkdir()
    space.write("recipe.toml", f'store = "team"\n[stores.team]\nurl = "{tmp_path}/store"\npush = true\n')
    return space


def call(space: Space, *words: str) -> tuple[int, bytes]:
    environ = {**os.environ, "TOKEN": TOKEN, "RAW": RAW.decode("utf-8", "surrogateescape")}
    done = subprocess.run([*COMMAND, *words], cwd=space.root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
    return done.returncode, done.stdout


def test_a_secret_is_in_nothing_that_is_stored_or_shown(space: Space, tmp_path: Path) -> None:
    said = {}
    for words in ("run ./recipe.yaml code=3", "run ./recipe.yaml --json --jobs 3", "logs print", "why print", "report last", "runs --json"):
        status, out = call(space, *words.split())
        assert leaks(out) == [] and b"Traceback" not in out, (words, out)
        assert status == (1 if "code=3" in words else 0), out
        said[words] = out
    assert said["logs print"].count(b"form: ") == 28 and said["logs print"].count(b"***") >= 28 + 40
    looked = {path: path.read_bytes() for folder in (tmp_path / "store", space.root) for path in folder.rglob("*") if path.is_file()}
    assert {path: found for path, data in looked.items() if (found := leaks(data))} == {}
    assert any(b"***" in data for path, data in looked.items() if "traces" in path.parts), "its metrics are in the shared store"
    assert not [path for path, data in looked.items() if b"--jobs" in data], "the command line is stored"
