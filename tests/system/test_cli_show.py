"""`recipe show`: a datasheet that fits 80 columns and a pipe, whatever the recipe; and docs/library.md, which is made of the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import library_page
from runner.interface import datasheet
from runner.language import document, library, parse
from runner.paths import shipped
from tests.support import Space

HOME = shipped()
RECIPES = sorted(
    str(path.relative_to(HOME))
    for pattern in ("recipes/*@*.yaml", "recipes/scaffold/*.yaml", "examples/*/*.yaml")
    for path in HOME.glob(pattern)
)


def sheet(space: Space, body: str) -> str:
    space.recipe(body)
    code, out, err = space.command("show", "./recipe.yaml")
    assert (code, err) == (0, ""), err
    return out


def test_a_datasheet_tells_what_one_gets_needs_and_gives(space: Space) -> None:
    code, shown, _ = space.command("show", "sft@1")
    assert code == 0
    for expected in (
        "sft@1: Fine-tune a language model",
        "  model        model/ (a folder, from step export)",
        "  no preset     1 GPU of 24GB, 32GB memory, 60GB disk",
        "  smoke         no GPU, 2GB memory, 1GB disk",
        "unknown until a first complete run",
        "12h; then the run stops and can be resumed",
        "10 USD",
        "integer = 500; at least 1; raising it continues training",
        "above 0; at most 1",
        "integer = 4; at least 1; not part of the cache key",
        "secret, from $HF_TOKEN, optional",
        "choice = auto; auto | text | prompt-completion | messages",
        "report       report/ (a folder, from step evaluate, when inputs.eval_fraction > 0)",
        "evaluate  when {{ inputs.eval_fraction > 0 }}  <- data, export  -> report/",
        "Python Software Foundation License 2, in LICENSE",
    ):
        assert " ".join(expected.split()) in " ".join(shown.split())
    described = json.loads(space.command("show", "sft@1", "--json")[1])
    assert described["recipe"] == "sft@1"
    assert described["inputs"]["max_steps"]["continues"] is True
    assert described["steps"]["export"]["needs"] == ["train"]
    assert described["outputs"]["plot"] == "{{ steps.plot.plot }}"
    assert described["results"]["plot"] == {
        "step": "plot",
        "path": "loss.png",
        "doc": "Plot of the training metrics",
    }
    assert described["machines"]["smoke"] == {
        "gpus": 0,
        "gpu_memory": "24GB",
        "memory": "2GB",
        "disk": "1GB",
    }
    assert described["data"] == [
        {
            "folder": "fixtures/python-topics",
            "licence": "Python Software Foundation License 2, in LICENSE",
        }
    ]
    assert described["took"] == {}


def test_how_long_it_took_is_what_whole_runs_here_took(space: Space) -> None:
    space.recipe("""
inputs: {n: {type: integer, default: 1}}
presets: {smoke: {n: 2}}
steps:
  a: {run: "echo {{ inputs.n }} > {{ outputs.o }}", outputs: {o: a.txt}}
  b: {run: 'cp "{{ steps.a.o }}" "{{ outputs.o }}"', outputs: {o: b.txt}}
""")

    def took() -> dict[str, list[float]]:
        described = json.loads(space.command("show", "./recipe.yaml", "--json")[1])
        return {name: each["seconds"] for name, each in described["took"].items()}

    assert took() == {} and not (space.root / ".recipe").exists()
    space.run(preset="smoke")
    assert [len(each) for each in took().values()] == [1] and "smoke" in took()
    space.run(preset="smoke")
    assert len(took()["smoke"]) == 1, "a run in which nothing ran says nothing"
    space.write("recipe.yaml", space.read("recipe.yaml").replace("cp ", "cp -p "))
    assert space.run(preset="smoke") == ["b"]
    assert len(took()["smoke"]) == 1, "nor does one in which a part was fresh"
    space.run({"n": 3}, preset="smoke")
    assert len(took()["smoke"]) == 2 and "" not in took()
    assert re.search(
        r"smoke      [\d.]+s( to [\d.]+s)? in 2 runs on this machine",
        space.command("show", "./recipe.yaml")[1],
    )
    assert (
        "no preset  unknown until a first complete run" in space.command("show", "./recipe.yaml")[1]
    )


def test_an_output_says_what_it_is_and_where_it_comes_from(space: Space) -> None:
    shown = sheet(
        space,
        """
steps:
  train: {matrix: {lr: [1, 2]}, run: "x", outputs: {model: {path: "m/{{ matrix.lr }}", doc: "What was learned"}}}
  best: {select: train, min: loss}
  inner: {uses: ./other.yaml}
outputs: {model: "{{ steps.best.model }}", other: "{{ steps.inner.thing }}"}
""",
    )
    assert (
        "  model  m/{{ matrix.lr }} (from step best)\n         What was learned\n  other  from step inner\n"
        in shown
    )
    assert (
        "plus the resources of ./other.yaml" in shown
        and "the best of train by loss  <- train" in shown
        and "for each lr" in shown
    )


def test_the_machine_is_that_of_the_most_demanding_step(space: Space) -> None:
    shown = sheet(
        space,
        """
resources: {cpus: 1, memory: 1GB}
presets: {small: {resources: {gpus: 0}, limits: {time: 5m}}}
limits: {time: 1h}
steps:
  a: {run: x, resources: {memory: 8GB}}
  b: {run: x, resources: {gpus: 2, gpu: A100, disk: 5GB, pools: {seat: 1}}, nodes: 2}
""",
    )
    assert "no preset  2 A100, 1 CPU, 8GB memory, 5GB disk, 1 of the pool seat, on 2 nodes" in shown
    assert "small      no GPU, 1 CPU, 8GB memory" in shown
    assert "1h; then the run stops" in shown and "5m with small" in shown


def test_the_environment_tells_what_its_lock_holds(space: Space) -> None:
    space.write(
        "text.txt",
        "# made by a tool\ntorch==2.13.0 \\\\\n    --hash=sha256:00\ntransformers==5.23.0 ; python_version > '3'\nnumpy==2.4\n",
    )
    shown = sheet(
        space,
        "python: {lock: text.txt}\nsteps: {a: {run: echo}, b: {run: echo, python: {lock: gone.txt}}}",
    )
    assert "text.txt: torch 2.13.0, transformers 5.23.0, 3 packages in all; gone.txt" in " ".join(
        shown.split()
    )


def test_a_recipe_of_the_smallest_kind_has_a_datasheet(space: Space) -> None:
    shown = sheet(space, "steps: {a: {run: echo}}")
    assert "nothing  no step has outputs" in shown and "no preset  any" in shown


def test_what_a_file_says_cannot_act_on_a_terminal(space: Space) -> None:
    assert "\x1b" not in sheet(space, 'doc: "a\\e[31mred"\nsteps: {a: {run: echo}}')


@pytest.mark.parametrize("path", RECIPES)
@pytest.mark.parametrize("width", [60, 80])
def test_a_datasheet_keeps_to_its_width(path: str, width: int) -> None:
    recipe = parse.load(HOME / path)
    for line in datasheet.text(datasheet.Sheet(recipe, {}), width):
        assert len(line) <= width or len(line.split()) <= 2 or len(line.split()[0]) > 16, line


def test_the_page_of_the_library_is_what_the_recipes_say() -> None:
    page = (HOME / "docs" / "library.md").read_text("utf-8")
    assert library_page.refreshed(page, library_page.sheets()) == page, (
        "write it anew: python -m docs.generate"
    )
    for entry in library.entries():
        assert f"## {entry.id}\n" in page and f"(#{entry.id.replace('@', '')})" in page


def test_the_page_says_once_what_several_recipes_have_and_recipes_that_differ_say_it_themselves() -> (
    None
):
    seed = "{type: integer, default: %d, doc: Decides the order}"
    sheets = [
        datasheet.Sheet(
            parse.recipe(
                document.parse(
                    f"recipe: {name}@1\ninputs: {{seed: {seed % default}, own: {{type: string}}}}\nsteps: {{a: {{run: echo}}}}\n",
                    name,
                )
            ),
            {},
        )
        for name, default in (("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 1))
    ]
    page = library_page.refreshed(f"{library_page.BEGIN}{library_page.END}", sheets)
    several, *each = page.split("\n## ")[1:]
    assert "| `seed` | integer = 1<br>Decides the order |" in several
    assert ["integer = 0<br>Decides the order" in section for section in each[:5]] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert [section.count("(#in-several-recipes): `seed` `own`") for section in each[:5]] == [
        0,
        0,
        1,
        1,
        1,
    ] and page.count("Decides the order") == 3


def test_a_store_that_cannot_be_read_hides_no_recipe(space: Space) -> None:
    space.recipe("steps: {a: {run: echo}}")
    (space.root / ".recipe").mkdir()
    Path(space.root / ".recipe" / "recipe.db").write_bytes(b"no database" * 1000)
    assert space.command("show", "./recipe.yaml")[0] == 0


def test_what_a_preset_takes_is_estimated_for_each_gpu_that_it_means(space: Space) -> None:
    space.write("recipe.toml", '[prices]\nrtx4090 = "0.40 USD"\n')
    told = json.loads(space.command("show", "flux-lora@1", "--json")[1])["estimated"]
    assert "smoke" not in told and {"24gb", "80gb"} <= set(told)
    assert {line.partition(" ")[0] for line in told["24gb"]} == {"l4", "rtx3090", "rtx4090"}
    priced = next(line for line in told["24gb"] if line.startswith("rtx4090"))
    assert "of training" in priced and " USD (a guess from what others published)" in priced
    assert "not measured: the speed of rtx3090" in next(
        line for line in told["24gb"] if line.startswith("rtx3090")
    )
    text = space.command("show", "flux-lora@1")[1]
    assert "h100-80gb (80 GB): FITS" in text
    # The base of sft@1 is not here.
    assert not re.search(r"[0-9] (s|min|h|d) of training", space.command("show", "sft@1")[1])
