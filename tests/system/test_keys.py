"""Two different behaviours never share a key, and the same behaviour never gets two: a case each, by what was changed.

The letters are those of the table that the key's definition came from; each was once a false hit or a false miss of somebody's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.planning import fingerprint
from tests.support import Space

BASE = """
inputs:
  lr: {type: number, default: 0.0001}
  n: {type: integer, default: 1}
  name: {type: string, default: x}
  data: {type: file, default: ./train.csv}
  token: {type: secret, env: KEY_TEST_TOKEN, required: false}
env: {A: "1"}
code: [train.py]
setup: [[pip, list]]
steps:
  train:
    run: [python, train.py, "{{ inputs.lr }}", "{{ inputs.data }}", "{{ outputs.o }}"]
    secrets: [token]
    outputs: {o: model.bin}
    retries: {failure: 1}
    timeout: 5h
"""


@pytest.fixture
def base(space: Space) -> Space:
    space.write("train.py", "print()\n")
    space.write("other.py", "print(1)\n")
    space.write("train.csv", "1,2\n")
    space.write("a.lock", "one\n")
    space.recipe(BASE)
    return space


def changed(space: Space, old: str, new: str, step: str = "train") -> bool:
    """Whether this edit of the recipe gives the step another key."""
    before, text = space.key(step), space.read(space.file)
    assert text.count(old) == 1, old
    space.write(space.file, text.replace(old, new))
    after = space.key(step)
    space.write(space.file, text)
    return after != before


# -- the same behaviour ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps:\n", "\n# a comment\n\nsteps:\n"),
        ("summary: A test", "summary: Another\ndoc: at length"),
        ("recipe: t@1", "recipe: t@2"),
        ("retries: {failure: 1}", "retries: {failure: 9, preemption: 1}"),
        ("timeout: 5h", "timeout: 1h\n    idle_timeout: 5m"),
        ("timeout: 5h", "resources: {cpus: 1, memory: 1GB}"),
        ("timeout: 5h", 'when: "{{ inputs.n > 0 }}"'),
        ("timeout: 5h", "nodes: 1\n    where: local"),
        ("timeout: 5h", "state: {s: {every: 5m}}"),
        ("timeout: 5h", "pass_env: [HOME]"),
        ("timeout: 5h", "metrics: {file: m.jsonl}"),
        ("timeout: 5h", "metrics: {pattern: 'loss (?P<loss>.*)'}"),
        ("outputs: {o: model.bin}", "outputs: {o: {path: model.bin, sync: 5m}}"),
        ("code: [train.py]", 'code: ["train*.py"]'),
        ('env: {A: "1"}', 'env: {A: "1"}\nlimits: {time: 1h}\nresources: {cpus: 1}'),
        ("default: 0.0001}", "default: 1e-4, minimum: 0, doc: how fast}"),
        (
            "train:\n    run: [python, train.py,",
            "train:\n    run:\n      [ 'python', \"train.py\",",
        ),
        (
            '"{{ inputs.lr }}", "{{ inputs.data }}", "{{ outputs.o }}"]',
            '"{{ inputs.lr }}", "{{ inputs.data }}", "{{ outputs.o }}"] # as it was',
        ),
        ('env: {A: "1"}\ncode: [train.py]\n', "code: [train.py]\nenv: {\"A\": '1'}\n"),
        ("outputs: {o: model.bin}", 'outputs: {o: {path: model.bin, doc: "What was learned"}}'),
    ],
    ids=lambda text: re.sub(r"\W+", "_", text)[:30] if isinstance(text, str) else "",
)
def test_an_edit_that_does_not_act_changes_no_key(base: Space, old: str, new: str) -> None:
    assert not changed(base, old, new)


def test_the_order_of_keys_changes_no_key(base: Space) -> None:
    def turned(value: Any) -> Any:
        return (
            {k: turned(v) for k, v in reversed(value.items())} if isinstance(value, dict) else value
        )

    steps = {
        "a": {
            "run": "x > o",
            "env": {"B": "1", "C": "2"},
            "files": {"c.json": {"x": 1, "y": 2}},
            "outputs": {"o": "o", "p": {"path": "p", "optional": True}},
        }
    }
    base.recipe({"steps": steps})
    before = base.key("a")
    base.recipe({"steps": turned(steps)})
    assert base.key("a") == before


def test_h_a_default_of_the_recipe_and_the_same_words_in_the_step_are_one_key(base: Space) -> None:
    before = base.key("train")
    text = BASE.replace('env: {A: "1"}\ncode: [train.py]\n', "").replace(
        "timeout: 5h", 'env: {A: "1"}\n    code: [train.py]'
    )
    base.recipe(text)
    assert base.key("train") == before


@pytest.mark.parametrize("text", ["1e-4", "0.0001", ".0001", "0.00010"])
def test_e_a_number_is_one_value_however_it_is_written(base: Space, text: str) -> None:
    assert base.key("train", {"lr": text}) == base.key("train") == base.key("train", {"lr": 0.0001})


def test_e_whole_numbers_are_one_value(base: Space) -> None:
    base.recipe(
        'inputs: {n: {type: number}}\nsteps: {a: {run: [echo, "{{ inputs.n }}"], outputs: {o: {path: o, optional: true}}}}'
    )
    assert (
        base.key("a", {"n": "1000"}) == base.key("a", {"n": "1e3"}) == base.key("a", {"n": 1000.0})
    )


def test_a_step_renamed_keeps_its_key(base: Space) -> None:
    before = base.key("train")
    base.recipe(BASE.replace("  train:\n", "  fit:\n"))
    assert base.key("fit") == before


def test_i_one_more_value_of_an_axis_changes_no_other_instance(base: Space) -> None:
    text = 'steps: {a: {matrix: {n: %s}, run: [echo, "{{ matrix.n }}"], outputs: {o: {path: "o{{ matrix.n }}", optional: true}}}}'
    base.recipe(text % "[1, 2]")
    before = base.keys()
    base.recipe(text % "[3, 2, 1]")
    after = base.keys()
    assert before.items() < after.items() and len(set(after.values())) == 3


def test_g_what_a_step_does_not_read_is_not_in_its_key(base: Space) -> None:
    base.recipe(BASE + '  says: {run: [echo, "{{ inputs.name }}", "{{ inputs.n }}"]}\n')
    assert base.key("train", {"name": "y", "n": 5}) == base.key("train")


def test_key_false_is_not_in_the_key(base: Space) -> None:
    base.recipe(
        'inputs: {w: {type: integer, default: 1, key: false}}\nsteps: {a: {run: [x, "{{ inputs.w }}"], outputs: {o: o}}}'
    )
    assert base.key("a") == base.key("a", {"w": 8})


def test_a_secret_there_or_not_is_one_key(base: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY_TEST_TOKEN", raising=False)
    before = base.key("train")
    monkeypatch.setenv("KEY_TEST_TOKEN", "hunter22")
    assert base.key("train") == before


def test_where_the_workspace_is_and_how_a_path_is_spelled_is_not_in_the_key(
    base: Space, tmp_path: Path
) -> None:
    other = Space(tmp_path / "elsewhere" / "deeper")
    for name in ("train.py", "train.csv", "recipe.yaml"):
        other.write(name, base.read(name))
    assert (
        other.key("train")
        == base.key("train")
        == base.key("train", {"data": str(base.root / "train.csv")})
    )


def test_only_the_time_of_a_file_changes_nothing(base: Space) -> None:
    before = base.key("train")
    os.utime(base.root / "train.csv", (1, 1))
    assert base.key("train") == before


def test_f_what_only_an_attempt_knows_is_not_in_the_key(base: Space) -> None:
    base.recipe(
        'steps: {a: {run: "echo {{ run.id }} {{ host.cpus }} {{ step.key }} > o", outputs: {o: o}}}'
    )
    before = base.key("a")
    assert base.run() == ["a"]
    assert base.key("a") == before and base.run() == []


# -- another behaviour ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[python, train.py,", "[python3, train.py,"),
        ('"{{ inputs.lr }}", "{{ inputs.data }}"', '"{{ inputs.data }}", "{{ inputs.lr }}"'),
        ('"{{ inputs.lr }}",', '"{{ inputs.lr }} ",'),
        ("[python, train.py,", "[python, [train.py],"),
        ("outputs: {o: model.bin}", "outputs: {o: model.pt}"),
        ("outputs: {o: model.bin}", "outputs: {o: model.bin/}"),
        ("outputs: {o: model.bin}", "outputs: {o: {path: model.bin, optional: true}}"),
        ("outputs: {o: model.bin}", "outputs: {o: {path: model.bin, nonempty: true}}"),
        ("secrets: [token]", "secrets: []"),
        ('env: {A: "1"}', 'env: {A: "2"}'),  # h
        ('env: {A: "1"}', 'env: {A: "1", B: "1"}'),
        ("code: [train.py]", "code: [train.py, other.py]"),
        ("code: [train.py]", "code: [other.py]"),
        ("setup: [[pip, list]]", "setup: [[pip, check]]"),  # b
        ("timeout: 5h", "image: a@sha256:" + "0" * 64),
        ("timeout: 5h", "python: {lock: a.lock}"),
        ("timeout: 5h", "resources: {cpus: 1, key: true}"),  # k
        ("timeout: 5h", "files: {c.json: {a: 1}}"),
        ("timeout: 5h", "metrics: true"),  # it is given $RECIPE_METRICS
        ("default: 0.0001}", "default: 0.0002}"),
        ("default: ./train.csv", "default: ./other.py"),
    ],
    ids=lambda text: re.sub(r"\W+", "_", text)[:30] if isinstance(text, str) else "",
)
def test_an_edit_that_acts_changes_the_key(base: Space, old: str, new: str) -> None:
    assert changed(base, old, new)


def test_types_are_kept_apart(base: Space) -> None:
    keys = set()
    for value in ("1", '"1"', "true", '"true"', "1.5", '"1.5"', "[1]", '["1"]', "[[1]]", "null"):
        base.recipe(
            f"steps: {{a: {{run: x, files: {{c.json: {{k: {value}}}}}, outputs: {{o: o}}}}}}"
        )
        keys.add(base.key("a"))
    assert len(keys) == 10


def test_a_script_and_an_argument_list_and_two_shells_are_kept_apart(base: Space) -> None:
    keys = set()
    for run in ('"echo a"', "[echo a]", "[echo, a]", '"echo a", shell: bash'):
        base.recipe(f"steps: {{a: {{run: {run}, outputs: {{o: o}}}}}}")
        keys.add(base.key("a"))
    assert len(keys) == 4


def test_a_the_content_and_the_name_of_a_lock_count(base: Space) -> None:
    base.recipe(BASE.replace("timeout: 5h", "python: {lock: a.lock}"))
    before = base.key("train")
    base.write("a.lock", "two\n")
    assert base.key("train") != before


@pytest.mark.parametrize(
    "declares", ["timeout: 5h", "python: {lock: a.lock}", "image: a@sha256:" + "0" * 64]
)
def test_c_to_run_in_the_callers_packages_is_another_key(base: Space, declares: str) -> None:
    base.recipe(BASE.replace("timeout: 5h", declares))
    assert base.key("train") != base.key("train", python="current")


def test_d_the_name_of_an_input_counts_because_programs_go_by_suffixes(base: Space) -> None:
    base.write("train.jsonl", base.read("train.csv"))
    assert base.key("train", {"data": "./train.jsonl"}) != base.key(
        "train", {"data": "./train.csv"}
    )


CHAIN = """
steps:
  make: {run: "echo 1 > %s; echo 1 > %s", outputs: {x: %s, y: %s}}
  use: {run: ["diff", "{{ steps.make.x }}", "{{ steps.make.y }}"], outputs: {o: {path: out, optional: true}}}
"""


def test_d_the_name_of_an_upstream_output_counts(base: Space) -> None:
    keys = set()
    for x in ("out.csv", "out.json"):
        base.recipe(CHAIN % (x, "b", x, "b"))
        base.run()
        keys.add(base.key("use"))
    assert len(keys) == 2


def test_which_output_has_which_name_counts(base: Space) -> None:
    keys = set()
    for x, y in (("a", "b"), ("b", "a")):
        base.recipe(CHAIN % ("a", "b", x, y))
        base.run()
        keys.add(base.key("use"))
    assert len(keys) == 2  # `diff a b` and `diff b a`, of the same two files


def test_swapping_two_inputs_of_the_same_name_changes_the_key(base: Space) -> None:
    base.write("one/d.txt", "1")
    base.write("two/d.txt", "2")
    base.recipe(
        'inputs: {a: {type: file}, b: {type: file}}\nsteps: {s: {run: [diff, "{{ inputs.a }}", "{{ inputs.b }}"], outputs: {o: o}}}'
    )
    one, two = "./one/d.txt", "./two/d.txt"
    assert base.key("s", {"a": one, "b": two}) != base.key("s", {"a": two, "b": one})


def test_swapping_two_values_changes_the_key(base: Space) -> None:
    base.recipe(
        'inputs: {a: {type: string}, b: {type: string}}\nsteps: {s: {run: [x, "{{ inputs.a }}", "{{ inputs.b }}"], outputs: {o: o}}}'
    )
    assert base.key("s", {"a": "1", "b": "2"}) != base.key("s", {"a": "2", "b": "1"})
    assert base.key("s", {"a": "1 2", "b": ""}) != base.key("s", {"a": "1", "b": "2"})


def test_the_order_in_which_a_fan_in_is_listed_counts(base: Space) -> None:
    text = """
steps:
  m:
    matrix: {n: %s}
    run: "echo {{ matrix.n }} > {{ outputs.o }}; echo '{\\"v\\": 1}' > $RECIPE_METRICS"
    metrics: true
    outputs: {o: "o{{ matrix.n }}"}
  cat: {run: [cat, "{{ steps.m.o }}"], outputs: {o: {path: all, optional: true}}}
  show: {run: [echo, "{{ steps.m.metrics.v }}"], outputs: {o: {path: shown, optional: true}}}
"""
    base.recipe(text % "[1, 2]")
    base.run()
    before = base.keys()
    base.recipe(text % "[2, 1]")
    assert sorted(base.run()) == ["cat", "show"]
    after = base.keys()
    assert (
        before["cat"] != after["cat"]
        and before["show"] != after["show"]
        and before["m[n=1]"] == after["m[n=1]"]
    )


@pytest.mark.parametrize(
    "leaf",
    [
        "{{ inputs[inputs.which] }}",
        "{{ inputs | tojson }}",
        "{{ inputs.a if inputs.which == 'a' else inputs.b }}",
        "{{ [inputs.which, inputs.a] | join(',') }}",
    ],
)
def test_g_a_value_read_in_a_roundabout_way_counts(base: Space, leaf: str) -> None:
    base.recipe(
        "inputs: {which: {type: string, default: a}, a: {type: string, default: x}, b: {type: string, default: y}}\n"
        f'steps: {{s: {{run: [echo, "{leaf}"], outputs: {{o: o}}}}}}'
    )
    assert len({base.key("s"), base.key("s", {"a": "z"}), base.key("s", {"which": "b"})}) == 3


@pytest.mark.parametrize(
    "leaf", ["{% set i = inputs %}{{ i.a }}", "{{ env.HOME }}", "{{ inputs.a.__class__ }}"]
)
def test_f_and_g_what_cannot_be_followed_is_refused(base: Space, leaf: str) -> None:
    base.recipe(
        f'inputs: {{a: {{type: string, default: x}}}}\nsteps: {{s: {{run: [echo, "{leaf}"], outputs: {{o: o}}}}}}'
    )
    assert base.problems()


def test_j_editing_the_code_of_one_step_leaves_the_other_alone(base: Space) -> None:
    base.recipe("""
code: [other.py]
steps:
  latents: {run: [python, other.py], outputs: {o: o}}
  train: {run: [python, train.py], code: [train.py], outputs: {p: p}}
""")
    before = base.keys()
    base.write("train.py", "print(2)\n")
    after = base.keys()
    assert before["latents"] == after["latents"] and before["train"] != after["train"]


def _executable(path: Path) -> None:
    path.chmod(0o755)


def _relinked(path: Path) -> None:
    link = path.parent / "link"
    link.unlink()
    link.symlink_to("b")


def _renamed(path: Path) -> None:
    path.rename(path.parent / "c")


def _emptied(path: Path) -> None:
    (path.parent / "empty").rmdir()


@pytest.mark.parametrize("change", [_executable, _relinked, _renamed, _emptied])
def test_n_the_executable_bit_links_names_and_empty_folders_of_a_tree_count(
    base: Space, change: Callable[[Path], None]
) -> None:
    for name in ("a", "b"):
        base.write(f"tree/{name}", "same")
    (base.root / "tree/link").symlink_to("a")
    (base.root / "tree/empty").mkdir()
    base.recipe(
        'inputs: {d: {type: dataset, default: ./tree}}\nsteps: {s: {run: [ls, "{{ inputs.d }}"], outputs: {o: o}}}'
    )
    before = base.key("s")
    change(base.root / "tree/a")
    assert base.key("s") != before


def test_n_the_executable_bit_of_one_file_counts(base: Space) -> None:
    base.recipe("steps: {s: {run: [./tool], deps: [tool], outputs: {o: o}}}")
    base.write("tool", "#!/bin/sh\n")
    before = base.key("s")
    (base.root / "tool").chmod(0o755)
    assert base.key("s") != before


def test_two_steps_that_exist_for_their_effect_do_not_share_a_trace(space: Space) -> None:
    space.recipe(
        "steps: {one: {run: [echo, hello]}, two: {run: [echo, hello], needs: [one]}, m: {matrix: {n: [1, 2]}, run: [echo, hello]}}"
    )
    assert sorted(space.run()) == ["m[n=1]", "m[n=2]", "one", "two"] and space.run() == []


def test_two_steps_that_make_the_same_of_the_same_share_one_trace(space: Space) -> None:
    space.recipe("steps: {one: {run: 'echo 1 > o', outputs: {o: o}}}")
    assert space.run() == ["one"]
    space.recipe(
        "recipe: other@1\nsummary: Another\nsteps: {two: {run: 'echo 1 > o', outputs: {o: o}}}"
    )
    assert space.run() == []


def test_what_cannot_be_hashed_gives_no_key_at_all(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe(
        'inputs: {n: {type: integer, default: 1}}\nsteps: {s: {run: "echo {{ inputs.n }} > o", outputs: {o: o}}}'
    )

    def unhashable(*_: object) -> str:
        raise TypeError("no canonical form")

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "key", unhashable)
        survey = space.plan()
        assert (
            survey.verdicts[0].key is None
            and "cannot compute its cache key" in survey.verdicts[0].reasons[0]
        )
        assert space.run() == ["s"] and space.run() == ["s"]
    assert space.run() == ["s"] and space.run() == []
