"""Values from files, parts of objects and several presets, on the command line; and `recipe show --values`, which tells where each comes from."""

from __future__ import annotations

import json

from tests.support import Space

RECIPE = """
inputs:
  lr:     {type: number, default: 0.1}
  rank:   {type: integer, default: 8}
  data:   {type: string}
  extra:  {type: object, default: {seed: 1, optim: {name: adam, eps: 1e-8}}}
presets:
  small:  {rank: 2, env: {SIZE: small}}
  quick:  {rank: 1, lr: 1}
steps:
  one:
    run: 'echo "{{ inputs.lr }} {{ inputs.rank }} {{ inputs.data }} {{ inputs.extra | tojson }} ${SIZE:-}" > "{{ outputs.o }}"'
    outputs: {o: o.txt}
"""


def test_values_come_from_files_and_words_and_the_later_ones_win(space: Space) -> None:
    space.recipe(RECIPE)
    space.write("a.yaml", "lr: 1e-3\nrank: 4\ndata: of a\n")
    space.write("b.toml", 'rank = 5\ndata = "of b"\n[extra]\nseed = 2\n')
    space.write("c.json", '{"data": "of c"}')
    code, _, said = space.command(
        "run",
        "-i",
        "a.yaml",
        "-i",
        "b.toml",
        "-i",
        "c.json",
        "--set",
        "extra.optim.eps=1",
        "rank=6",
    )
    assert code == 0, said
    assert space.read("o.txt") == '0.001 6 of c {"optim": {"eps": 1}, "seed": 2} \n'


def test_a_part_of_an_object_is_set_whatever_gives_the_rest(space: Space) -> None:
    space.recipe(RECIPE)
    assert (
        space.command(
            "run",
            "data=x",
            "--set",
            "extra.optim.name=sgd",
            "extra.new.deep=[1]",
            "--preset",
            "small,quick",
        )[0]
        == 0
    )
    assert (
        space.read("o.txt")
        == '1 1 x {"new": {"deep": [1]}, "optim": {"eps": 1e-08, "name": "sgd"}, "seed": 1} small\n'
    )


def test_every_mistake_in_values_is_reported_at_once_with_its_file(space: Space) -> None:
    space.recipe(RECIPE)
    space.write("a.yaml", "learning: 1\nrank: many\nlr.x: 1\n")
    code, _, said = space.command(
        "plan", "-i", "a.yaml", "--set", "extra.seed.deeper=1", "--preset", "smal,quick"
    )
    assert code == 3
    for words in (
        'has no input "learning" (a.yaml)',
        '"rank" must be a whole number, not "many" (a.yaml)',
        '"lr" is of type number and has no parts: "lr.x" (a.yaml)',
        '"extra" has no parts below seed, whose value is 1',
        'has no preset "smal"',
        "did you mean",
        'the input "data" has no value',
    ):
        assert words in said, said


def test_files_that_are_no_values_are_reported_together(space: Space) -> None:
    space.recipe(RECIPE)
    space.write("a.yaml", "- lr\n")
    space.write("b.json", "{")
    code, _, said = space.command("plan", "-i", "a.yaml", "-i", "b.json")
    assert code == 3 and "a.yaml is not a mapping" in said and "b.json is not valid JSON" in said
    assert "cannot read none.yaml" in space.command("plan", "-i", "none.yaml")[2]


def test_show_values_tells_where_each_value_comes_from(space: Space) -> None:
    space.recipe(RECIPE)
    space.write("a.yaml", "lr: 1e-3\n")
    words = (
        "show",
        "--values",
        "./recipe.yaml",
        "-i",
        "a.yaml",
        "--preset",
        "small",
        "--set",
        "extra.seed=3",
    )
    code, out, said = space.command(*words, "data=here")
    assert code == 0, said
    assert [line.split(maxsplit=2) for line in out.splitlines()[1:3]] == [
        ["lr", "0.001", "a.yaml"],
        ["rank", "2", "preset small"],
    ], out
    assert "here" in out and "default, extra.seed given" in out
    code, out, said = space.command(*words, "--json")
    assert (
        code == 3
        and json.loads(out)["data"] == {"value": None, "from": "default"}
        and 'the input "data" has no value' in said
    )
