"""Claims about the folder that flux-lora and sdxl-lora export: whose it is, what it may be used for, and how it is loaded."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.library.siblings import siblings

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
license: other
license_name: flux-1-dev-non-commercial-license
license_link: LICENSE.md
---
# FLUX.1 [dev]
"""


@pytest.fixture
def export() -> Iterator[Any]:
    with siblings():
        yield importlib.import_module("image_export")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What step `export` is given for a Flux adapter of two prompts, whose base is from the Hub."""
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    base = Path("inputs", "base", "FLUX.1-dev")
    for folder in (base, Path("samples"), Path("prompts")):
        folder.mkdir(parents=True)
    (base / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (base / "README.md").write_text(CARD)
    Path("prompts", "texts.json").write_text('["zxq: a \\"banana\\"", "zxq cat"]')
    for step, colour in (("000030", "white"), ("000060", "red")):
        row = Image.new("RGB", (128, 64), colour)
        row.paste("blue", (64, 0, 128, 64))
        row.save(Path("samples", f"step-{step}.png"))
    save_file({"transformer.x.lora_A.weight": torch.zeros(1, 1)}, "adapter.safetensors")
    Path("manifest.jsonl").write_text("")
    Path("settings.json").write_text('{"resolution": 64, "rank": 8}')
    Path("report.json").write_text(
        json.dumps(
            {
                "steps": 60,
                "images": 41,
                "held_out": 7,
                "eval_loss_before": 3.5,
                "eval_loss_after": 2.25,
            }
        )
    )
    (base / ".origin.json").write_text(
        json.dumps({"repo": "black-forest-labs/FLUX.1-dev", "revision": COMMIT})
    )
    return SimpleNamespace(base=base, trigger="zxq: it")


def exported(
    export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], str]:
    """The header of the card that comes out, and the rest of it."""
    words = [
        "image_export.py", "--adapter", "adapter.safetensors", "--base", given.base, "--manifest", "manifest.jsonl", "--report", "report.json",
        "--samples", "samples", "--prompts", "prompts", "--sheet", "samples/step-000060.png", "--recipe", "flux-lora@1", "--key", "k", "--architecture",
        "flux-1-dev/lora", "--trigger", given.trigger, "--settings", "settings.json", "--out", "model",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    export.main()
    _, header, text = Path("model", "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_the_card_names_the_base_its_licence_the_trigger_and_what_was_drawn(
    export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, text = exported(export, given, monkeypatch)
    link = f"https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/{COMMIT}/LICENSE.md"
    assert header == {
        "library_name": "diffusers", "pipeline_tag": "text-to-image", "base_model": "black-forest-labs/FLUX.1-dev", "base_model_relation": "adapter",
        "license": "other", "license_name": "flux-1-dev-non-commercial-license", "license_link": link, "instance_prompt": "zxq: it",
        "tags": ["text-to-image", "lora", "diffusers"],
        "widget": [{"text": 'zxq: a "banana"', "output": {"url": "images/00.png"}}, {"text": "zxq cat", "output": {"url": "images/01.png"}}],
    }  # fmt: skip
    assert (
        "60 steps on 41 images" in text and f"[flux-1-dev-non-commercial-license]({link})" in text
    )
    pictures = [Image.open(Path("model", sample["output"]["url"])) for sample in header["widget"]]
    assert [(picture.size, picture.getpixel((0, 0))) for picture in pictures] == [
        ((64, 64), (255, 0, 0)),
        ((64, 64), (0, 0, 255)),
    ]
    assert json.loads(Path("model", "settings.json").read_text()) == {
        "resolution": 64, "rank": 8, "base": "black-forest-labs/FLUX.1-dev", "base_revision": COMMIT,
    }  # fmt: skip


def test_the_lines_that_load_it_are_python_and_name_pipeline_base_and_commit(
    export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = exported(export, given, monkeypatch)
    code = text.partition("```python\n")[2].partition("```")[0]
    ast.parse(code)
    assert (
        f'FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", revision="{COMMIT}"' in code
    )
    assert 'pipeline("zxq: a \\"banana\\"")' in code


def test_a_base_that_is_a_folder_here_is_no_model_of_the_hub(
    export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given.base / ".origin.json").unlink()
    header, text = exported(export, given, monkeypatch)
    assert "base_model" not in header and header["license"] == "other"  # its card is there
    assert "license_link" not in header  # to a file of a folder that nobody else has
    assert 'from_pretrained("./FLUX.1-dev"' in text
    settings = json.loads(Path("model", "settings.json").read_text())
    assert (settings["base"], settings["base_revision"]) == ("./FLUX.1-dev", None)


def test_random_weights_have_no_name_and_nothing_to_load(
    export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("settings.json").write_text('{"resolution": 64, "init": "random"}')
    header, text = exported(export, given, monkeypatch)
    assert not {"base_model", "base_model_relation"} & set(header)
    prose = text.partition("| setting")[0]
    assert (
        "a base with random weights" in prose
        and "FLUX.1-dev" not in prose
        and "from_pretrained" not in prose
    )


@pytest.mark.parametrize(
    "card", ["", "# no header", "---\nlicense: [\n---\n", "---\ntags: [x]\n---\n"]
)
def test_the_licence_of_the_default_base_is_named_where_its_card_does_not(
    card: str, export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given.base / "README.md").write_text(card)
    header, _ = exported(export, given, monkeypatch)
    assert header["license_name"] == "flux-1-dev-non-commercial-license"


def test_a_base_of_unknown_licence_gives_none(
    export: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given.base / "README.md").unlink()
    (given.base / ".origin.json").write_text(json.dumps({"repo": "you/mine", "revision": COMMIT}))
    header, text = exported(export, given, monkeypatch)
    assert header["base_model"] == "you/mine" and "license" not in header and "licence" not in text
