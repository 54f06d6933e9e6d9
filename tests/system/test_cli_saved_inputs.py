"""`recipe config save`: inputs under a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.interface.cli.main import main

RECIPE = """\
recipe: learn@1
inputs: {rank: {type: integer, default: 8}, word: {type: string, default: a}}
presets: {wide: {rank: 64}}
steps: {a: {run: 'echo {{ inputs.word }} {{ inputs.rank }} > {{ outputs.o }}', outputs: {o: o.txt}}}
"""


def test_inputs_are_saved_listed_compared_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "learn.yaml").write_text(RECIPE)
    (tmp_path / "recipe.toml").touch()

    def config(*words: str) -> tuple[int, str, str]:
        code = main(["config", *words])
        return (code, *capsys.readouterr())

    assert config("save", "base", "learn", "rank=16", "--note", "the first")[:2] == (
        0,
        "base: ./learn.yaml rank=16\n",
    )
    assert config("save", "wide", "learn", "word=b c", "--preset", "wide")[0] == 0
    assert [
        (each["name"], each["note"], each["inputs"])
        for each in json.loads(config("list", "--json")[1])
    ] == [
        ("base", "the first", {"rank": "16"}),
        ("wide", "", {"word": "b c"}),
    ]
    assert "the first" in config("show", "base")[1] and "rank=16" in config("list")[1]
    code, out, _ = config("diff", "base", "wide")
    assert code == 0 and {line.split()[0].rstrip(":") for line in out.splitlines()} == {
        "preset",
        "rank",
        "word",
    }, out
    assert config("restore", "wide")[:2] == (
        0,
        "recipe run ./learn.yaml --preset wide -i wide.json\n",
    )
    assert main(["run", "./learn.yaml", "--preset", "wide", "-i", "wide.json", "-q"]) == 0
    assert [path.read_text() for path in tmp_path.glob("out/**/o.txt")] + [
        path.read_text() for path in tmp_path.glob("o.txt")
    ] == ["b c 64\n"]
    capsys.readouterr()
    assert config("save", "last")[1] == "last: ./learn.yaml --preset wide word=b c\n", (
        "without a recipe what was run last"
    )
    for words, fix in (
        (("save", "base", "learn"), "--replace"),
        (("save", "../x", "learn"), "letters"),
        (("save", "new", "learn", "rank=many"), "rank"),
        (("show", "bsae"), 'did you mean "base"'),
        (("diff", "base"), "two names"),
    ):
        code, _, said = config(*words)
        assert code in (2, 3) and fix in said, said
    (tmp_path / "wide.json").write_text("mine")
    assert config("restore", "wide")[0] == 2 and (tmp_path / "wide.json").read_text() == "mine"
    assert config("save", "base", "learn", "rank=4", "--replace")[0] == 0
    assert config()[0] == 0
