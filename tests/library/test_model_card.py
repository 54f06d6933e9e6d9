"""Claims about what an exported folder says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.library.siblings import siblings


@pytest.fixture
def card() -> Iterator[Any]:
    with siblings():
        import model_card  # type: ignore[import-not-found]

        yield model_card


@pytest.mark.parametrize(
    ("words", "licence"),
    [
        ("---\nlicense: mit\ntags: [x]\n---\n# It\n", {"license": "mit"}),
        (
            "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
        ),
        ("---\nlicense: [mit, apache-2.0]\n---\n", {}),
        ("# It\n\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: {\n---\n", {}),
        ("---\n", {}),
        (None, {}),
    ],
)
def test_the_licence_is_what_the_card_of_the_base_says(
    words: str | None, licence: dict[str, str], card: Any, tmp_path: Path
) -> None:
    if words is not None:
        (tmp_path / "README.md").write_text(words)
    assert card.base_of(tmp_path).licence == licence


@pytest.mark.parametrize(
    ("adapter", "judge", "line", "package"),
    [
        (True, False, "AutoPeftModelForCausalLM.from_pretrained(folder)", "peft"),
        (
            True,
            True,
            "AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)",
            "peft",
        ),
        (False, False, "AutoModelForCausalLM.from_pretrained(folder)", "transformers"),
        (False, True, "AutoModelForSequenceClassification.from_pretrained(folder)", "transformers"),
    ],
)
def test_a_card_says_what_loads_it(
    adapter: bool, judge: bool, line: str, package: str, card: Any
) -> None:
    base = card.Base("acme/tiny", "ab" * 20, {"license": "mit"})
    words = card.text(
        base, card.Export(adapter, int(judge), "dpo", random=False), {"method": "lora", "seed": 0}
    )
    header = yaml.safe_load(words.split("---\n")[1])
    assert f"model = {line}\n" in words and (
        header["library_name"],
        header["base_model"],
        header["license"],
    ) == (package, "acme/tiny", "mit")
    assert ("GenerationConfig" in words) == (adapter and not judge)
