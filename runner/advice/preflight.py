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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import NotFound, RecipeError, did_you_mean
from ..hosts.interpreters import CURRENT, choose_python
from ..language.template import StatePath
from ..planning.judge import RESTORE
from ..planning.patterns import decode_pattern
from ..planning.step import StepSpec
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
    known = {rule.id for rule in library.rules}
    if strange := sorted(allowed - known):
        raise NotFound(
            f'there is no rule "{strange[0]}"',
            fix=did_you_mean(strange[0], known) or "see the rules in docs/preflight.md",
        )
    applied = [rule for rule in library.rules if rule.id not in allowed]
    looks = _FactGatherer(ws, found, library, driver, host, python)
    verdicts = []
    for n in numbers:
        facts, trains = looks.gather(n)
        about = ("training", "step") if trains else ("step",)
        verdicts.append(
            rules.judge(
                [rule for rule in applied if rule.about in about], facts, found.plan.nodes[n].id
            )
        )
    whole = [rule for rule in applied if rule.about == "recipe"]
    if whole:
        verdicts.append(rules.judge(whole, looks.gather(numbers[0])[0]))
    return rules.merge(verdicts)


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
        here = partial(machine.here, ws.home) if driver in _HERE and host is None else None
        self._host = RuleFacts(host or {}, rules.NEEDS["host"], here)

    def gather(self, n: int) -> tuple[dict[str, object], bool]:
        """Return the facts of a step in every namespace, and whether the step trains."""
        plan = self._found.plan
        node, spec = plan.nodes[n], plan.specs()[n]
        scope = _scope(spec, node.id)
        takes = self._input_addresses(node.prefix)
        line = [_resolve_word(word, takes) for word in words(spec, scope)]
        inputs = {name: _resolve_address(value, takes) for name, value in spec.names.inputs.items()}
        configs, broken = self._read_configs(
            n, [*(word.text for word in line if word.text), *map(str, inputs.values())]
        )
        given = list(of_words(line))
        for tree, file, found_at in configs:
            given += of_tree(tree, scope, file, found_at)
        imports: list[list[str]] = []

        def code() -> dict[str, object]:
            if not imports:
                imports.extend(program.read_code(self._found, n))
            return {"imports": imports[0], "keywords": imports[1]}

        plainly = [word.text for word in line if word.text is not None]
        named = program.is_named_training([node.id, *plainly[:8]])
        likely = bool(spec.accelerate or spec.state or named)
        tools = rules.find_tools(plainly, code()["imports"] if likely else (), self._library.tools)  # type: ignore[arg-type]
        trains = bool(spec.accelerate or spec.state or (named and (tools or spec.resources.gpus)))
        known = Declarations(
            self._library.names,
            self._input_types_of(spec.recipe),
            tools,
            bool(rules.find_tools(plainly, (), self._library.tools)),
            spec.accelerate is not None,
        )
        settings = self._merge_settings(known, given, inputs)
        step = self._step_facts(n, plainly, tools, configs, broken, code)
        facts: dict[str, object] = {
            "recipe": RuleFacts(self._recipe_facts()),
            "inputs": RuleFacts(inputs),
            "settings": settings,
            "step": step,
            "model": self._model_facts(settings),
            "host": self._host,
            "environment": self._environment_facts(n),
            "kept": RuleFacts({}, rules.NEEDS["kept"], partial(self._kept_facts, n)),
        }
        facts["gpu"] = RuleFacts({}, rules.NEEDS["gpu"], partial(machine.gpu, step, self._host))
        facts["offer"] = RuleFacts({}, rules.NEEDS["offer"], partial(machine.offer, self._host))
        facts["data"] = self._data_facts(settings, step)
        facts["memory"] = RuleFacts(
            {}, rules.NEEDS["memory"], partial(_memory_facts, self._ws, self._found, n, facts)
        )
        return facts, trains

    def _merge_settings(
        self, known: Declarations, given: Sequence[Setting], inputs: Mapping[str, object]
    ) -> ToolSettings:
        """Return the settings of the program and of the recipe's inputs, program first."""
        own = list(of_inputs(inputs))
        merged = [
            *known.of_program(program.derive_settings(given)),
            *known.of_program(given),
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
            nodes = [node for node in self._found.plan.nodes if node.prefix == prefix]
            self._sources[prefix] = {
                source.name: source.address for node in nodes for source in node.takes
            }
        return self._sources[prefix]

    def _recipe_facts(self) -> dict[str, object]:
        limit = self._found.plan.settings.limits.time
        return {"id": self._found.plan.recipe, "hours": limit / 3600 if limit else None}

    def _step_facts(
        self,
        n: int,
        line: Sequence[str],
        tools: Sequence[str],
        configs: Sequence[tuple[object, str, str]],
        broken: Sequence[str],
        code: Callable[[], Mapping[str, object]],
    ) -> RuleFacts:
        spec, node = self._found.plan.specs()[n], self._found.plan.nodes[n]
        wants = spec.resources
        launcher = program.find_launcher(line, tools)
        gpus = wants.gpus
        block = spec.accelerate or {}
        processes: object = (gpus or 1) * spec.node_count
        if isinstance(block.get("processes"), int):
            processes = block["processes"]
        given = {secret.source for secret in spec.secrets if self._ws.environ.get(secret.source)}
        trees = [tree for tree, _, _ in configs if isinstance(tree, Mapping)]
        sections = [key for tree in trees for key in tree]
        passed = {
            name: self._ws.environ[name] for name in spec.pass_env if name in self._ws.environ
        }
        env = passed | {name: value for name, value in spec.env.items() if value is not None}
        return RuleFacts(
            {
                "id": node.id,
                "tools": list(tools),
                "launcher": launcher,
                "method": program.find_method(line),
                "gpus": gpus,
                "gpu": wants.gpu,
                "gpu_memory": wants.gpu_memory / GB if wants.gpu_memory and gpus else None,
                "processes": processes if launcher == "accelerate" or tools else 1,
                "nodes": spec.node_count,
                "state": bool(spec.state),
                "retries": spec.options.retries,
                "env": RuleFacts({name: value for name, value in env.items()}),
                "secrets": sorted(given),
                "logins": program.find_logins() if self._driver in _HERE and not spec.image else [],
                "image": spec.image,
                "git": [each for each in spec.git],
                "to_fetch": [
                    each.url
                    for each in spec.git
                    if "://" in each.url and not is_fetched(self._ws, each.url, each.commit)
                ],
                "remote": self._driver not in _HERE,
                "config_sections": sections,
                "config_kind": "rl" if {"trainer", "orchestrator"} & set(sections) else "",
                "config_faults": list(broken),
                "config_mistyped": [
                    words for tree in trees for words in prime_rl.find_mistyped(tree)
                ],
                "config_slips": [
                    words for tree in trees for words in prime_rl.find_near_misses(tree)
                ],
                "missing": {}
                if self._found.verdicts[n].answer == RESTORE or spec.select is not None
                else dict(missing_inputs.find_missing(self._ws, self._found, n)),
                "members": [
                    each._asdict()
                    for each in missing_inputs.find_members(self._ws, self._found, n)
                    if not each.wrong
                ],
            },
            gather=code,
        )

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
            file = _find_file(name, visible) if is_config and name not in spec.files else None
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
        found = settings.setting("base")
        address = found.value if found is not None else None
        if not isinstance(address, str):
            return RuleFacts({}, "the model's name" if address is None else rules.NEEDS["model"])
        template = settings.setting("chat_template")
        file = (
            self._ws.absolute(template.value)
            if template is not None and isinstance(template.value, str)
            else None
        )
        tuned = settings.setting("model")
        put = (
            self._ws.absolute(tuned.value)
            if tuned is not None and isinstance(tuned.value, str) and tuned.value != address
            else None
        )
        adapter = put if put is not None and (put / "adapter_config.json").is_file() else None
        if (address, file, adapter) not in self._models:
            gather = partial(
                model.facts, self._ws.absolute(model.bare(address)), address, file, adapter
            )
            self._models[address, file, adapter] = RuleFacts(
                {"address": model.bare(address)}, rules.NEEDS["model"], gather
            )
        return self._models[address, file, adapter]

    def _data_facts(self, settings: ToolSettings, step: RuleFacts) -> RuleFacts:
        found = settings.setting("dataset")
        address = found.value if found is not None else None
        if not isinstance(address, str) or "://" in address:
            return RuleFacts({}, rules.NEEDS["data"])
        longest = settings.setting("max_length")
        limit = (
            longest.value
            if longest is not None
            else _DEFAULT
            if step["launcher"] == "trl"
            else None
        )
        base = settings.setting("base")
        key = (address, limit, str(base.value) if base is not None else "")
        if key not in self._data:
            tokenizer = self._ws.absolute(model.bare(str(base.value))) if base is not None else None
            gather = partial(
                data.facts,
                self._ws.absolute(address),
                limit if isinstance(limit, int) else None,
                tokenizer,
            )
            self._data[key] = RuleFacts({}, rules.NEEDS["data"], gather)
        return self._data[key]

    def _environment_facts(self, n: int) -> Mapping[str, object]:
        node = self._found.plan.nodes[n]
        unknown = rules.NEEDS["environment"]
        if node.lock and not self._current_python:
            path = Path(self._found.plan.homes[node.home]) / node.lock
            return (
                RuleFacts({}, gather=partial(packages.read_lock, path))
                if path.is_file()
                else RuleFacts({}, unknown)
            )
        if self._found.plan.specs()[n].image:
            return RuleFacts({}, unknown)
        if self._driver in _HERE:
            where = packages.find_folders(
                choose_python(self._python, self._ws.root, self._ws.environ)
            )
            return RuleFacts({}, unknown) if where is None else packages.InstalledPackages(where)
        return RuleFacts({}, unknown)

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
        if not spec.state or (image := preimage_of(self._found, n)) is None:
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
        if found := re.search(
            rb"^- Pytorch:? (\d+)\.(\d+)\.(\d+)", contents(card, LARGE) or b"", re.MULTILINE
        ):
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


def _resolve_word(word: Word, takes: Mapping[str, str]) -> Word:
    return Word(str(_resolve_address(word.text, takes)), word.leaf) if word.text in takes else word


def _resolve_address(value: object, takes: Mapping[str, str]) -> object:
    return takes[value] if isinstance(value, str) and value in takes else value


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
    return {
        "verdict": estimated.found.verdict(usable),
        "low": round(estimated.found.low / GB, 1),
        "high": round(estimated.found.high / GB, 1),
        "usable": round(usable / GB, 1),
        "gpu": estimated.gpu,
        "terms": ", ".join(
            f"{name} {size / GB:.1f}"
            for name, size in estimates.find_largest_terms(estimated.found)
        ),
    }
