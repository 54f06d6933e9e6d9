"""A driver whose extra is not installed is left out or refused in a sentence, with the command that installs it."""

from __future__ import annotations

import pytest

from tests.support import Space

WITHOUT_GOOGLE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "google":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
RENTS = "steps: {a: {run: 'true', resources: {gpus: 1}}}\n"


@pytest.fixture
def bare(space: Space, monkeypatch: pytest.MonkeyPatch) -> Space:
    """A workspace whose recipe runs in an environment without the packages of Google."""
    space.write("site/sitecustomize.py", WITHOUT_GOOGLE)
    space.recipe(RENTS)
    monkeypatch.setenv("PYTHONPATH", str(space.root / "site"))
    for name in ("VAST_API_KEY", "RUNPOD_API_KEY", "PRIME_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(space.root))
    return space


@pytest.mark.parametrize("words", [("offers",), ("offers", "./recipe.yaml")])
def test_offers_names_a_driver_that_it_cannot_ask_only_to_who_means_to_use_it(
    bare: Space, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, err = bare.command(*words)
    assert "gcp" not in err and "no API key for Vast.ai" in err, err
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "mine")
    code, _, err = bare.command(*words)
    assert code == 5 and "Traceback" not in err, err
    assert "skipped drivers that are not installed: gcp" in err
    assert "no API key for Vast.ai" in err, "the others are asked all the same"


@pytest.mark.parametrize(
    "words",
    [
        ("offers", "--driver", "gcp"),
        ("doctor", "--driver", "gcp"),
        ("run", "./recipe.yaml", "--driver", "gcp", "-y"),
        ("plan", "./recipe.yaml", "--driver", "gcp"),
    ],
    ids=lambda words: words[0],
)
def test_a_verb_that_needs_the_driver_says_what_installs_it(
    bare: Space, words: tuple[str, ...]
) -> None:
    code, out, err = bare.command(*words)
    assert code in (2, 3, 5) and "Traceback" not in err, err
    assert 'the driver "gcp" requires google' in err + out
    assert "pip install" in err + out and "[gcp]'" in err + out


def test_offers_without_any_extra_proposes_one_and_not_all(bare: Space) -> None:
    bare.write(
        "site/sitecustomize.py", WITHOUT_GOOGLE.replace('== "google"', 'in ("google", "httpx")')
    )
    code, _, err = bare.command("offers")
    assert code == 2 and "no driver that rents machines is installed" in err, err
    assert "[vastai]'" in err and "vastai," not in err, err
