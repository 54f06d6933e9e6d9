"""The README.md of an image adapter, as the Hub shows it: a header for machines, and how to draw with it.  Knows numbers and names, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from model_card import Base

# Of the usual bases, where they come without their card.
LICENCES = {
    "black-forest-labs/FLUX.1-dev": {"license": "other", "license_name": "flux-1-dev-non-commercial-license", "license_link": "LICENSE.md"},
    "black-forest-labs/FLUX.1-schnell": {"license": "apache-2.0"},
    "stabilityai/stable-diffusion-xl-base-1.0": {"license": "openrail++"},
}


class Sample(NamedTuple):
    """A prompt, and the file of what was drawn for it."""

    prompt: str
    file: str


class Facts(NamedTuple):
    """What a card says."""

    recipe: str
    key: str
    data: str  # SHA-256 of the manifest
    trigger: str
    base: Base
    pipeline: str  # the class of diffusers that draws with the base
    settings: Mapping[str, object]
    report: Mapping[str, float]
    samples: Sequence[Sample]
    kohya: str  # the file for ComfyUI and A1111, where it is another one
    programs: str  # that read it beside diffusers, as far as that was tried; else empty

    @property
    def random(self) -> bool:
        """Whether the weights of the base were drawn: only its shape was taken."""
        return self.settings.get("init") == "random"


def card(facts: Facts) -> str:
    """The whole file."""
    import yaml

    header = yaml.safe_dump(_header(facts, licence_of(facts.base)), sort_keys=False, allow_unicode=True, width=1000)
    report = facts.report
    judged = (
        f"Loss on {report['held_out']} held-out images: {report['eval_loss_before']:.4f} without it, {report['eval_loss_after']:.4f} with it.\n"
        if report["held_out"]
        else "No images were held out, so it was not judged.\n"
    )
    licence = licence_of(facts.base)
    base = f"[{facts.base.name}](https://huggingface.co/{facts.base.name})" if facts.base.revision else f"the folder `{facts.base.name}`"
    if facts.random:
        base = "a base with random weights"
    trigger = f"Write `{facts.trigger}` into the prompt.\n\n" if facts.trigger else ""
    terms = f"Its licence is that of its base: {_named(licence)}.\n\n" if licence and not facts.random else ""
    settings = "".join(f"| {name} | {json.dumps(value)} |\n" for name, value in sorted(facts.settings.items()))
    return (
        f"---\n{header}---\n\n# {facts.trigger or 'A LoRA adapter'}\n\n"
        f"A LoRA adapter for {base}, made by `{facts.recipe}`: {report['steps']} steps on {report['images']} images.  {judged}\n{trigger}{terms}"
        f"{_use(facts)}![samples](samples.png)\n\n"
        f"| setting | value |\n|---|---|\n{settings}| data, SHA-256 | `{facts.data}` |\n| key | `{facts.key}` |\n"
    )


def licence_of(base: Base) -> dict[str, str]:
    """The fields of a model card that name the licence, for another repository than the base's own; none where it is not known."""
    found = dict(base.licence or (LICENCES.get(base.name, {}) if base.revision else {}))
    link = found.get("license_link", "")
    if link and "://" not in link:
        del found["license_link"]
        if base.revision:
            found["license_link"] = f"https://huggingface.co/{base.name}/blob/{base.revision}/{link}"
    return found


def _header(facts: Facts, licence: Mapping[str, str]) -> dict[str, object]:
    """What the Hub and its programs read: https://huggingface.co/docs/hub/model-cards."""
    found: dict[str, object] = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
    if facts.base.revision and not facts.random:
        found |= {"base_model": facts.base.name, "base_model_relation": "adapter"}
    found |= licence
    if facts.trigger:
        found["instance_prompt"] = facts.trigger
    found["tags"] = ["text-to-image", "lora", "diffusers"]
    if facts.samples:
        found["widget"] = [{"text": sample.prompt, "output": {"url": sample.file}} for sample in facts.samples]
    return found


def _named(licence: Mapping[str, str]) -> str:
    name = licence.get("license_name") or licence.get("license", "see there")
    return f"[{name}]({licence['license_link']})" if "license_link" in licence else name


def _use(facts: Facts) -> str:
    if facts.random:
        return "It belongs to weights that were drawn from a seed, to test the training. Nothing can be loaded beneath it.\n\n"
    base = f'"{facts.base.name}", revision="{facts.base.revision}"' if facts.base.revision else f'"{facts.base.name}"'
    prompt = facts.samples[0].prompt if facts.samples else facts.trigger
    code = (
        f"import torch\nfrom diffusers import {facts.pipeline}\n\n"
        f'pipeline = {facts.pipeline}.from_pretrained({base}, torch_dtype=torch.bfloat16).to("cuda")\n'
        f'pipeline.load_lora_weights("this/folder")\nimage = pipeline({json.dumps(prompt, ensure_ascii=False)}).images[0]\n'
    )
    file = facts.kohya or "pytorch_lora_weights.safetensors"
    also = " It holds the same weights as `pytorch_lora_weights.safetensors`, under the names that those programs know." if facts.kohya else ""
    elsewhere = f"For {facts.programs}: put `{file}` into their folder of LoRAs.{also}\n\n" if facts.programs else ""
    return f"```python\n{code}```\n\n{elsewhere}"
