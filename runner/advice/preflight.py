"""Check a plan with the preflight rules: gather the facts of each step and judge the rules.

`facts` has one module per kind of fact. Facts are gathered when a rule first reads them. Sources
are local files, the Hub's cache, and the Hub itself unless HF_HUB_OFFLINE is set. An unreadable
fact is unknown, not an error.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import NotFound, RecipeError, did_you_mean
from ..hosts.interpreters import CURRENT, choose_python
from ..language.template import StatePath
from ..planning.judge import RESTORE
from ..planning.patterns import decode_pattern
from ..planning.step import ResourceSpec, StepSpec
from ..storage import checkpoints
from ..storage.git_checkout import is_fetched
from ..survey.explain import preimage_of
from ..survey.recipes import input_types
from . import estimates, prime_rl, rule_files, rules
from .declared import Declarations
from .facts import GB, LARGE, contents, data, machine, missing_inputs, model, packages, program
from .hardware import RESERVED
from .rules import RuleFacts, RuleFindings
from .tool_settings import (
    Setting,
    ToolSettings,
    UnknownSetting,
    Word,
    of_inputs,
    of_tree,
    of_words,
    words,
)

if TYPE_CHECKING:
    from ..storage.workspace import Workspace
    from ..survey.survey import Survey

_HERE: Final = ("local", "loopback")  # drivers that use this machine as host
_DEFAULT: Final = 1024  # default max_length of `trl`, in tokens: trl/trainer/sft_config.py


def check(
    ws: Workspace,
    found: Survey,
    numbers: Sequence[int],
    *,
    driver: str = "local",
    host: Mapping[str, object] | None = None,
    python: str = "",
    allow: Iterable[str] = (),
) -> RuleFindings:
    """Check plan nodes with the preflight rules and return the verdict.

    `host` has the facts of a probed host, `python` is the value of `--python`. Raises NotFound for
    an unknown rule in `allow`, CannotRun for a missing Python, and Invalid for an invalid
    gotchas.yaml of the user.
    """
    allowed = frozenset(allow)
    numbers = [n for n in numbers if found.plan.specs()[n].select is None]
    if not numbers or "all" in allowed:
        return RuleFindings()
    library = rule_files.load(rule_files.find_homes(found))
    _check_allowed(allowed, {rule.id for rule in library.rules})
    applied = [rule for rule in library.rules if rule.id not in allowed]
    gatherer = _FactGatherer(ws, found, library, driver, host, python)
    verdicts = []
    for n in numbers:
        facts, trains = gatherer.gather(n)
        about = ("training", "step") if trains else ("step",)
        of_step = [rule for rule in applied if rule.about in about]
        verdicts.append(rules.judge(of_step, facts, found.plan.nodes[n].id))
    of_recipe = [rule for rule in applied if rule.about == "recipe"]
    if of_recipe:
        # Every step knows the facts of its recipe.
        facts, _ = gatherer.gather(numbers[0])
        verdicts.append(rules.judge(of_recipe, facts))
    return rules.merge(verdicts)


def _check_allowed(allowed: frozenset[str], known: set[str]) -> None:
    """Raise NotFound for an allowed rule that does not exist."""
    strange = sorted(allowed.difference(known))
    if strange:
        fix = did_you_mean(strange[0], known) or "see the rules in docs/preflight.md"
        raise NotFound(f'there is no rule "{strange[0]}"', fix=fix)


class _Command(NamedTuple):
    """The command of a step, and the settings that it passes to its program."""

    texts: list[str]  # its words, without those that are unknown
    inputs: dict[str, object]
    given: list[Setting]  # from its words and its configuration files
    configs: list[tuple[object, str, str]]  # content, name and path of each file
    broken: list[str]  # errors of unreadable configuration files


class _FactGatherer:
    """Collector of each step's facts. Facts shared by steps are collected once."""

    def __init__(
        self,
        ws: Workspace,
        found: Survey,
        library: rule_files.Library,
        driver: str,
        host: Mapping[str, object] | None,
        python: str,
    ) -> None:
        self._ws, self._found, self._library, self._driver = ws, found, library, driver
        self._python, self._current_python = python, python == CURRENT
        self._models: dict[tuple[str, Path | None, Path | None], RuleFacts] = {}
        self._data: dict[tuple[str, object, str], RuleFacts] = {}
        self._sources: dict[str, dict[str, str]] = {}
        self._input_types: dict[str, dict[str, str]] | None = None
        is_here = driver in _HERE and host is None
        here = partial(machine.here, ws.home) if is_here else None
        self._host = RuleFacts(host or {}, rules.NEEDS["host"], here)

    def gather(self, n: int) -> tuple[dict[str, object], bool]:
        """Return the facts of a step in every namespace, and whether the step trains."""
        node, spec = self._found.plan.nodes[n], self._found.plan.specs()[n]
        command = self._read_command(n)
        # Several rules read the code, and most steps none of it.
        code = cache(partial(self._read_code, n))
        named = program.is_named_training([node.id, *command.texts[:8]])
        # The code of other steps is read only if a rule asks for it.
        is_likely = named or bool(spec.accelerate or spec.state)
        imports = code()["imports"] if is_likely else ()
        tools = rules.find_tools(command.texts, imports, self._library.tools)
        settings = self._merge_settings(self._declarations(spec, command, tools), command)
        step = self._step_facts(n, command, tools, code)
        facts = self._facts_by_namespace(n, command, settings, step)
        return facts, _trains(spec, named, tools)

    def _read_command(self, n: int) -> _Command:
        """Read the command of a step, and the settings in its words and configuration files."""
        node, spec = self._found.plan.nodes[n], self._found.plan.specs()[n]
        scope = _scope(spec, node.id)
        takes = self._input_addresses(node.prefix)
        line = [_resolve_word(word, takes) for word in words(spec, scope)]
        inputs = {name: _resolve_address(value, takes) for name, value in spec.names.inputs.items()}
        named_files = [word.text for word in line if word.text]
        named_files += map(str, inputs.values())
        configs, broken = self._read_configs(n, named_files)
        given = list(of_words(line))
        for tree, file, found_at in configs:
            given += of_tree(tree, scope, file, found_at)
        texts = [word.text for word in line if word.text is not None]
        return _Command(texts, inputs, given, configs, broken)

    def _read_code(self, n: int) -> dict[str, list[str]]:
        imports, keywords = program.read_code(self._found, n)
        return {"imports": imports, "keywords": keywords}

    def _declarations(
        self, spec: StepSpec, command: _Command, tools: Sequence[str]
    ) -> Declarations:
        """Return what the tools of a step and its recipe declare about settings."""
        tools_of_command = rules.find_tools(command.texts, (), self._library.tools)
        return Declarations(
            self._library.names,
            self._input_types_of(spec.recipe),
            tools,
            commanded=bool(tools_of_command),
            launched=spec.accelerate is not None,
        )

    def _facts_by_namespace(
        self, n: int, command: _Command, settings: ToolSettings, step: RuleFacts
    ) -> dict[str, object]:
        facts: dict[str, object] = {
            "recipe": RuleFacts(self._recipe_facts()),
            "inputs": RuleFacts(command.inputs),
            "settings": settings,
            "step": step,
            "model": self._model_facts(settings),
            "host": self._host,
            "environment": self._environment_facts(n),
            "kept": _facts_on_demand("kept", partial(self._kept_facts, n)),
            "gpu": _facts_on_demand("gpu", partial(machine.gpu, step, self._host)),
            "offer": _facts_on_demand("offer", partial(machine.offer, self._host)),
            "data": self._data_facts(settings, step),
        }
        # The memory estimate reads the other facts.
        estimate = partial(_memory_facts, self._ws, self._found, n, facts)
        facts["memory"] = _facts_on_demand("memory", estimate)
        return facts

    def _merge_settings(self, known: Declarations, command: _Command) -> ToolSettings:
        """Return the settings of the program and of the recipe's inputs, program first."""
        own = list(of_inputs(command.inputs))
        merged = [
            *known.of_program(program.derive_settings(command.given)),
            *known.of_program(command.given),
            *known.of_inputs(own),
            *known.of_inputs(program.derive_settings(own)),
        ]
        return ToolSettings(merged, self._library.names)

    def _input_types_of(self, recipe: str) -> Mapping[str, str]:
        """Return the input types of a recipe, or nothing if the recipe cannot be read."""
        if self._input_types is None:
            try:
                self._input_types = input_types(self._ws, self._found.source, self._found.request)
            except RecipeError:
                self._input_types = {}
        return self._input_types.get(recipe, {})

    def _input_addresses(self, prefix: str) -> dict[str, str]:
        """Return the address behind each path below `inputs/`, for all steps of one recipe."""
        if prefix not in self._sources:
            addresses: dict[str, str] = {}
            for node in self._found.plan.nodes:
                if node.prefix == prefix:
                    addresses.update((source.name, source.address) for source in node.takes)
            self._sources[prefix] = addresses
        return self._sources[prefix]

    def _recipe_facts(self) -> dict[str, object]:
        limit = self._found.plan.settings.limits.time
        hours = limit / 3600 if limit else None
        return {"id": self._found.plan.recipe, "hours": hours}

    def _step_facts(
        self,
        n: int,
        command: _Command,
        tools: Sequence[str],
        code: Callable[[], Mapping[str, object]],
    ) -> RuleFacts:
        spec, node = self._found.plan.specs()[n], self._found.plan.nodes[n]
        launcher = program.find_launcher(command.texts, tools)
        secrets = {secret.source for secret in spec.secrets if self._ws.environ.get(secret.source)}
        is_here = self._driver in _HERE
        # The credentials of this machine are not in a container.
        logins = program.find_logins() if is_here and not spec.image else []
        return RuleFacts(
            {
                "id": node.id,
                "tools": list(tools),
                "launcher": launcher,
                "method": program.find_method(command.texts),
                "gpus": spec.resources.gpus,
                "gpu": spec.resources.gpu,
                "gpu_memory": _gpu_memory_in_gb(spec.resources),
                "processes": _count_processes(spec, launcher, tools),
                "nodes": spec.node_count,
                "state": bool(spec.state),
                "retries": spec.options.retries,
                "env": RuleFacts(self._environment_of(spec)),
                "secrets": sorted(secrets),
                "logins": logins,
                "image": spec.image,
                "git": list(spec.git),
                "to_fetch": self._find_unfetched(spec),
                "remote": not is_here,
                **_config_facts(command.configs, command.broken),
                "missing": self._find_missing(n),
                "members": self._find_members(n),
            },
            gather=code,
        )

    def _environment_of(self, spec: StepSpec) -> dict[str, object]:
        """Return the variables that a step passes on or sets."""
        environ = self._ws.environ
        env: dict[str, object] = {name: environ[name] for name in spec.pass_env if name in environ}
        for name, value in spec.env.items():
            if value is not None:
                env[name] = value
        return env

    def _find_unfetched(self, spec: StepSpec) -> list[str]:
        """Return the addresses of a step's Git repositories that a run must fetch."""
        found: list[str] = []
        for each in spec.git:
            is_remote = "://" in each.url
            if is_remote and not is_fetched(self._ws, each.url, each.commit):
                found.append(each.url)
        return found

    def _find_missing(self, n: int) -> dict[str, object]:
        """Return the missing inputs of a step, or none for a step that does not run."""
        is_select = self._found.plan.specs()[n].select is not None
        if is_select or self._found.verdicts[n].answer == RESTORE:
            return {}
        return dict(missing_inputs.find_missing(self._ws, self._found, n))

    def _find_members(self, n: int) -> list[dict[str, object]]:
        found = missing_inputs.find_members(self._ws, self._found, n)
        return [each._asdict() for each in found if not each.wrong]

    def _read_configs(
        self, n: int, named: Sequence[str]
    ) -> tuple[list[tuple[object, str, str]], list[str]]:
        """Return a step's parsed configuration files, and the errors of unreadable files.

        Each file is a tuple of its parsed content, name and path; the path is empty for files in
        `files`. Files in `named` count if the step can see them.
        """
        spec = self._found.plan.specs()[n]
        found: list[tuple[object, str, str]] = []
        broken: list[str] = []

        def add(name: str, data: bytes, found_at: str = "") -> None:
            try:
                found.append((program.parse_config(name, data), name, found_at))
            except ValueError as error:
                broken.append(f"{name}: {error}")

        for path, tree in spec.files.items():
            if not path.endswith(program.CONFIGS):
                continue
            if not isinstance(tree, str):
                found.append((tree, path, ""))
            elif "{{" not in tree:
                add(path, tree.encode())
        visible = self._visible_files(n)
        for name in dict.fromkeys(named):
            is_config = name.endswith(program.CONFIGS) and not name.startswith("-")
            if not is_config or name in spec.files:
                continue
            file = _find_file(name, visible)
            if file is not None:
                add(name, file[1], str(file[0]))
        return found, broken

    def _visible_files(self, n: int) -> list[tuple[Path, list[str]]]:
        """Return the directories with a step's declared files, each with its path patterns."""
        node = self._found.plan.nodes[n]
        home = Path(self._found.plan.homes[node.home])
        return [
            (self._ws.root, [decode_pattern(dep)[0] for dep in node.deps]),
            (self._ws.root, list(self._input_addresses(node.prefix).values())),
            (home, [decode_pattern(pattern)[0] for pattern in node.code]),
        ]

    def _model_facts(self, settings: ToolSettings) -> RuleFacts:
        address = _value_of(settings, "base")
        if not isinstance(address, str):
            needs = "the model's name" if address is None else rules.NEEDS["model"]
            return RuleFacts({}, needs)
        template = _value_of(settings, "chat_template")
        file = self._ws.absolute(template) if isinstance(template, str) else None
        adapter = self._find_adapter(settings, address)
        if (address, file, adapter) not in self._models:
            gather = partial(
                model.facts, self._ws.absolute(model.bare(address)), address, file, adapter
            )
            self._models[address, file, adapter] = RuleFacts(
                {"address": model.bare(address)}, rules.NEEDS["model"], gather
            )
        return self._models[address, file, adapter]

    def _find_adapter(self, settings: ToolSettings, base: str) -> Path | None:
        """Return the folder of the LoRA adapter that a step loads besides its base model."""
        address = _value_of(settings, "model")
        if not isinstance(address, str) or address == base:
            return None
        folder = self._ws.absolute(address)
        return folder if (folder / "adapter_config.json").is_file() else None

    def _data_facts(self, settings: ToolSettings, step: RuleFacts) -> RuleFacts:
        address = _value_of(settings, "dataset")
        if not isinstance(address, str) or "://" in address:
            return RuleFacts({}, rules.NEEDS["data"])
        limit = _value_of(settings, "max_length")
        if limit is None and step["launcher"] == "trl":
            limit = _DEFAULT
        base = _value_of(settings, "base")
        name = "" if base is None else str(base)
        key = (address, limit, name)
        if key not in self._data:
            most = limit if isinstance(limit, int) else None
            tokenizer = None if base is None else self._ws.absolute(model.bare(name))
            gather = partial(data.facts, self._ws.absolute(address), most, tokenizer)
            self._data[key] = RuleFacts({}, rules.NEEDS["data"], gather)
        return self._data[key]

    def _environment_facts(self, n: int) -> Mapping[str, object]:
        node = self._found.plan.nodes[n]
        unknown = rules.NEEDS["environment"]
        if node.lock and not self._current_python:
            path = Path(self._found.plan.homes[node.home]) / node.lock
            if path.is_file():
                return RuleFacts({}, gather=partial(packages.read_lock, path))
            return RuleFacts({}, unknown)
        if self._found.plan.specs()[n].image or self._driver not in _HERE:
            return RuleFacts({}, unknown)
        python = choose_python(self._python, self._ws.root, self._ws.environ)
        folders = packages.find_folders(python)
        if folders is None:
            return RuleFacts({}, unknown)
        return packages.InstalledPackages(folders)

    def _kept_facts(self, n: int) -> dict[str, object]:
        """Return facts about earlier attempts of a step.

        These are the newest checkpoints and, after a failure, the end of the log.
        """
        plan = self._found.plan
        node, spec = plan.nodes[n], plan.specs()[n]
        kept: dict[str, object] = dict.fromkeys(
            ("checkpoint", "newest", "processes", "max_steps", "torch", "said")
        )
        row = self._ws.store.runs.latest_attempts(plan.recipe, [node.id]).get(node.id)
        if row is not None and row.outcome not in ("done", ""):
            kept["said"] = _read_log_tail(self._ws.kept_path(row.run, node.id, row.n, ".log"))
        if not spec.state:
            return kept
        image = preimage_of(self._found, n)
        if image is None:
            return kept
        found = checkpoints.made_under(
            self._ws.home / "states" / checkpoints.key(spec, image["world"], node.id)
        )
        if found is None:
            return kept
        generation, made = found
        name, pattern = spec.state[0].name, spec.state[0].checkpoint
        names = checkpoints.newest_first(generation / name, pattern)
        if not names:
            return kept
        kept |= {
            "newest": names[0],
            "max_steps": made["continues"].get("max_steps"),
            "torch": _find_torch_release(generation / name),
        }
        for each, verdict in checkpoints.judge_checkpoints(generation / name, pattern):
            if verdict.ok:
                return kept | {"checkpoint": each, "processes": verdict.processes or made["world"]}
        return kept


def _find_file(name: str, visible: Iterable[tuple[Path, list[str]]]) -> tuple[Path, bytes] | None:
    """Return the path and content of a file visible to a step, or None for any other file.

    Absolute paths are always visible.
    """
    for directory, patterns in visible:
        if os.path.isabs(name) or any(_covers(pattern, name) for pattern in patterns):
            data = contents(directory / name, LARGE)
            if data is not None:
                return directory / name, data
    return None


def _covers(pattern: str, name: str) -> bool:
    """Return True if a path pattern matches a file or its parent directory."""
    return fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/")


def _find_torch_release(state: Path) -> list[int] | None:
    """Return the PyTorch release in the model card of a checkpoint; None without a card."""
    for card in (state / "README.md", *sorted(state.glob("*/README.md"), reverse=True)[:3]):
        text = contents(card, LARGE) or b""
        if found := re.search(rb"^- Pytorch:? (\d+)\.(\d+)\.(\d+)", text, re.MULTILINE):
            return [int(part) for part in found.groups()]
    return None


def _read_log_tail(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            return file.read().decode(errors="replace")
    except OSError:
        return None


def _scope(spec: StepSpec, id: str) -> dict[str, object]:
    """Return the template namespaces of a step before its run: no checkpoint, no host values."""
    state = {each.name: StatePath(each.path, {"latest": None}) for each in spec.state}
    return {
        **spec.names._asdict(),
        "state": state,
        "step": {"id": id},
    }


def _facts_on_demand(namespace: str, gather: Callable[[], Mapping[str, object]]) -> RuleFacts:
    """Return facts that are gathered when a rule first reads them."""
    return RuleFacts({}, rules.NEEDS[namespace], gather)


def _resolve_word(word: Word, takes: Mapping[str, str]) -> Word:
    if word.text is None or word.text not in takes:
        return word
    return Word(takes[word.text], word.leaf)


def _resolve_address(value: object, takes: Mapping[str, str]) -> object:
    if isinstance(value, str) and value in takes:
        return takes[value]
    return value


def _value_of(settings: ToolSettings, name: str) -> object:
    """Return the value of a setting, None if it is unset, or UnknownSetting."""
    found = settings.setting(name)
    return None if found is None else found.value


def _trains(spec: StepSpec, named: bool, tools: Sequence[str]) -> bool:
    """Return True if a step trains. A name alone is not enough: `train_tokenizer.py` may not."""
    if spec.accelerate or spec.state:
        return True
    return named and bool(tools or spec.resources.gpus)


def _gpu_memory_in_gb(resources: ResourceSpec) -> float | None:
    if not resources.gpu_memory or not resources.gpus:
        return None
    return resources.gpu_memory / GB


def _count_processes(spec: StepSpec, launcher: str, tools: Sequence[str]) -> object:
    """Return the number of processes that a step starts: by default, a tool starts one per GPU."""
    if launcher != "accelerate" and not tools:
        return 1
    block = spec.accelerate or {}
    if isinstance(block.get("processes"), int):
        return block["processes"]
    return (spec.resources.gpus or 1) * spec.node_count


def _config_facts(
    configs: Iterable[tuple[object, str, str]], broken: Iterable[str]
) -> dict[str, object]:
    """Return the facts about a step's configuration files. `broken` are errors of unreadable ones."""
    sections: list[str] = []
    mistyped: list[str] = []
    slips: list[str] = []
    for tree, _, _ in configs:
        if isinstance(tree, Mapping):
            sections += tree
            mistyped += prime_rl.find_mistyped(tree)
            slips += prime_rl.find_near_misses(tree)
    is_prime_rl = not {"trainer", "orchestrator"}.isdisjoint(sections)
    kind = "rl" if is_prime_rl else ""
    return {
        "config_sections": sections,
        "config_kind": kind,
        "config_faults": list(broken),
        "config_mistyped": mistyped,
        "config_slips": slips,
    }


def _memory_facts(
    ws: Workspace, found: Survey, n: int, facts: Mapping[str, Any]
) -> dict[str, object]:
    """Return the facts of the step's memory estimate.

    Raises UnknownSetting with the reason if there is no estimate.
    """
    if not facts["step"]["gpus"]:
        return {"verdict": None}
    gpu = there = None
    try:
        if facts["host"]["gpus"]:
            gpu = machine.kind_of(facts["host"]["gpu"])
            there = facts["host"]["gpu_memory"]
    except UnknownSetting:
        pass
    estimated = estimates.estimate_step(ws, found.plan, n, gpu=gpu)
    if estimated is None:
        return {"verdict": None}
    if estimated.found is None:
        raise UnknownSetting(f"the memory estimate: {estimated.unknown}")
    # The card's reported memory takes precedence over the table: cards may be partitioned (MIG) or
    # missing in the table.
    usable = round(there * GB) - RESERVED if there is not None else estimated.usable
    if usable is None:
        raise UnknownSetting("the GPU memory: set `gpu_memory` or `gpu` in `resources`")
    largest = estimates.find_largest_terms(estimated.found)
    return {
        "verdict": estimated.found.verdict(usable),
        "low": round(estimated.found.low / GB, 1),
        "high": round(estimated.found.high / GB, 1),
        "usable": round(usable / GB, 1),
        "gpu": estimated.gpu,
        "terms": ", ".join(f"{name} {size / GB:.1f}" for name, size in largest),
    }
