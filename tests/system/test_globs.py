"""A glob over the workspace finds what its user put there: nothing that the recipe makes, or made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.survey import plan_cache
from tests.support import Space

COPY = "cat {{ matrix.f }} > {{ outputs.o }}"


def each(
    glob: Any = "data/*.txt", output: str = "data/{{ matrix.f | stem }}.clean.txt", **more: Any
) -> dict[str, Any]:
    axis = glob if isinstance(glob, dict) else {"glob": glob}
    return {"matrix": {"f": axis}, "run": COPY, "outputs": {"o": output}, **more}


def steps(space: Space) -> set[str]:
    return set(space.answers())


@pytest.fixture
def data(space: Space) -> Space:
    """Two files that match data/*.txt."""
    space.write("data/a.txt", "a")
    space.write("data/b.txt", "b")
    return space


@pytest.mark.parametrize("more", [{}, {"deps": ["{{ matrix.f }}"]}], ids=["matrix", "deps"])
def test_a_second_run_does_nothing_where_outputs_match_the_glob(
    data: Space, more: dict[str, Any]
) -> None:
    data.recipe({"steps": {"each": each(**more)}})
    assert len(data.run()) == 2
    first = steps(data)
    assert data.run() == [] and steps(data) == first and len(first) == 2
    assert (
        data.read("data/a.clean.txt") == "a" and not (data.root / "data/a.clean.clean.txt").exists()
    )


def test_what_a_plan_makes_is_no_match_though_no_store_remembers_it(data: Space) -> None:
    data.recipe(
        {"steps": {"each": each(output="data/{{ matrix.f | stem }}")}}
    )  # a.txt makes a; were a.clean to be matched, names would clash
    data.recipe({"steps": {"each": each("data/*", output="data/{{ matrix.f | name }}.out")}})
    data.write("data/a.txt.out", "a")
    assert steps(data) == {"each[f=data%2Fa.txt]", "each[f=data%2Fb.txt]"}


def test_what_an_earlier_run_left_is_no_match(data: Space) -> None:
    data.recipe({"steps": {"each": each(output="data/{{ matrix.f | stem }}.old.txt")}})
    data.run()
    data.recipe(
        {
            "steps": {
                "each": each(),
                "all": {
                    "run": "cat data/*.txt > all",
                    "deps": ["data/*.txt"],
                    "outputs": {"o": "all"},
                },
            }
        }
    )
    assert (data.root / "data/a.old.txt").exists()
    data.run()
    assert steps(data) == {"each[f=data%2Fa.txt]", "each[f=data%2Fb.txt]", "all"}
    assert sorted(data.read("all")) == ["a", "a", "b", "b"], (
        "the two files and what `each` makes of them"
    )
    assert data.run() == []


@pytest.mark.parametrize("how", ["edited", "adopted"])
def test_a_file_of_the_users_is_a_match_though_a_run_put_it_there_first(
    data: Space, how: str
) -> None:
    old = {"steps": {"old": {"run": "echo o > data/o.txt", "outputs": {"o": "data/o.txt"}}}}
    data.recipe(old)
    if how == "edited":
        data.run()
        data.write("data/o.txt", "mine")
    else:
        data.write("data/o.txt", "mine")
        assert data.command("adopt", "old")[0] == 0
    data.recipe({"steps": {"each": each()}})
    assert steps(data) == {f"each[f=data%2F{name}.txt]" for name in "abo"}


def test_a_folder_that_only_holds_what_runs_made_is_no_match(data: Space) -> None:
    data.recipe(
        {
            "steps": {
                "each": each(output="data/made/{{ matrix.f | name }}"),
                "all": {"run": "ls data > all", "deps": ["data/*"], "outputs": ["all"]},
            }
        }
    )
    data.run()
    assert (data.root / "data/made/a.txt").exists() and data.run() == []
    data.recipe({"steps": {"each": each("data/*", output="out/{{ matrix.f | name }}")}})
    assert steps(data) == {"each[f=data%2Fa.txt]", "each[f=data%2Fb.txt]"}
    data.write("data/made/mine", "")
    assert "each[f=data%2Fmade]" in steps(data)


def test_a_match_that_its_own_instance_makes_is_a_problem(data: Space) -> None:
    data.recipe({"steps": {"each": each(output="{{ matrix.f }}")}})
    (one, two) = data.problems()
    assert (
        one.code == "matrix-axis"
        and '"data/a.txt"' in one.message
        and "exclude" in one.fix
        and data.pointed(one) == '"data/*.txt"'
    )
    assert '"data/b.txt"' in two.message


def test_code_that_a_step_makes_is_no_match(space: Space) -> None:
    space.write("main.py", "open('made.py', 'w').write('')")
    space.recipe(
        {
            "code": ["*.py"],
            "steps": {"a": {"run": ["python", "main.py"], "outputs": {"o": "made.py"}}},
        }
    )
    space.run()
    assert (space.root / "made.py").exists() and space.run() == []


def test_a_glob_does_not_reach_other_instances_of_its_step(data: Space) -> None:
    step = {
        "matrix": {"n": [1, 2]},
        "run": "ls data > {{ outputs.o }}",
        "deps": ["data/*.txt"],
        "outputs": {"o": "data/{{ matrix.n }}.txt"},
    }
    data.recipe({"steps": {"count": step}})
    assert len(data.run()) == 2 and data.read("data/1.txt") == data.read("data/2.txt").replace(
        "2.txt", "1.txt"
    )
    assert data.run() == []


def test_what_is_excluded_is_no_match(space: Space) -> None:
    for name in ("lua.c", "onelua.c", "lib/a.c", "lib/onelua.c", "old/b.c"):
        space.write(f"src/{name}", name)
    axis = {"glob": "src/**/*.c", "exclude": ["onelua.c", "src/o*"]}
    space.recipe(
        {
            "code": [{"glob": "src/*.c", "exclude": ["l*"]}],
            "steps": {
                "each": each(axis, "o/{{ matrix.f | name }}", code=[]),
                "all": {
                    "run": "ls src src/* > all",
                    "deps": [axis],
                    "code": [],
                    "outputs": ["all"],
                },
                "code": {"run": "ls src > code", "outputs": {"o": "code"}},
            },
        }
    )
    space.run()
    assert steps(space) == {"each[f=src%2Flib%2Fa.c]", "each[f=src%2Flua.c]", "all", "code"}
    assert (
        set(space.read("all").split()) >= {"a.c", "lua.c"}
        and "onelua" not in space.read("all")
        and "old" not in space.read("all")
    )
    assert space.read("code") == "onelua.c\n" and space.run() == []


def test_a_plan_with_globs_is_recalled(data: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    data.recipe({"steps": {"each": each()}})
    data.run()
    data.answers()

    def compiles(*_words: Any) -> None:
        raise AssertionError("it was compiled again")

    monkeypatch.setattr(plan_cache, "_Compilation", compiles)
    assert set(data.answers().values()) == {"fresh"}


NAMES = st.sets(
    st.sampled_from(["a.txt", "b.txt", "a", "sub/a.txt", "b.md"]), min_size=1, max_size=4
)
GLOBS = st.sampled_from(["*.txt", "*", "**/*.txt", "a*", "**"])
OUTPUTS = st.sampled_from(
    [
        "{{ matrix.f | name }}.clean.txt",
        "made/{{ matrix.f | name }}",
        "a{{ matrix.f | stem }}.txt",
        "sub/x/{{ matrix.f | name }}/",
    ]
)


@settings(max_examples=12, deadline=None)
@given(names=NAMES, glob=GLOBS, output=OUTPUTS)
def test_a_second_run_has_the_same_instances_and_nothing_to_do(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], glob: str, output: str
) -> None:
    space = Space(Path(tmp_path_factory.mktemp("globs")))
    for name in names:
        space.write(f"data/{name}", name)
    run = "ls -d {{ matrix.f }}" + ("" if output.endswith("/") else " > {{ outputs.o }}")
    listing = {
        "run": "find data | sort > data/all.txt",
        "deps": [f"data/{glob}"],
        "outputs": ["data/all.txt"],
    }
    space.recipe(
        {"steps": {"each": {**each(f"data/{glob}", f"data/{output}"), "run": run}, "all": listing}}
    )
    if space.problems():
        return  # what clashes, clashes from the first run on
    space.run()
    before = steps(space)
    assert space.run() == [] and steps(space) == before
