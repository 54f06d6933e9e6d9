"""`recipe new`: what it writes is valid, runs, trains, and replaces nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import Space


def test_a_new_recipe_is_valid_and_its_smoke_preset_trains(space: Space) -> None:
    code, out, err = space.command("new", "hello")
    assert (code, out) == (0, "./hello.yaml\n"), err
    assert "recipe run ./hello.yaml --preset smoke" in err
    assert space.read("hello.yaml").startswith(
        "# yaml-language-server: $schema=.recipe/recipe.schema.json\n"
    )
    assert json.loads(space.read(".recipe/recipe.schema.json"))["type"] == "object"
    assert sorted(path.name for path in space.root.iterdir()) == [".recipe", "hello", "hello.yaml"]
    assert space.command("validate", "hello.yaml") == (0, "", "hello.yaml: valid\n")

    space.file = "hello.yaml"
    assert space.run(preset="smoke") == ["data", "train", "export"]
    report = json.loads(space.read("hello-model/report.json"))
    assert report["eval_loss"] < report["eval_loss_untrained"] - 0.5
    assert space.run(preset="smoke") == []


def test_a_recipe_in_a_folder_names_the_one_schema_of_the_workspace(space: Space) -> None:
    (space.root / "recipes").mkdir()
    assert space.command("new", "recipes/hello")[0] == 0
    assert space.read("recipes/hello.yaml").startswith(
        "# yaml-language-server: $schema=../.recipe/recipe.schema.json\n"
    )
    assert [str(path.relative_to(space.root)) for path in space.root.rglob("*.schema.json")] == [
        ".recipe/recipe.schema.json"
    ]


def test_git_does_not_see_the_schema(space: Space) -> None:
    subprocess.run(["git", "init", "--quiet", space.root], check=True)
    assert space.command("schema", "--write") == (0, ".recipe/recipe.schema.json\n", "")
    seen = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"],
        cwd=space.root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        seen.stdout == ""
        and json.loads(space.read(".recipe/recipe.schema.json"))["type"] == "object"
    )


def test_the_training_of_a_new_recipe_goes_on_and_ends_where_an_unbroken_one_does(
    space: Space, tmp_path: Path
) -> None:
    space.command("new", "hello")
    space.file = "hello.yaml"
    space.run({"max_steps": 30}, preset="smoke")
    assert space.run({"max_steps": 50}, preset="smoke") == ["train", "export"]
    assert any("resumes from step-30.json" in str(event.data.get("note")) for event in space.events)

    unbroken = Space(tmp_path / "unbroken")
    unbroken.command("new", "hello")
    unbroken.file = "hello.yaml"
    unbroken.run({"max_steps": 50}, preset="smoke")
    assert space.read("hello-model/model.json") == unbroken.read("hello-model/model.json")


def test_a_row_that_the_new_recipe_cannot_read_is_named(space: Space) -> None:
    space.command("new", "hello")
    space.file = "hello.yaml"
    space.write("rows.jsonl", '{"text": "some"}\n{"txt": "other"}\n')
    space.attempt({"dataset": "./rows.jsonl"})
    assert space.summary is not None and 'rows.jsonl:2: this is not a row with a "text"' in str(
        space.summary.failed[0].tail
    )


def test_nothing_is_replaced(space: Space) -> None:
    space.command("new", "hello")
    before = {path: path.read_bytes() for path in space.root.rglob("*") if path.is_file()}
    code, _, err = space.command("new", "hello.yaml")
    assert code == 3 and "./hello.yaml already exists" in err
    (space.root / "hello.yaml").unlink()
    code, _, err = space.command("new", "hello")
    assert code == 3 and "./hello/data.py already exists" in err
    assert {path: path.read_bytes() for path in before if path.exists()} == {
        path: data for path, data in before.items() if path.name != "hello.yaml"
    }


@pytest.mark.parametrize("name", ["Hello", "9", "", "a b", "x@2", "no/such/folder/x", "ü"])
def test_a_name_that_a_recipe_cannot_have_writes_nothing(space: Space, name: str) -> None:
    assert space.command("new", name)[0] in (2, 3)
    assert list(space.root.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing_behind(space: Space) -> None:
    (space.root / "hello").symlink_to("/nowhere/at/all")
    code, _, err = space.command("new", "hello")
    assert code == 2 and "cannot be written" in err
    assert [path.name for path in space.root.iterdir()] == ["hello"]


TRAIN = """\
import argparse, json
from pathlib import Path
p = argparse.ArgumentParser()
p.add_argument("data", help="Numbers, one a line")
p.add_argument("--steps", type=int, default=500)
p.add_argument("--lr", type=float, default=0.1, help="How fast")
p.add_argument("--out", default="model.json")
args = p.parse_args()
numbers = [float(line) for line in open(args.data)]
guess = 0.0
for step in range(1, args.steps + 1):
    loss = sum((number - guess) ** 2 for number in numbers) / len(numbers)
    guess += args.lr * 2 * sum(number - guess for number in numbers) / len(numbers)
    print(f"step {step} loss {loss:.6f}", flush=True)
json.dump({"guess": guess}, open(args.out, "w"))
"""


def test_a_script_becomes_a_recipe_that_runs(space: Space) -> None:
    space.write("train.py", TRAIN)
    space.write("numbers.txt", "1\n2\n6\n")
    code, out, err = space.command("new", "mean", "--script", "train.py")
    assert (code, out) == (0, "./mean.yaml\n")
    assert (
        "note: no checkpointing found" in err
        and "recipe run ./mean.yaml data=… --preset smoke" in err
    )
    assert space.command("validate", "mean.yaml") == (0, "", "mean.yaml: valid\n")
    space.file = "mean.yaml"
    assert space.run({"data": "./numbers.txt"}, preset="smoke") == ["train"]
    assert abs(json.loads(space.read("model.json"))["guess"] - 3) < 0.1
    assert space.run({"data": "./numbers.txt"}, preset="smoke") == []
    assert space.run({"data": "./numbers.txt", "lr": 0.2}, preset="smoke") == ["train"]
    metrics = space.plan({"data": "./numbers.txt", "lr": 0.2}, preset="smoke").made[0].metrics
    assert metrics["step"] == 20 and float(metrics["loss"]) < 5


@pytest.mark.parametrize(
    ("script", "import_", "started"),
    [
        ("src/pkg/train.py", "from .model import loss", "[python, -m, pkg.train]"),
        ("scripts/train.py", "from pkg.model import loss", "[python, scripts/train.py]"),
        ("src/pkg/train.py", "from pkg.model import loss", "[python, src/pkg/train.py]"),
    ],
)
def test_a_script_that_imports_a_package_below_src_becomes_a_recipe_that_runs(
    space: Space, script: str, import_: str, started: str
) -> None:
    space.write("src/pkg/__init__.py", "")
    space.write(
        "src/pkg/model.py", "from .scale import scale\n\ndef loss(n):\n    return scale * n\n"
    )
    space.write("src/pkg/scale.py", "scale = 2\n")
    space.write(script, f"{import_}\nopen('model.txt', 'w').write(str(loss(3)))\n")
    assert space.command("new", "mine", "--script", script)[0] == 0
    space.file = "mine.yaml"
    text = space.read("mine.yaml")
    assert started in text and "env: {PYTHONPATH: src}" in text
    assert space.run() == ["train"] and space.read("model.txt") == "6"
    space.write("src/pkg/scale.py", "scale = 3\n")
    assert space.run() == ["train"] and space.read("model.txt") == "9"


def test_a_draft_looks_at_the_root_only_for_what_is_imported_from_there(space: Space) -> None:
    space.write("src/types.py", "")
    space.write("json.py", "")
    space.write("tools/train.py", "import json, types, helper\nopen('model.txt', 'w')\n")
    space.write("tools/helper.py", "")
    assert space.command("new", "plain", "--script", "tools/train.py")[0] == 0
    assert "PYTHONPATH" not in space.read("plain.yaml")
    space.write("shared.py", "")
    space.write("tools/helper.py", "import shared\n")
    assert space.command("new", "mine", "--script", "tools/train.py")[0] == 0
    assert "env: {PYTHONPATH: .}" in space.read("mine.yaml")


def test_a_script_of_a_windows_editor_is_read(space: Space) -> None:
    (space.root / "train.py").write_bytes(b"\xef\xbb\xbfprint(1)\r\n")
    assert space.command("new", "mine", "--script", "train.py")[0] == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("gone.py", "there is no file gone.py"),
        ("../out.py", "the directory for the code of"),
        ("broken.py", "broken.py:1: invalid Python"),
        ("binary.py", "invalid Python"),
        ("book.ipynb", "jupyter nbconvert --to script book.ipynb"),
    ],
)
def test_a_script_that_cannot_be_read_writes_nothing(space: Space, script: str, words: str) -> None:
    (space.root.parent / "out.py").write_text("x = 1\n")
    space.write("broken.py", "def (\n")
    space.write("book.ipynb", "{}")
    (space.root / "binary.py").write_bytes(b"\xff\xfe\x00")
    before = set(space.root.iterdir())
    code, _, err = space.command("new", "mine", "--script", script)
    assert code == 3 and words in err, err
    assert set(space.root.iterdir()) == before
