"""Options of scripts that declare them as dataclasses, decorators or parameters."""

from __future__ import annotations

import pytest

from runner.interface import drafting, script_hydra, scripts
from runner.language import document, parse

HF = '''
from dataclasses import dataclass, field
from typing import Literal, Optional
from transformers import HfArgumentParser, TrainingArguments

@dataclass
class Base:
    seed: int = 1

@dataclass
class Args(Base):
    """About the data."""
    dataset_path: str = field(metadata={"help": "where it " "is"})
    model_name_or_path: Optional[str] = field(default="gpt2", metadata={"help": "a model"})
    learning_rate: float = field(default=5e-5)
    mode: Literal["fast", "slow"] = "fast"
    packing: bool = False
    shuffle: bool = True
    betas: list[float] = field(default_factory=lambda: [0.9])
    hooks: dict = field(default_factory=dict)

def main():
    args, training = HfArgumentParser((Args, TrainingArguments)).parse_args_into_dataclasses()
    open(args.dataset_path)
'''
TYRO = """
import tyro
from dataclasses import dataclass
@dataclass
class Config:
    out_dir: str
    weight_decay: float = 0.1
    bf16: bool = True
cfg = tyro.cli(Config)
"""
CLICK = """
import click
@click.command()
@click.option("--lr", default=0.1, type=float, help="how fast")
@click.option("--opt", "optimizer", type=click.Choice(["adam", "sgd"]), default="adam")
@click.option("--fp16/--no-fp16", default=False)
@click.option("--verbose", is_flag=True)
@click.option("--layers", type=click.IntRange(1, 9), required=True)
@click.argument("data", type=click.Path(exists=True))
def main(lr, optimizer, fp16, verbose, layers, data):
    open(data)
"""
TYPER = """
from typing import Annotated
import typer
app = typer.Typer()
@app.command()
def main(data: str, lr: float = 0.1, epochs: Annotated[int, typer.Option("--n", help="so many")] = 3,
         mixed: bool = True, out: str = typer.Option(..., help="where to")):
    open(out, "w")
app()
"""


def options(source: str) -> dict[str, scripts.Option]:
    return {option.name: option for option in scripts.read(source).options}


def test_the_fields_of_dataclasses_are_the_options_of_hf_argument_parser() -> None:
    found = options(HF)
    assert list(found) == [
        "seed",
        "dataset_path",
        "model_name_or_path",
        "learning_rate",
        "mode",
        "packing",
        "shuffle",
        "betas",
        "output_dir",
    ]
    data, rate = found["dataset_path"], found["learning_rate"]
    assert (data.flag, data.required, data.role, data.help) == (
        "--dataset_path",
        True,
        "input",
        "where it is",
    )
    assert (rate.type, rate.default, rate.required) == ("number", "5e-05", False)
    assert (
        found["mode"].choices == ("fast", "slow")
        and found["betas"].many
        and found["model_name_or_path"].model
    )
    assert (
        found["packing"].switch
        and not found["packing"].negative
        and found["shuffle"].negative == "--no_shuffle"
    )
    notes = " ".join(scripts.read(HF).notes)
    assert (
        "only --output_dir of the options of TrainingArguments" in notes
        and "hooks keeps its default" in notes
    )


def test_tyro_writes_names_with_hyphens_and_switches_with_a_no() -> None:
    found = options(TYRO)
    assert (
        found["weight_decay"].flag == "--weight-decay"
        and found["out_dir"].required
        and found["out_dir"].role == "output"
    )
    assert (found["bf16"].switch, found["bf16"].negative, found["bf16"].default) == (
        True,
        "--no-bf16",
        "True",
    )


def test_the_decorators_of_click_are_read() -> None:
    found = options(CLICK)
    assert (found["lr"].type, found["lr"].default, found["lr"].help) == (
        "number",
        "0.1",
        "how fast",
    )
    assert found["optimizer"].flag == "--opt" and found["optimizer"].choices == ("adam", "sgd")
    assert (
        found["fp16"].negative == "--no-fp16"
        and found["verbose"].switch
        and not found["verbose"].negative
    )
    assert found["layers"].type == "integer" and found["layers"].required
    assert found["data"].flag == "" and found["data"].required and found["data"].role == "input"


@pytest.mark.parametrize("how", ["app()", "typer.run(main)"])
def test_the_parameters_of_a_typer_command_are_read(how: str) -> None:
    found = options(
        TYPER if how == "app()" else TYPER.replace("@app.command()\n", "").replace("app()\n", how)
    )
    assert found["data"].flag == "" and found["data"].required
    assert (found["lr"].flag, found["lr"].type, found["lr"].default) == ("--lr", "number", "0.1")
    assert (found["epochs"].flag, found["epochs"].default, found["epochs"].help) == (
        "--n",
        "3",
        "so many",
    )
    assert (
        found["mixed"].negative == "--no-mixed"
        and found["out"].required
        and found["out"].role == "output"
    )


@pytest.mark.parametrize(
    "source",
    [
        'import click\n@click.command()\n@click.option("--tag", multiple=True)\n@click.option("--size", nargs=2, type=int)\ndef main(tag, size): pass\n',
        "import typer\ndef main(tag: list[str] = [], size: tuple[int, int] = (1, 2)): pass\ntyper.run(main)\n",
    ],
)
def test_an_option_that_is_written_once_for_each_value_is_no_list(source: str) -> None:
    script = scripts.read(source)
    assert "tag" not in {option.name for option in script.options}
    assert any(
        "--tag keeps its default, because the option is repeated for each value" in note
        for note in script.notes
    )
    assert all(option.many and option.type == "integer" for option in script.options)


HYDRA = """
import hydra
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    open(cfg.out, "w").write(str(cfg.lr))
main()
"""
STORED = """
import hydra
from dataclasses import dataclass
from omegaconf import MISSING
@dataclass
class Config:
    data: str = MISSING
    lr: float = 0.1
    mixed: bool = False
ConfigStore.instance().store(name="config", node=Config)
@hydra.main(config_name="config")
def main(cfg): pass
"""


def test_the_configuration_of_hydra_is_options_by_their_path() -> None:
    values = {
        "defaults": ["_self_", {"opt": "adam"}],
        "lr": 0.1,
        "tag": "???",
        "on": True,
        "model": {"width": 8},
        "out": "m.txt",
        "xs": [1],
    }
    conf = script_hydra.HydraConfig("src/conf", values, {"opt": ("adam", "sgd")})
    script = scripts.read(
        HYDRA, lambda folder, name: conf if (folder, name) == ("conf", "config") else None
    )
    found = {option.name: option for option in script.options}
    assert [option.flag for option in script.options] == [
        "opt=",
        "lr=",
        "tag=",
        "on=",
        "model.width=",
        "out=",
    ]
    assert (
        found["opt"].choices == ("adam", "sgd")
        and found["opt"].default == "'adam'"
        and found["tag"].required
    )
    assert (found["model_width"].type, found["model_width"].default, found["on"].type) == (
        "integer",
        "8",
        "boolean",
    )
    assert found["out"].role == "output" and script.reads == ("src/conf/",)
    notes = " ".join(script.notes)
    assert "opt.NAME=VALUE" in notes and "xs keeps its value from the configuration" in notes
    text = drafting.draft(
        "mine", "src/train.py", script, ["src/train.py"], "./mine.yaml", lambda path: ""
    ).text
    assert (
        "[python, src/train.py, hydra.run.dir=.]" in text
        and '- "model.width={{ inputs.model_width }}"' in text
        and '- "on={{ inputs.on }}"' in text
    )
    parse.recipe(document.parse(text, "mine.yaml"))


def test_a_class_in_the_store_of_hydra_is_its_options_and_a_missing_file_is_said() -> None:
    found = options(STORED)
    assert (
        found["data"].required
        and (found["lr"].flag, found["lr"].default) == ("lr=", "0.1")
        and not found["mixed"].switch
    )
    assert "config.yaml was not found" in " ".join(scripts.read(HYDRA).notes)
