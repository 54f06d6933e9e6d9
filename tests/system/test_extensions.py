"""Recipes and drivers of other packages: found by entry points, told apart from ours, and never imported to be listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner import extensions
from tests.support import Space
from tests.test_startup import imported

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "acme-recipes"
version = "1.4"
[project.entry-points."recipe.recipes"]
acme = "acme_recipes.library"
[project.entry-points."recipe.drivers"]
acme = "acme_recipes.driver:Acme"
[tool.hatch.build.targets.wheel]
packages = ["acme_recipes"]
"""
RECIPE = """\
recipe: greet@{version}
summary: Greet somebody, version {version}
inputs: {{who: {{type: string, default: world}}}}
steps:
  greet: {{run: [python, programs/greet.py, "{{{{ inputs.who }}}}", "{{{{ outputs.words }}}}"], code: [programs/greet.py], outputs: {{words: words.txt}}}}
"""
DRIVER = '''\
"""A cellar: a loopback under another name."""
from drivers.loopback import Loopback


class Acme(Loopback):
    """Hosts of the cellar."""
'''


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel of somebody else's was installed."""
    source, built, target = (
        tmp_path_factory.mktemp(name) for name in ("source", "built", "target")
    )
    package = source / "acme_recipes"
    (package / "library" / "programs").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text(
        "raise SystemExit('listing and planning import nothing')\n"
    )
    for version in (1, 2):
        (package / "library" / f"greet@{version}.yaml").write_text(RECIPE.format(version=version))
    (package / "library" / "programs" / "greet.py").write_text(
        "import sys\nopen(sys.argv[2], 'w').write(f'Good morning, {sys.argv[1]}\\n')\n"
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source],
        check=True,
        timeout=120,
    )
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", target, wheel],
        check=True,
        timeout=120,
    )
    return target


def another(folder: Path, name: str, points: str) -> Path:
    """A package of which only the list of what it brings matters."""
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(points)
    return folder


def asked(space: Space, path: Path | str, *words: str) -> tuple[int, str, str]:
    return space.command(*words, env={"PYTHONPATH": str(path)})


def test_recipes_of_a_package_are_listed_shown_and_run_by_name(space: Space, acme: Path) -> None:
    code, out, err = asked(space, acme, "list")
    assert (code, err) == (0, "")
    ours, of, theirs = out.partition("from acme-recipes 1.4:\n")
    assert of and ours.startswith("library:\n")
    assert [line.split()[:3] for line in theirs.splitlines()[:2]] == [
        ["greet@2", "Greet", "somebody,"],
        ["greet@1", "Greet", "somebody,"],
    ]
    listed = json.loads(asked(space, acme, "list", "--json")[1])
    assert [entry["name"] for entry in listed if entry["from"] == "acme-recipes 1.4"] == [
        "greet@2",
        "greet@1",
    ]
    assert {entry["from"] for entry in listed} == {"library", "acme-recipes 1.4"}
    assert "version 2" in asked(space, acme, "show", "greet")[1]

    assert asked(space, acme, "run", "greet@1", "who=Ada")[0] == 0
    assert space.read("out/greet@1/latest/words.txt") == "Good morning, Ada\n"
    space.recipe(
        'steps: {inner: {uses: greet@2, with: {who: Bob}}}\noutputs: {words: "{{ steps.inner.words }}"}\n'
    )
    assert asked(space, acme, "run")[0] == 0
    assert space.read("inner/words.txt") == "Good morning, Bob\n"


def test_an_unknown_name_is_answered_with_the_nearest_of_all(space: Space, acme: Path) -> None:
    code, _, err = asked(space, acme, "plan", "greeet")
    assert code == 3 and 'did you mean "greet"?' in err
    code, _, err = asked(space, acme, "plan", "greet@3")
    assert code == 3 and "there is greet@1, greet@2" in err


def test_two_packages_with_one_name_are_both_named(
    space: Space, acme: Path, tmp_path: Path
) -> None:
    other = another(tmp_path / "other", "rival", "[recipe.recipes]\nrival = rival_recipes\n")
    (other / "rival_recipes").mkdir()
    (other / "rival_recipes" / "greet@7.yaml").write_text(RECIPE.format(version=7))
    (other / "rival_recipes" / "sft@9.yaml").write_text(
        RECIPE.format(version=9).replace("greet@9", "sft@9")
    )
    both = f"{acme}:{other}"
    for words in (("plan", "greet@7"), ("show", "greet"), ("validate", "greet@1")):
        code, out, err = asked(space, both, *words)
        told = out + err
        assert (
            code == 3
            and "acme-recipes 1.4" in told
            and "rival 0.1" in told
            and "uninstall one of these packages" in told
        ), words
    # A package cannot take a name of the library: it stays ours, and a list tells.
    assert asked(space, both, "show", "sft@1")[0] == 0
    code, _, err = asked(space, both, "plan", "sft@9")
    assert code == 3 and '"sft" has no version "9"' in err
    code, out, err = asked(space, both, "list")
    assert (
        code == 3
        and 'the recipe "sft" comes from the library and from rival 0.1' in err
        and "sft@1 " in out
    )


def test_a_folder_of_recipes_that_is_not_there_is_reported_by_a_list(
    space: Space, tmp_path: Path
) -> None:
    broken = another(tmp_path / "broken", "broken", "[recipe.recipes]\nx = not_there.at_all\n")
    code, out, err = asked(space, broken, "list")
    assert (
        code == 3
        and "broken 0.1 declares its recipes in not_there.at_all" in err
        and "sft@1" in out
    )


def test_a_driver_of_a_package_runs_steps_with_the_settings_of_its_table(
    space: Space, acme: Path, tmp_path: Path
) -> None:
    # The package of this test cannot be imported, so that listing is seen to import nothing; its driver can be when it is asked for.
    whole = tmp_path / "whole"
    (whole / "acme_recipes").mkdir(parents=True)
    (whole / "acme_recipes" / "__init__.py").write_text("")
    (whole / "acme_recipes" / "driver.py").write_text(DRIVER)
    space.recipe('steps: {say: {run: "echo hello > {{ outputs.o }}", outputs: {o: o.txt}}}')
    space.write("recipe.toml", f'[drivers.acme]\nroot = "{space.root}/cellar"\n')
    code, _, err = asked(space, f"{whole}:{acme}", "run", "--driver", "acme")
    assert code == 0, err
    assert space.read("o.txt") == "hello\n" and (space.root / "cellar").is_dir()
    code, out, _ = asked(space, f"{whole}:{acme}", "config")
    assert code == 0 and "drivers.acme.root" in out
    code, _, err = asked(space, acme, "run", "--driver", "acne")
    assert code == 3 and 'did you mean "acme"?' in err


def test_a_driver_that_cannot_be_imported_says_whose_it_is(space: Space, tmp_path: Path) -> None:
    broken = another(
        tmp_path / "broken", "broken", "[recipe.drivers]\ncellar = broken_driver:Cellar\n"
    )
    space.recipe("steps: {say: {run: echo hello}}")
    code, _, err = asked(space, broken, "run", "--driver", "cellar")
    assert code == 2 and 'the driver "cellar" requires broken_driver: reinstall broken 0.1' in err
    (broken / "broken_driver.py").write_text("class Cellar: ...")
    code, _, err = asked(space, broken, "run", "--driver", "cellar")
    assert code == 2 and "the driver cellar is a Cellar, not a Driver" in err
    (broken / "broken_driver.py").write_text("")
    code, _, err = asked(space, broken, "run", "--driver", "cellar")
    assert code == 2 and "Cellar" in err and "reinstall broken 0.1" in err


def test_two_drivers_of_one_name_are_both_named_and_ours_cannot_be_taken(
    space: Space, acme: Path, tmp_path: Path
) -> None:
    rival = another(
        tmp_path / "rival", "rival", "[recipe.drivers]\nacme = rival:Acme\nloopback = rival:Evil\n"
    )
    space.recipe('steps: {say: {run: "echo hello > {{ outputs.o }}", outputs: {o: o.txt}}}')
    code, _, err = asked(space, f"{acme}:{rival}", "run", "--driver", "acme")
    assert (
        code == 3
        and "acme-recipes 1.4 (acme_recipes.driver:Acme)" in err
        and "rival 0.1 (rival:Acme)" in err
    )
    assert asked(space, f"{acme}:{rival}", "run", "--driver", "loopback")[0] == 0
    code, out, _ = asked(space, f"{acme}:{rival}", "doctor")
    assert 'the driver "loopback" comes from recipe itself and from rival 0.1' in out


def test_settings_of_an_unknown_driver_are_an_error(space: Space, acme: Path) -> None:
    space.recipe("steps: {say: {run: echo hello}}")
    space.write("recipe.toml", '[drivers.ssh]\nhosts = ["a"]\n\n[drivers.lopback]\nhosts = 2\n')
    code, _, err = space.command("plan")
    assert (
        code == 3
        and 'unknown driver "lopback"' in err
        and 'did you mean "loopback"?' in err
        and "recipe.toml:4" in err
    )
    space.write("recipe.toml", '[drivers.acme]\nroot = "x"\n')
    code, _, err = space.command("plan")
    assert (
        code == 3
        and "known drivers: gcp, local, loopback, prime, ray, runpod, slurm, ssh, vastai; install the package with this driver"
        in err
    )
    assert asked(space, acme, "plan")[0] == 0


def test_a_run_in_which_nothing_is_to_be_done_asks_no_package(
    space: Space, acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe('steps: {say: {run: "echo hello > {{ outputs.o }}", outputs: {o: o.txt}}}')
    space.run()
    found = imported(space.root, "run")
    assert {"runner.extensions", "importlib.metadata"} & found <= {"runner.extensions"}
    monkeypatch.syspath_prepend(str(acme))
    extensions._find_by_path.cache_clear()
    assert [each.origin for each in extensions.find_extensions(extensions.RECIPES)] == [
        "acme-recipes 1.4"
    ]
    extensions._find_by_path.cache_clear()
