"""Gather the facts that preflight rules ask for, and have them judged: what a step tells its program, its model, its data, its packages, its host.

Nothing is gathered before a rule asks for it, and nothing at all where no step that is going to run trains.  Reads files here, what the Hub's cache
has, and, where that is not forbidden (HF_HUB_OFFLINE), the Hub itself; what it cannot read is unknown, which is no error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, Problem
from ..planning import preflight
from ..planning.preflight import Facts, Finding, Rule, Verdict
from ..planning.settings import Settings, Told, Unknown, Word, of_inputs, of_tree, of_words, words

if TYPE_CHECKING:
    from ..language.document import Document
    from .survey import Survey
    from .workspace import Workspace

NAME: Final = "gotchas.yaml"
"""A file of rules: that of the library, and one beside recipes of somebody else."""
GB: Final = 1e9
ROWS: Final = 200
"""Rows of the data that are looked at."""
_LARGE: Final = 1 << 20  # bytes of a program or a configuration that is read
_PATIENCE: Final = 5.0  # seconds for an answer of the Hub
_HERE: Final = ("local", "loopback")  # drivers whose host is this machine
_CONFIGS: Final = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True, slots=True)
class Library:
    """The rules in force, with what their files say of names and tools."""

    rules: tuple[Rule, ...] = ()
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tools: Mapping[str, Sequence[str]] = field(default_factory=dict)


def check(
    ws: Workspace,
    found: Survey,
    numbers: Sequence[int],
    *,
    driver: str = "local",
    host: Mapping[str, object] | None = None,
    current_python: bool = False,
    allow: Iterable[str] = (),
) -> Verdict:
    """What the rules say about these nodes.  `host` are the facts of one that was asked.  Raises NotFound, and Invalid for somebody's own rules."""
    allowed = frozenset(allow)
    numbers = [n for n in numbers if "run" in found.plan.details()[n]]
    if not numbers or "all" in allowed:
        return Verdict()
    library = load(_homes(found))
    known = {rule.id for rule in library.rules}
    if strange := sorted(allowed - known):
        from ..errors import NotFound, did_you_mean

        raise NotFound(f'there is no rule "{strange[0]}"', fix=did_you_mean(strange[0], known) or "docs/preflight.md lists them")
    rules = [rule for rule in library.rules if rule.id not in allowed]
    looks = _Looks(ws, found, library, driver, host, current_python)
    verdicts = []
    for n in numbers:
        facts, trains = looks.of(n)
        about = ("training", "step") if trains else ("step",)
        verdicts.append(preflight.judge([rule for rule in rules if rule.about in about], facts, found.plan.nodes[n].id))
    whole = [rule for rule in rules if rule.about == "recipe"]
    if whole:
        verdicts.append(preflight.judge(whole, looks.of(numbers[0])[0]))
    return preflight.together(verdicts)


def refuse(verdict: Verdict, found: Survey) -> None:
    """Raise Invalid with the findings that are errors, if there are any."""
    if any(finding.rule.severity == "error" for finding in verdict.findings):
        raise Invalid(problems([each for each in verdict.findings if each.rule.severity == "error"], found))


def problems(findings: Iterable[Finding], found: Survey) -> list[Problem]:
    """Findings as they are shown, each with the place in the recipe that it is about."""
    from ..language import document

    try:
        source: Document | None = document.read(found.source)
    except (Invalid, OSError):
        source = None
    shown = []
    for finding in findings:
        remedy = finding.remedy + (f" (to run all the same: --allow {finding.rule.id})" if finding.rule.severity == "error" else "")
        where = source.locate(_place(finding, source), key=True) if source is not None else None
        shown.append(Problem(finding.rule.id, finding.message, where, remedy, finding.rule.severity))
    return shown


def remedies(finding: Finding, found: Survey) -> tuple[dict[str, object], list[str]]:
    """What a finding's fix amounts to in this recipe: inputs to type, by name; and lines to write into it."""
    typed: dict[str, object] = {}
    written: list[str] = []
    step = _written_as(finding.step)
    used = "/" in finding.step
    for name, value in finding.fix.get("settings", {}).items():
        origin = finding.origins.get(name)
        if origin is not None and origin.kind == "input" and used:
            written.append(f"in step {step}: with: {{{origin.name}: {json.dumps(value)}}}")
        elif origin is not None and origin.kind == "input" and origin.name in found.plan.inputs:
            typed[origin.name] = value
        elif origin is not None and origin.kind == "file":
            written.append(f"in {origin.file} of step {step}: {origin.name}: {json.dumps(value)}")
        else:
            option = origin.name if origin is not None else f"--{name}"
            written.append(f"in the command of step {step}: {option} {value if isinstance(value, str) else json.dumps(value)}")
    for kind in ("env", "resources"):
        if values := finding.fix.get(kind):
            said = ", ".join(f"{name}: {json.dumps(value) if kind == 'env' else value}" for name, value in values.items())
            written.append(f"in step {step}: {kind}: {{{said}}}")
    return typed, written


def load(homes: Iterable[str] = ()) -> Library:
    """The rules of the library, and of the folders of other people's recipes.  Raises Invalid with every problem of theirs."""
    from ..language import document

    ours = _ours()
    rules, names, tools = list(ours.rules), dict(ours.names), dict(ours.tools)
    for home in homes:
        path = Path(home) / NAME
        read = document.read(path)
        if wrong := faults(read):
            raise Invalid(wrong)
        theirs = _plain(read.value)
        replaced = {each["id"] for each in theirs.get("rules", ())}
        rules = [*(rule for rule in rules if rule.id not in replaced), *preflight.rules(theirs)]
        names |= {name: [*names.get(name, ()), *more] for name, more in theirs.get("names", {}).items()}
        tools |= {tool: [*tools.get(tool, ()), *more] for tool, more in theirs.get("tools", {}).items()}
    return Library(tuple(rules), names, tools)


@lru_cache(maxsize=1)
def _ours() -> Library:
    from ..language import document, library

    tree = _plain(document.read(library.home() / "recipes" / NAME).value)
    return Library(preflight.rules(tree), tree.get("names", {}), tree.get("tools", {}))


def faults(read: Document) -> list[Problem]:
    """Everything in which a gotchas file is not what its schema says, and every expression in it that cannot be read."""
    from jsonschema import Draft202012Validator

    from ..language import library

    schema = json.loads((library.home() / "schemas" / "gotchas.schema.json").read_text("utf-8"))
    wrong = [
        read.problem("bad-rule", _worded(error), tuple(error.absolute_path), fix=str(error.schema.get("description", "")))
        for error in Draft202012Validator(schema).iter_errors(read.value)
    ]
    if wrong:
        return wrong
    seen: set[str] = set()
    for n, rule in enumerate(_plain(read.value).get("rules", ())):
        if rule["id"] in seen:
            wrong.append(read.problem("bad-rule", f'there are two rules "{rule["id"]}"', ("rules", n, "id"), fix="call one of them otherwise"))
        seen.add(rule["id"])
        for where, error in preflight.faults(rule):
            wrong.append(read.problem("bad-rule", str(error), ("rules", n, *where), fix=error.fix, offset=error.offset, length=error.length))
    return wrong


def _worded(error: Any) -> str:
    """What jsonschema found, in our words."""
    name = ".".join(str(part) for part in error.absolute_path) or "the file"
    match error.validator:
        case "additionalProperties":
            strange = sorted(set(error.instance) - set(error.schema.get("properties", ())))
            return f'{name} has no key "{strange[0]}"'
        case "required":
            lacking = [key for key in error.validator_value if key not in error.instance]
            return f"{name} says no {lacking[0]}"
        case "type":
            return f"{name} must be {'a mapping' if error.validator_value == 'object' else 'a list' if error.validator_value == 'array' else 'text'}"
        case "enum":
            return f"{name} must be one of {', '.join(error.validator_value)}"
        case _:
            return f"{name} cannot be {json.dumps(error.instance)[:60]}"


def _homes(found: Survey) -> tuple[str, ...]:
    """The folders of recipes that bring rules of their own."""
    from ..language import library

    ours = str(library.home() / "recipes")
    return tuple(home for home in dict.fromkeys(found.plan.homes) if os.path.exists(f"{home}/{NAME}") and os.path.realpath(home) != ours)


def _plain(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _place(finding: Finding, source: Document) -> tuple[str, ...]:
    """The input that says what is wrong, where there is one in this file; else the step."""
    inputs = source.value.get("inputs", {}) if isinstance(source.value, dict) else {}
    if "/" not in finding.step:  # else they are the inputs of the recipe that it uses
        for origin in finding.origins.values():
            if origin.kind == "input" and isinstance(inputs, dict) and origin.name in inputs:
                return ("inputs", origin.name)
    return ("steps", _written_as(finding.step)) if finding.step else ("recipe",)


def _written_as(step: str) -> str:
    """The name of a step as the recipe has it: that of a matrix for one of its instances, that of a `uses` for a step of what it uses."""
    return re.split(r"[\[/]", step)[0]


# -- one step ----------------------------------------------------------------------------------------------------------------------------------------


class _Looks:
    """The facts of each step; what steps share is looked at once."""

    def __init__(self, ws: Workspace, found: Survey, library: Library, driver: str, host: Mapping[str, object] | None, current_python: bool) -> None:
        self._ws, self._found, self._library, self._driver = ws, found, library, driver
        self._current_python = current_python
        self._models: dict[str, Facts] = {}
        self._data: dict[tuple[str, object, str], Facts] = {}
        self._sources: dict[str, dict[str, str]] = {}
        here = partial(_here, ws) if driver in _HERE and host is None else None
        self._host = Facts(host or {}, preflight.NEEDS["host"], here)

    def of(self, n: int) -> tuple[dict[str, object], bool]:
        """Every namespace for a step, and whether it trains."""
        plan = self._found.plan
        node, detail = plan.nodes[n], plan.details()[n]
        scope = _scope(detail, node.id)
        takes = self._takes(node.prefix)
        line = [_addressed(word, takes) for word in words(detail, scope)]
        inputs = {name: _address(value, takes) for name, value in detail["scope"]["inputs"].items()}
        configs, broken = self._configs(n, [*(word.text for word in line if word.text), *map(str, inputs.values())])
        told = [*of_words(line), *(each for _, tree, file in configs for each in of_tree(tree, scope, file))]
        settings = Settings([*_derived(told), *told, *of_inputs(inputs), *_derived(of_inputs(inputs))], self._library.names)
        imports: list[list[str]] = []

        def code() -> dict[str, object]:
            if not imports:
                imports.extend(_code(self._found, n))
            return {"imports": imports[0], "keywords": imports[1]}

        plainly = [word.text for word in line if word.text is not None]
        named = _called_training([node.id, *plainly[:4]])
        likely = bool(detail["accelerate"] or detail["state"] or named)
        tools = preflight.tools_of(plainly, code()["imports"] if likely else (), self._library.tools)  # type: ignore[arg-type]
        trains = bool(detail["accelerate"] or detail["state"] or (named and (tools or detail["resources"].get("gpus"))))
        step = self._step(n, plainly, tools, configs, broken, code)
        facts = preflight.world({})
        facts |= {
            "recipe": Facts(self._recipe()),
            "inputs": Facts(inputs),
            "settings": settings,
            "step": step,
            "model": self._model(settings),
            "host": self._host,
            "environment": self._environment(n),
            "kept": Facts({}, preflight.NEEDS["kept"], partial(self._kept, n)),
        }
        facts["gpu"] = Facts({}, preflight.NEEDS["gpu"], partial(_gpu, step, self._host))
        facts["data"] = self._data_of(settings, facts["model"])
        facts["memory"] = Facts({}, preflight.NEEDS["memory"], partial(_memory, self._ws, self._found, n, facts))
        return facts, trains

    def _takes(self, prefix: str) -> dict[str, str]:
        """Where what lies below `inputs/` in attempts comes from: for all steps of one recipe, as each sees only its own."""
        if prefix not in self._sources:
            nodes = [node for node in self._found.plan.nodes if node.prefix == prefix]
            self._sources[prefix] = {name: address for node in nodes for name, _, address, *_ in node.takes}
        return self._sources[prefix]

    def _recipe(self) -> dict[str, object]:
        limit = (self._found.plan.settings.get("limits") or {}).get("time")
        return {"id": self._found.plan.recipe, "hours": limit / 3600 if limit else None}

    def _step(
        self,
        n: int,
        line: Sequence[str],
        tools: Sequence[str],
        configs: Sequence[tuple[str, object, str]],
        broken: Sequence[str],
        code: Callable[[], Mapping[str, object]],
    ) -> Facts:
        detail, node = self._found.plan.details()[n], self._found.plan.nodes[n]
        wants = detail["resources"]
        launcher = _launcher(line, tools)
        gpus = wants.get("gpus")
        block = detail["accelerate"] or {}
        processes: object = (gpus or 1) * (detail["nodes"] if isinstance(detail["nodes"], int) else 1)
        if isinstance(block.get("processes"), int):
            processes = block["processes"]
        given = {source for _, _, source, _ in detail["secrets"] if os.environ.get(source)}
        sections = [key for _, tree, _ in configs if isinstance(tree, Mapping) for key in tree]
        env = {name: value for name, value in detail["env"].items() if value is not None}
        return Facts(
            {
                "id": node.id,
                "tools": list(tools),
                "launcher": launcher,
                "method": _method(line),
                "gpus": gpus,
                "gpu": wants.get("gpu"),
                "gpu_memory": wants["gpu_memory"] / GB if wants.get("gpu_memory") and gpus else None,
                "processes": processes if launcher == "accelerate" or tools else 1,
                "nodes": detail["nodes"] if isinstance(detail["nodes"], int) else 1,
                "state": bool(detail["state"]),
                "retries": detail["retries"],
                "env": Facts({name: value for name, value in env.items()}),
                "secrets": sorted(given),
                "image": detail["image"],
                "git": [each for each in detail["git"]],
                "remote": self._driver not in _HERE,
                "config_sections": sections,
                "config_kind": "rl" if {"trainer", "orchestrator"} & set(sections) else "",
                "config_faults": list(broken),
            },
            gather=code,
        )

    def _configs(self, n: int, named: Sequence[str]) -> tuple[list[tuple[str, object, str]], list[str]]:
        """The configuration files of a step: those that the recipe writes, and those of `named` that lie here.  (path, tree, shown name)."""
        detail, node = self._found.plan.details()[n], self._found.plan.nodes[n]
        found: list[tuple[str, object, str]] = []
        broken: list[str] = []

        def add(name: str, data: bytes) -> None:
            try:
                found.append((name, _parsed(name, data), name))
            except ValueError as error:
                broken.append(f"{name}: {error}")

        for path, tree in detail["files"].items():
            if isinstance(tree, str):
                if path.endswith(_CONFIGS) and "{{" not in tree:
                    add(path, tree.encode())
            elif path.endswith(_CONFIGS):
                found.append((path, tree, path))
        for name in dict.fromkeys(named):
            if name.endswith(_CONFIGS) and not name.startswith("-") and name not in detail["files"]:
                for place in (self._ws.root, Path(self._found.plan.homes[node.home])):
                    if (data := _bytes(place / name, _LARGE)) is not None:
                        add(name, data)
                        break
        return found, broken

    def _model(self, settings: Settings) -> Facts:
        told = settings.told("base")
        address = told.value if told is not None else None
        if not isinstance(address, str):
            return Facts({}, "the name of the model" if address is None else preflight.NEEDS["model"])
        if address not in self._models:
            random = settings.told("init") is not None and settings["init"] == "random"
            gather = partial(model_facts, self._ws.absolute(_bare(address)), address, random=random)
            self._models[address] = Facts({"address": _bare(address)}, preflight.NEEDS["model"], gather)
        return self._models[address]

    def _data_of(self, settings: Settings, model: object) -> Facts:
        told = settings.told("dataset")
        address = told.value if told is not None else None
        if not isinstance(address, str) or "://" in address:
            return Facts({}, preflight.NEEDS["data"])
        longest = settings.told("max_length")
        limit = longest.value if longest is not None else None
        base = settings.told("base")
        key = (address, limit, str(base.value) if base is not None else "")
        if key not in self._data:
            tokenizer = self._ws.absolute(_bare(str(base.value))) if base is not None else None
            gather = partial(data_facts, self._ws.absolute(address), limit if isinstance(limit, int) else None, tokenizer)
            self._data[key] = Facts({}, preflight.NEEDS["data"], gather)
        return self._data[key]

    def _environment(self, n: int) -> Mapping[str, object]:
        node = self._found.plan.nodes[n]
        needs = preflight.NEEDS["environment"]
        if node.lock and not self._current_python:
            path = Path(self._found.plan.homes[node.home]) / node.lock
            return Facts({}, gather=partial(_locked, path)) if path.is_file() else Facts({}, needs)
        if self._found.plan.details()[n]["image"]:
            return Facts({}, needs)
        if self._driver in _HERE:
            return _Installed()
        return Facts({}, needs)

    def _kept(self, n: int) -> dict[str, object]:
        """What earlier attempts of this step left here: the state that it would go on from, and what the last one said if it failed."""
        from ..planning.judge import world_of
        from . import checkpoints

        plan = self._found.plan
        node, detail = plan.nodes[n], plan.details()[n]
        kept: dict[str, object] = dict.fromkeys(("checkpoint", "newest", "processes", "max_steps", "torch", "numpy", "said"))
        row = self._ws.store.latest_attempts(plan.recipe, [node.id]).get(node.id)
        if row is not None and row.outcome not in ("done", ""):
            kept["said"] = _tail(self._ws.home / "runs" / row.run / f"{node.id.replace('/', '%2F')}.{row.n}.log")
        if not detail["state"] or any(need not in self._found.made for need in plan.needs(n)):
            return kept
        world, _ = world_of(node, self._found.facts, self._found.made)
        found = checkpoints.made_under(self._ws.home / "states" / checkpoints.key(detail, world, node.id))
        if found is None:
            return kept
        generation, values = found
        name, _, pattern, *_ = detail["state"][0]
        names = checkpoints.newest_first(generation / name, pattern)
        if not names:
            return kept
        kept |= {"newest": names[0], "max_steps": values.get("max_steps")}
        for each, verdict in checkpoints.judged(generation / name, pattern):
            if verdict.ok:
                return kept | {"checkpoint": each, "processes": verdict.world}
        return kept


def _tail(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            return file.read().decode(errors="replace")
    except OSError:
        return None


def _scope(detail: Mapping[str, Any], id: str) -> dict[str, Any]:
    """What templates of a step read, before it runs: no checkpoint yet, and nothing of the host."""
    from ..language.template import Place

    base = detail["scope"]
    state = {name: Place(path, {"latest": None}) for name, path, *_ in detail["state"]}
    return {
        "inputs": base["inputs"],
        "steps": base["steps"],
        "outputs": base["outputs"],
        "matrix": base["matrix"],
        "state": state,
        "step": {"id": id},
    }


def _addressed(word: Word, takes: Mapping[str, str]) -> Word:
    return Word(str(_address(word.text, takes)), word.leaf) if word.text in takes else word


def _address(value: object, takes: Mapping[str, str]) -> object:
    return takes[value] if isinstance(value, str) and value in takes else value


def _bare(address: str) -> str:
    return address.removeprefix("hf://").partition("@")[0] if address.startswith("hf://") else address


def _derived(told: Iterable[Told]) -> Iterator[Told]:
    """What some tools say in other ways: `bf16: true` is a precision, a LoRA module a use of adapters."""
    for each in told:
        if each.key in ("bf16", "fp16") and each.value is True:
            yield each._replace(key="precision", value=each.key)
        elif each.key == "network_module" and "lora" in str(each.value):
            yield each._replace(key="use_peft", value=True)
        elif (each.key, each.value) in (("flash_attention", True), ("flash_attn", "fa2")):
            yield each._replace(key="attention", value="flash_attention_2")
        elif each.key == "seq_len":
            yield each._replace(key="config_seq_len")


_METHODS: Final = ("sft", "dpo", "orpo", "kto", "cpo", "grpo", "rloo", "ppo", "reward", "cpt")


def _method(line: Sequence[str]) -> str | None:
    """The kind of training, from the names of what is started."""
    for word in line[:12]:
        if not word.startswith("-"):
            for part in re.split(r"[^a-z]+", word.rpartition("/")[2].lower()):
                if part in _METHODS:
                    return part
    return None


def _called_training(names: Sequence[str]) -> bool:
    """Whether a step, or the program that it starts, is called a training: `train`, `my_train.py`, `trl sft`."""
    parts = [re.split(r"[^a-z]+", name.rpartition("/")[2].lower()) for name in names]
    return any("train" in each for each in parts) or any(name in _METHODS for name in names[1:])


def _launcher(line: Sequence[str], tools: Sequence[str]) -> str:
    heads = [word.rpartition("/")[2] for word in line[:4]]
    for word in heads:
        if word.startswith("accelerate"):
            return "accelerate"
        if word in ("torchrun", "deepspeed", "uv", "srun", "mpirun"):
            return word
        if word in ("trl", "axolotl", "llamafactory-cli", "simpletuner", "unsloth"):
            return word
    return "python" if heads and (heads[0].startswith("python") or heads[0].endswith(".py")) else "other"


def _parsed(name: str, data: bytes) -> object:
    """A configuration file.  Raises ValueError in words."""
    if name.endswith(".toml"):
        import tomllib

        return tomllib.loads(data.decode("utf-8"))
    if name.endswith(".json"):
        return json.loads(data)
    from ..language import document

    try:
        return document.parse(data, name).value
    except Invalid as error:
        first = error.problems[0]
        raise ValueError(first.message + (f", line {first.where.line}" if first.where else "")) from None


def _code(found: Survey, n: int) -> tuple[list[str], list[str]]:
    """What the step's Python files import, as dotted names, and the keywords that they pass to what is called …Config or …Arguments."""
    node = found.plan.nodes[n]
    imports: dict[str, None] = {}
    keywords: dict[str, None] = {}
    home = Path(found.plan.homes[node.home])
    for pattern in node.code:
        for name, content in found.facts.code.get((node.home, pattern)) or ():
            if name.endswith(".py"):
                one, two = _module(str(home / name), content)
                imports.update(dict.fromkeys(one))
                keywords.update(dict.fromkeys(two))
    return list(imports), list(keywords)


@lru_cache(maxsize=256)
def _module(path: str, content: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of one file, whose content is in the key of the cache."""
    import ast

    try:
        data = Path(path).read_bytes()
        tree = ast.parse(data[:_LARGE], path) if len(data) <= _LARGE else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError):
        return (), ()
    imports, keywords = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if called.endswith(("Arguments", "Config")):
                keywords += [word.arg for word in node.keywords if word.arg]
    return tuple(imports), tuple(keywords)


# -- packages ----------------------------------------------------------------------------------------------------------------------------------------

_PINNED: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;\\]+)", re.MULTILINE)


def _locked(path: Path) -> dict[str, object]:
    """Packages of a lock by name, each version as a list of numbers."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return {}
    if path.suffix == ".toml":
        import tomllib

        try:
            rows = [(str(each.get("name", "")), str(each.get("version", ""))) for each in tomllib.loads(text).get("packages", ())]
        except (tomllib.TOMLDecodeError, AttributeError):
            return {}
    else:
        rows = [(found[1], found[2]) for found in _PINNED.finditer(text)]
    return _packages(rows)


class _Installed(Mapping[str, object]):
    """Packages of the Python that steps run in here, each asked for when a rule does: reading all would take longer than the rest."""

    def __getitem__(self, name: str) -> object:
        from importlib.metadata import PackageNotFoundError, version

        try:
            if name == "cuda":
                return _packages([("torch", version("torch"))])["cuda"]
            return _packages([(name, version(name.replace("_", "-")))])[name]
        except PackageNotFoundError:
            return None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _packages(rows: Iterable[tuple[str, str]]) -> dict[str, object]:
    found: dict[str, object] = {}
    cuda: float | None = None
    for name, version in rows:
        plain = re.sub(r"[-.]+", "_", name).lower()
        if plain in found:
            continue  # of two that are installed the first is imported
        found[plain] = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
        if plain == "torch" and (built := re.search(r"\+cu(\d+)(\d)", version)):
            cuda = float(f"{built[1]}.{built[2]}")
        elif plain.startswith("nvidia_cuda_runtime") and cuda is None:
            numbers = re.findall(r"\d+", version)
            cuda = float(f"{numbers[0]}.{numbers[1]}") if len(numbers) > 1 else None
    return {**found, "cuda": cuda}


# -- the model ---------------------------------------------------------------------------------------------------------------------------------------


def model_facts(folder: Path, address: str, *, random: bool = False) -> dict[str, object]:
    """What a model's own files say: those of a folder here, of the Hub's cache, or of the Hub.  What is not to be had is left out: unknown."""
    name = _bare(address)
    if folder.is_dir():
        known: dict[str, object] = {"exists": True, "hub": False, "gated": False, "access": "granted"}
        weights = [path.stat().st_size for path in folder.glob("**/*") if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()]
        known["size"] = round(sum(weights) / GB, 3)
        return known | _read_model(lambda file: _bytes(folder / file))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return {"exists": False, "hub": False} if not address.startswith("hf://") else {}
    hub = {"hub": True} | _ask_hub(name)
    snapshot = _cached(name)
    if snapshot is not None:
        return {"exists": True} | hub | _read_model(lambda file: _bytes(snapshot / file))
    return hub | (_read_model(partial(_fetched, name)) if hub.get("access") == "granted" else {})


def _read_model(read: Callable[[str], bytes | None]) -> dict[str, object]:
    config, pipeline, tokens = (_mapping(read(name)) for name in ("config.json", "model_index.json", "tokenizer_config.json"))
    found: dict[str, object] = {"pipeline": pipeline.get("_class_name") if pipeline else None}
    if config:
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        architectures = config.get("architectures") or [None]
        found |= {
            "config": config,
            "architecture": architectures[0],
            "type": config.get("model_type"),
            "vision": "vision_config" in config or "visual" in config or str(architectures[0]).endswith("VisionModel"),
            "vocabulary": text.get("vocab_size"),
            "positions": text.get("max_position_embeddings"),
        }
    elif pipeline:
        found |= dict.fromkeys(("architecture", "type", "vocabulary", "positions")) | {"vision": False}
    if tokens:
        template = tokens.get("chat_template") or (read("chat_template.jinja") or b"").decode(errors="replace")
        begin = _token(tokens.get("bos_token"))
        found |= {
            "pad": _token(tokens.get("pad_token")),
            "eos": _token(tokens.get("eos_token")),
            "chat_template": bool(template),
            "template_bos": bool(begin) and ("bos_token" in str(template) or str(begin) in str(template)),
            "adds_bos": bool(tokens.get("add_bos_token", False)) or _adds(read("tokenizer.json"), begin),
        }
    return found


def _token(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _adds(data: bytes | None, begin: str | None) -> bool:
    """Whether the tokenizer's own post-processor puts the beginning token in front."""
    if not begin or not data:
        return False
    after = _mapping(data).get("post_processor")
    return begin in json.dumps(after, ensure_ascii=False) if after else False


def _bytes(path: Path, most: int = 64 * _LARGE) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size < most else None
    except OSError:
        return None


def _mapping(data: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(data) if data else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _cached(name: str) -> Path | None:
    """The newest snapshot of a model in the Hub's cache here."""
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub")
    folder = Path(home) / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        return max(folder.iterdir(), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def _ask_hub(name: str) -> dict[str, object]:
    """Whether there is such a model, and whether it may be read.  Nothing where the Hub may not, or cannot, be asked."""
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True", "ON"):
        return {}
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        return {}
    api: Any = HfApi()
    try:
        info = api.model_info(name, timeout=_PATIENCE, files_metadata=True)
    except GatedRepoError:
        return {"exists": True, "gated": True, "access": "refused" if _has_token() else "no token"}
    except RepositoryNotFoundError:
        return {"exists": False}
    except Exception:  # its HTTP client has its own ways to say that there is no network
        return {}
    found: dict[str, object] = {"exists": True, "gated": bool(info.gated), "access": "granted"}
    sizes = [each.size for each in info.siblings or () if each.size and each.rfilename.endswith((".safetensors", ".bin"))]
    if sizes:
        found["size"] = round(sum(sizes) / GB, 1)
    if info.gated:
        try:
            api.auth_check(name)
        except GatedRepoError:
            found["access"] = "refused" if _has_token() else "no token"
        except Exception:  # as above: not known
            del found["access"]
    return found


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _fetched(name: str, file: str) -> bytes | None:
    """A small file of a model of the Hub, by way of its cache."""
    from huggingface_hub import hf_hub_download

    try:
        return _bytes(Path(hf_hub_download(name, file, etag_timeout=_PATIENCE)))
    except Exception:  # not there, or not to be had: the fact is unknown
        return None


# -- the data ----------------------------------------------------------------------------------------------------------------------------------------

_IMAGES: Final = (".png", ".jpg", ".jpeg")
_ODD: Final = (".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".avif", ".jxl")
_ROWS: Final = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


def data_facts(path: Path, limit: int | None, model: Path | None) -> dict[str, object]:
    """What the first rows of a dataset here say, and the heads of its images.  `limit` is in tokens of the model's tokenizer."""
    if not path.exists():
        return {}
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
    found: dict[str, object] = {"size": round(sum(each.stat().st_size for each in files) / GB, 3)}
    images = [each for each in files if each.suffix.lower() in (*_IMAGES, *_ODD)]
    if images:
        return found | {"rows": 0, "columns": [], "conversational": False} | _image_facts(images, files)
    found |= {"images": 0}
    rows: list[dict[str, Any]] = []
    for file in [each for each in files if each.suffix.lower() in _ROWS]:
        try:
            rows += _rows(file, ROWS - len(rows))
        except (OSError, ValueError):
            return found  # the recipe's own reading of the data tells which row is bad
        if len(rows) >= ROWS:
            break
    columns = list(dict.fromkeys(key for row in rows for key in row))
    talk = any(isinstance(row.get(name), list) for row in rows for name in ("messages", "conversations", "prompt", "chosen"))
    found |= {"rows": len(rows), "sampled": len(rows), "columns": columns, "conversational": talk}
    if all("text" in row for row in rows):
        return found | {"truncated": 0.0}  # plain text is cut in pieces, and nothing of it is lost
    lengths = _lengths(rows, model) if limit else None
    if lengths is not None and limit:
        found["longest"] = max(lengths, default=0)
        found["truncated"] = round(100 * sum(length > limit for length in lengths) / max(1, len(lengths)), 1)
    return found


def _rows(file: Path, most: int) -> list[dict[str, Any]]:
    """The first rows of a file.  Raises ValueError where they cannot be read."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        from importlib import import_module

        try:
            parquet: Any = import_module("pyarrow.parquet")
        except ImportError:
            raise ValueError("pyarrow is not here") from None
        batch = next(parquet.ParquetFile(file).iter_batches(batch_size=most), None)
        return list(batch.to_pylist()) if batch is not None else []
    with file.open("rb") as opened:
        if suffix == ".json":
            value = json.loads(opened.read(64 * _LARGE))
            return [row for row in value[:most] if isinstance(row, dict)] if isinstance(value, list) else []
        lines = [opened.readline(_LARGE).decode("utf-8", "replace") for _ in range(most)]
    lines = [line for line in lines if line.strip()]
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if isinstance(row, dict)]
    if suffix == ".txt":
        return [{"text": line} for line in lines]
    import csv

    return [dict(row) for row in csv.DictReader(lines, delimiter="\t" if suffix == ".tsv" else ",")]


def _lengths(rows: Sequence[Mapping[str, Any]], model: Path | None) -> list[int] | None:
    """Tokens of each row; None where they cannot be counted here."""
    if model is None or not (model / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def count(values: Iterable[object]) -> int:
        return len(tokenizer.encode(" ".join(text for value in values for text in _texts(value))).ids)

    # A pair is as long as its longer answer with the prompt; other columns are somebody's notes.
    read = [{name: value for name, value in row.items() if name in _LEARNT} or row for row in rows]
    answers = [[row[name] for name in ("chosen", "rejected") if name in row] or [""] for row in read]
    rest = [[value for name, value in row.items() if name not in ("chosen", "rejected")] for row in read]
    return [max(count([*common, answer]) for answer in each) for common, each in zip(rest, answers, strict=True)]


_LEARNT: Final = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction", "input", "output"),
    *("question", "answer", "response", "content"),
)
"""Columns that trainers learn from, by their usual names."""


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in ("role", "from"):
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _image_facts(images: Sequence[Path], files: Sequence[Path]) -> dict[str, object]:
    stems = [each.with_suffix("") for each in images]
    written = {each.with_suffix("") for each in files if each.suffix.lower() in (".txt", ".caption")}
    tables = any(each.name in ("metadata.jsonl", "metadata.csv", "captions.csv", "captions.jsonl") for each in files)
    return {
        "images": len(images),
        "captions_missing": 0 if tables else sum(stem not in written for stem in stems),
        "stems_twice": len(stems) - len(set(stems)),
        "odd_formats": sum(each.suffix.lower() in _ODD for each in images),
        "alpha": sum(map(_is_transparent, images[:5000])),
    }


def _is_transparent(path: Path) -> bool:
    """Whether a PNG says in its head that it has an alpha channel (colour types 4 and 6)."""
    if path.suffix.lower() != ".png":
        return False
    try:
        with path.open("rb") as file:
            head = file.read(26)
    except OSError:
        return False
    return head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) == 26 and head[25] in (4, 6)


# -- the host ----------------------------------------------------------------------------------------------------------------------------------------

SCRIPT: Final = r"""
df -Pk /dev/shm 2>/dev/null | { read -r _; read -r _ total _ && echo "shm=$((total * 1024))"; }
nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | while read -r line; do echo "capability=$line"; done
nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | while read -r line; do echo "gpu_driver=$line"; done
nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/cuda=\1/p'
"""
"""Follows the question of `drivers.machine`: what rules ask of a host besides its sizes."""


def host_facts(name: str, said: bytes) -> dict[str, object]:
    """The facts of a host, from its answer.  What it did not tell is left out: unknown."""
    from drivers import machine

    told = machine.facts(said)
    have = machine.resources(told)
    found: dict[str, object] = {"name": name, "gpus": have.gpus or 0, "gpu": have.gpu}
    for key, value in (("memory", have.memory), ("disk", have.disk), ("gpu_memory", have.gpu_memory)):
        if value:
            found[key] = round(value / GB, 1)
    for key in ("shm",):
        for text in told.get(key, ())[:1]:
            if text.isdecimal():
                found[key] = round(int(text) / GB, 3)
    for key, into in (("capability", "capability"), ("cuda", "cuda")):
        for text in told.get(key, ())[:1]:
            if re.fullmatch(r"\d+(\.\d+)?", text):
                found[into] = float(text)
    for text in told.get("gpu_driver", ())[:1]:
        if numbers := re.findall(r"\d+", text):
            found["driver"] = [int(part) for part in numbers]
    return found


def _here(ws: Workspace) -> dict[str, object]:
    """The facts of this machine."""
    import subprocess

    from drivers import machine

    done = subprocess.run(machine.question(str(ws.home), SCRIPT), capture_output=True, timeout=30)
    return host_facts("this machine", done.stdout)


async def ask(driver: Any) -> dict[str, object]:
    """The facts of the first host of a driver that answers.  Raises DriverError."""
    from contextlib import aclosing

    from drivers import machine
    from drivers.base import DriverError

    from .probe import visit

    failed: DriverError | None = None
    async with aclosing(visit(driver)) as hosts:
        async for name, host in hosts:
            if isinstance(host, DriverError):
                failed = failed or host
                continue
            try:
                said = b"".join([data async for data in host.call(machine.question(str(getattr(host, "root", ".recipe-host")), SCRIPT))])
                return host_facts(name, said)
            except DriverError as error:
                failed = failed or error
            finally:
                await host.aclose()
    if failed is not None:
        raise failed
    return {}


def _gpu(step: Facts, host: Facts) -> dict[str, object]:
    """The GPU that the step will have: that of the host that was asked, else the kind that it asks for."""
    found: dict[str, object] = {}
    try:
        if (host["gpus"] or 0) > 0:  # type: ignore[operator]
            found["name"] = host["gpu"]
            for name, key in (("capability", "capability"), ("cuda_max", "cuda"), ("memory", "gpu_memory")):
                try:
                    found[name] = host[key]
                except Unknown:
                    pass
            return found
    except Unknown:
        pass
    if isinstance(wanted := step["gpu"], str):
        found["name"] = wanted
        if (kind := _kind(wanted)) is not None:
            found["capability"] = kind.capability
    if step["gpu_memory"] is not None:
        found["memory"] = step["gpu_memory"]
    return found


def _memory(ws: Workspace, found: Survey, n: int, facts: Mapping[str, Any]) -> dict[str, object]:
    """What is reckoned that the step takes of its GPU.  Raises Unknown with the reason where that cannot be said."""
    from . import reckoning

    if not facts["step"]["gpus"]:
        return {"verdict": None}
    gpu = None
    try:
        if facts["host"]["gpus"]:
            gpu = _kind(facts["host"]["gpu"])
    except Unknown:
        pass
    reckoned = reckoning.of_step(ws, found.plan, n, gpu=gpu)
    if reckoned is None:
        return {"verdict": None}
    if reckoned.found is None:
        raise Unknown(f"the memory that it takes: {reckoned.unknown}")
    if reckoned.usable is None:
        raise Unknown("the memory of the GPU: say gpu_memory or gpu in its resources")
    return {
        "verdict": reckoned.verdict,
        "low": round(reckoned.found.low / GB, 1),
        "high": round(reckoned.found.high / GB, 1),
        "usable": round(reckoned.usable / GB, 1),
        "gpu": reckoned.gpu,
        "terms": ", ".join(f"{name} {size / GB:.1f}" for name, size in reckoning.largest(reckoned.found)),
    }


def _kind(name: object) -> Any:
    """The GPU of that name as recipes/hardware.yaml has it; None for one that it has not."""
    from ..errors import NotFound
    from . import reckoning

    try:
        return reckoning.figures().find(str(name))
    except NotFound:
        return None
