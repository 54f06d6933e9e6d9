"""Preflight checks, each of which reports all its problems together."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

from ..errors import CannotRun, Invalid, NoHost, Problem, did_you_mean
from ..language.units import about
from ..paths import shipped
from ..planning.ids import bare
from ..planning.judge import RESTORE
from ..planning.plan import LOCAL
from ..planning.step import TEMPORARY, ResourceSpec, StepSpec
from ..secrets import is_tokenlike
from ..storage.workspace import Workspace
from ..survey.empty_globs import find_empty_globs
from ..survey.env_files import EnvFiles
from ..survey.recipes import parse_recipe
from ..survey.survey import Survey
from .terms import Listener, Settings

if TYPE_CHECKING:
    from drivers.base import Need, Wish

    from ..hosts.place.place import Place
    from ..hosts.pool import HostPool
    from ..hosts.renting.needs import StepTotals
    from ..hosts.renting.totals import HoursOn
    from ..storage.records.index import Trace

SPARE: Final = 600.0
"""Extra time for setup and downloads on hosts, in seconds."""


def preflight(ws: Workspace, found: Survey, settings: Settings) -> None:
    """Refuse a run with steps that cannot run, listing all problems.

    Raises Invalid, CannotRun.
    """
    from ..survey.templates import refuse_unrenderable

    refuse_unrenderable(ws, found)
    _refuse_unsandboxed(ws, found, settings)
    faults, specs, env_files = _Faults(), found.plan.specs(), EnvFiles(ws.own)
    for n in _list_command_nodes(found):
        spec, id = specs[n], found.plan.nodes[n].id
        faults.missing += _report_missing(ws, found, n)
        faults.wrong += _report_node_count(id, spec, settings.driver)
        faults.wrong += [
            f"{id} requires {tool}, which is not on PATH"
            for tool in found.plan.nodes[n].tools
            if found.facts.tools.get(tool) is None
        ]
        faults.wrong += _report_unreachable_inputs(found, n)
        faults.unset += _report_unset(id, spec, ws.environ)
        faults.unread += env_files.faults(spec.env_files)
    faults.missing += _report_missing_ahead(ws, found)
    faults.missing += [
        f"{each.step} requires {each.pattern}, which {each.refused}"
        for each in find_empty_globs(ws, found)
        if each.refused
    ]
    problems = [*_report_too_many_nodes(ws, found), *_report_unusable_head(ws, found, settings)]
    if problems:
        raise Invalid(problems)
    conflicts = [] if settings.overwrite else found.conflicts
    if conflicts:
        _refuse_conflicts(ws, conflicts)
    faults.refuse(ws, found)


@dataclass
class _Faults:
    """Reasons for which steps of a run cannot start."""

    missing: list[str] = field(default_factory=list)  # local files
    unread: list[str] = field(default_factory=list)  # files with environment variables
    unset: list[str] = field(default_factory=list)  # variables of secrets
    wrong: list[str] = field(default_factory=list)

    def refuse(self, ws: Workspace, found: Survey) -> None:
        """Refuse the run if there is a reason.  Raises CannotRun."""
        root = ws.root
        if self.missing:
            lines = [*self.missing, *self.unset, *self.wrong]
            shown = "\n".join(lines[:20])
            shown += f"\nand {len(lines) - 20} more" if len(lines) > 20 else ""
            fix = f"create the missing file or correct its path: paths in a recipe are relative to {root}, paths with ./ or ../ to the recipe file"
        elif self.unread:
            shown = "\n".join(dict.fromkeys([*self.unread, *self.unset, *self.wrong]))
            fix = f"create the file with one NAME=value line per variable, or remove it from `env_file`; its path is relative to {root}"
        elif self.unset:
            shown = "\n".join(dict.fromkeys([*self.unset, *self.wrong]))
            fix = "export the environment variable of the secret, then run again"
        elif self.wrong:
            shown = "\n".join(dict.fromkeys(self.wrong[:20]))
            fix = f"{_suggest_less(ws, found)}, or use another driver"
        else:
            return
        raise CannotRun(shown, fix=fix)


def _list_command_nodes(found: Survey) -> list[int]:
    """Return the plan nodes to run that have a command."""
    specs = found.plan.specs()
    return [
        n for n in found.todo if found.verdicts[n].answer != RESTORE and specs[n].select is None
    ]


def _report_missing(ws: Workspace, found: Survey, n: int) -> list[str]:
    from ..advice.facts.missing_inputs import find_missing

    id = found.plan.nodes[n].id
    return [f"{id} requires {path}, which {why}" for path, why in find_missing(ws, found, n)]


def _report_unset(id: str, spec: StepSpec, environ: Mapping[str, str]) -> list[str]:
    from ..planning.secret_values import faults

    return list(faults(id, spec, environ))


def _report_node_count(id: str, spec: StepSpec, driver: str) -> list[str]:
    if isinstance(spec.nodes, str):
        return [
            f"the node count of {id}, `{spec.nodes}`, is not known before the run: use only inputs and the matrix in `nodes`"
        ]
    if spec.node_count > 1 and driver == "local":
        return [f"{id} requires {spec.nodes} nodes, but the driver local has one"]
    return []


def _refuse_conflicts(ws: Workspace, conflicts: Sequence[str]) -> None:
    """Refuse to replace files that recipe did not write.  Raises CannotRun."""
    from ..survey.explain import describe_replaced

    lines = [f"the run would replace {words}" for words in describe_replaced(ws, conflicts[:5])]
    if len(conflicts) > 5:
        lines.append(f"and {len(conflicts) - 5} more")
    raise CannotRun(
        "\n".join(lines),
        fix="move the file away, pass `--overwrite`, or accept it as the step's output with `recipe adopt STEP`",
    )


def _refuse_unsandboxed(ws: Workspace, found: Survey, settings: Settings) -> None:
    """Refuse steps whose sandbox cannot be created.

    Raises CannotRun.
    """
    specs, flags, here = found.plan.specs(), ws.config.flags, list[str]()
    for n in found.todo:
        spec, id = specs[n], found.plan.nodes[n].id
        sandbox = spec.options.sandbox_where(flags)
        if sandbox == "closed" and spec.node_count > 1:
            words = f"{id} runs on {spec.node_count} nodes, and its sandbox has no network"
            raise CannotRun(words, fix="set `sandbox: {network: true}` in it")
        if sandbox and (not spec.image or found.request.current_python):
            here.append(id)
    if here and settings.driver == "local":
        from ..hosts.sandbox import FIX, find_local_refusal

        if why := find_local_refusal():
            raise CannotRun(
                f"{here[0]} requires a sandbox, but this machine cannot create one: {why}", fix=FIX
            )


def _report_missing_ahead(ws: Workspace, found: Survey) -> list[str]:
    """List the missing inputs of steps whose matrix is not known yet."""
    if not found.plan.ahead:
        return []
    from ..advice.facts.missing_inputs import find_missing_ahead

    asked = {later.id for later in found.later}
    faults = []
    for ahead in found.plan.ahead:
        if ahead.step in asked:
            for path, why in find_missing_ahead(ws, found, ahead):
                faults.append(f"{ahead.step} requires {path}, which {why}")
    return faults


def check(ws: Workspace, found: Survey, settings: Settings, listener: Listener) -> None:
    """Run the preflight rules: report warnings and refuse errors.

    Raises Invalid.
    """
    if settings.driver != "local":
        _warn_of_local_tools(found, listener)
    numbers = nodes_to_check(found)
    if not numbers:
        return
    from ..advice import findings, preflight

    python = "current" if found.request.current_python else settings.python
    verdict = preflight.check(
        ws, found, numbers, driver=settings.driver, python=python, allow=settings.allow
    )
    findings.refuse(verdict, found)
    for finding in verdict.findings:
        if finding.rule.severity == "warning":
            listener.say(f"warning: {finding.rule.id}: {finding.message}")


def _warn_of_local_tools(found: Survey, listener: Listener) -> None:
    """Warn that the versions of tools are looked up here, although the steps run elsewhere."""
    tools: dict[str, None] = {}
    for n in found.todo:
        tools |= dict.fromkeys(found.plan.nodes[n].tools)
    if tools:
        names = ", ".join(tools)
        listener.say(f"warning: the cache key uses {names} from this machine, not from the hosts")


def nodes_to_check(found: Survey) -> list[int]:
    """Return the plan nodes to which the preflight rules apply.

    These are all nodes to run, if the recipe may train or merge a model or has its own rules;
    otherwise none. This is a cheap test.
    """
    if not found.todo:
        return []

    homes = {str(found.source.parent), *found.plan.homes}
    if any(map(_has_own_rules, homes)) or any(map(_may_train, found.plan.specs())):
        return found.todo
    return []


def _has_own_rules(home: str) -> bool:
    """Return True if a directory of recipes, other than the shipped one, has preflight rules."""
    if os.path.realpath(home) == str(shipped() / "recipes"):
        return False
    return os.path.exists(f"{home}/gotchas.yaml")


def _may_train(spec: StepSpec) -> bool:
    if spec.select is not None:
        return False
    if spec.accelerate or spec.state or spec.resources.gpus:
        return True
    return "train" in spec.step or "merge" in spec.step


def find_remote_steps(found: Survey, host_pool: HostPool) -> dict[int, StepSpec]:
    """Return the steps that run on other machines, by node number."""
    nodes, specs = found.plan.nodes, found.plan.specs()
    remote = {}
    for n in found.todo:
        has_command = specs[n].select is None
        if has_command and not nodes[n].flags & LOCAL and not host_pool.runs_locally(specs[n]):
            remote[n] = specs[n]
    return remote


def find_rental_needs(found: Survey, host_pool: HostPool) -> dict[Need, list[int]]:
    """Return the resource requests of machines to rent, each with its node numbers."""
    by_need: dict[Need, list[int]] = {}
    for n, spec in find_remote_steps(found, host_pool).items():
        by_need.setdefault(host_pool.need(spec), []).append(n)
    return by_need


def estimate_takes(
    ws: Workspace, found: Survey, by_need: Mapping[Need, Sequence[int]]
) -> dict[Need, StepTotals]:
    """Return the expected duration and result size of the steps for each rental request.

    A total is None if the value of one step is unknown.
    """
    if not by_need:
        return {}
    from ..advice import estimates
    from ..hosts.renting.needs import StepTotals

    nodes, specs = found.plan.nodes, found.plan.specs()
    ids = [nodes[n].id for steps in by_need.values() for n in steps]
    estimated = estimates.fetch_and_estimate_plan(ws, found.plan, found.todo)
    earlier = ws.store.index.expected_seconds(found.plan.recipe, ids)
    made = ws.store.index.last(found.plan.recipe, ids)
    answer = {}
    for need, steps in by_need.items():
        step_seconds: list[float | None] = []
        step_bytes: list[float | None] = []
        for n in steps:
            id = nodes[n].id
            seconds = earlier.get(id)
            estimate = estimated[n].seconds if n in estimated else None
            if estimate is not None:
                _, seconds = estimate  # the longer bound
            step_seconds.append(seconds)
            step_bytes.append(_estimate_download(ws, found, n, made.get(id), seconds))
        total_seconds, download_bytes = _sum(step_seconds), _sum(step_bytes)
        answer[need] = StepTotals(
            None if total_seconds is None else total_seconds / 3600,
            None if download_bytes is None else round(download_bytes),
            _find_longest_interval(specs[n] for n in steps),
            _hours_on(ws, found, {n: earlier.get(nodes[n].id) for n in steps}, {*estimated}),
        )
    return answer


def _find_longest_interval(specs: Iterable[StepSpec]) -> float | None:
    """Return the longest time between checkpoints of the steps, in seconds, or None without any."""
    intervals = [state.every for spec in specs for state in spec.state]
    return max((each for each in intervals if each is not None), default=None)


def _hours_on(
    ws: Workspace, found: Survey, earlier: Mapping[int, float | None], trains: Collection[int]
) -> HoursOn:
    """Return a function that estimates the hours of a run's steps on a given GPU model.

    Steps in `trains` count as estimated for the GPU, other steps as `earlier`, in seconds. Steps of
    unknown duration are left out, unless no duration is known.
    """
    from ..advice import estimates
    from ..hosts.renting.totals import Hours
    from ..planning.ids import readable

    @cache
    def on(gpu: str, memory: int | None) -> Hours | None:
        kind = estimates.load_hardware().find_offered(gpu, memory)
        seconds, bases, guessed, without = 0.0, list[str](), False, list[str]()
        for n, measured in earlier.items():
            there = (
                estimates.estimate_step(ws, found.plan, n, gpu=kind)
                if kind is not None and n in trains
                else None
            )
            if there is not None and there.seconds is not None:
                seconds += there.seconds[1]
                bases.append(there.basis)
                guessed = guessed or there.is_guess
            elif measured is not None:
                seconds += measured
                bases.append("as long as it took earlier")
            else:
                without.append(readable(found.plan.nodes[n].id))
        if not bases:
            return None
        basis = "; ".join(dict.fromkeys(bases))
        return Hours(seconds / 3600, basis, guessed, tuple(without))

    return on


def _estimate_download(
    ws: Workspace, found: Survey, n: int, made: Trace | None, seconds: float | None
) -> float | None:
    """Return the bytes that a step downloads to this machine, according to its last result.

    Return None if not all outputs are stored here. `temporary` outputs do not count. Checkpoint
    bytes are scaled to a step of `seconds`.
    """
    if made is None:
        return None
    temporary = {name for name, _, flags in found.plan.nodes[n].outputs if flags & TEMPORARY}
    contents = [each.content for each in made.outputs if each.name not in temporary]
    if not all(map(ws.objects.has, contents)):
        return None
    size = float(sum(map(ws.objects.size, contents)))
    saved = made.facts.get("checkpoint_bytes")
    if isinstance(saved, int):
        share = seconds / made.seconds if seconds is not None and made.seconds else 1.0
        size += saved * share
    return size


def _sum(amounts: Sequence[float | None]) -> float | None:
    """Return the sum of the amounts, or None if one of them is unknown."""
    known = [each for each in amounts if each is not None]
    return sum(known) if len(known) == len(amounts) else None


def find_sent_secrets(
    specs: Sequence[StepSpec], environ: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the names of the secret variables that each step passes to its host."""
    # Several specs may share a step's name, as in a matrix; the last one counts.
    sent = {}
    for step, spec in {spec.step: spec for spec in specs}.items():
        names = {secret.variable for secret in spec.secrets if environ.get(secret.source)}
        names |= {name for name in spec.pass_env if is_tokenlike(name, environ.get(name, ""))}
        if names:
            sent[step] = sorted(names)
    return sent


def find_signed_addresses(
    ws: Workspace, found: Survey, nodes: Sequence[int], driver: str
) -> set[str]:
    """Return the bucket URLs for which hosts may receive signed URLs.

    With a signed URL, a host reads the bucket itself instead of through this machine. Empty if a
    driver's `secrets` is "deny".
    """
    from ..hosts.renting.any_driver import denying_drivers

    if denying_drivers(ws.config, driver):
        return set()
    addresses = set()
    for n in nodes:
        addresses |= {taken.address for taken in found.plan.nodes[n].takes if taken.in_bucket}
    return {address for address in addresses if not _is_anonymous(ws, address)}


def _is_anonymous(ws: Workspace, address: str) -> bool:
    """Return True if a configured bucket needs no credentials, and so no signed URLs."""
    store = ws.config.store_of(address)
    return store is not None and store.anonymous


def refuse_denied_secrets(ws: Workspace, found: Survey, host_pool: HostPool) -> None:
    """Refuse steps that pass secrets to hosts if the driver's `secrets` is "deny".

    Raises Invalid.
    """
    from ..hosts.renting.any_driver import driver_names

    for name in driver_names(ws.config, host_pool.name):
        _refuse_denied_secrets(ws, found, host_pool, name)


def _refuse_denied_secrets(ws: Workspace, found: Survey, host_pool: HostPool, name: str) -> None:
    wanted = ws.config.driver(name).get("secrets", "send")
    if wanted not in ("send", "deny"):
        raise Invalid(
            [
                Problem(
                    "driver-setting",
                    f'invalid setting secrets = "{wanted}"',
                    fix='use secrets = "send" or "deny"',
                )
            ]
        )
    if wanted == "send":
        return
    sent = find_sent_secrets([*find_remote_steps(found, host_pool).values()], ws.environ)
    if sent:
        words = "; ".join(
            f"{step} would send {', '.join(names)} to a rented machine"
            for step, names in sent.items()
        )
        fix = f'choose another driver, remove the secrets from the recipe, or set `secrets = "send"` in [drivers.{name}]'
        raise Invalid(
            [Problem("secrets-denied", f'`secrets = "deny"` of {name}: {words}', fix=fix)]
        )


def compose_wish(found: Survey, stays: Callable[[StepSpec], bool], jobs: int) -> Wish:
    """Return the resources to request for each node of an allocation.

    They are the amounts of the largest step (`need`) and of the largest matrix (`together`).
    `stays` selects steps that run on this machine. A `together` amount is None, which means all,
    if a step does not declare it.
    """
    from drivers.base import Need, Resources, Wish

    nodes, specs = found.plan.nodes, found.plan.specs()
    remote = [n for n in found.todo if not nodes[n].flags & LOCAL and not stays(specs[n])]
    # The number of instances is unknown before `select` is evaluated.
    is_open = any(specs[n].select is not None for n in remote)
    matrices: dict[str, list[ResourceSpec]] = {}
    for n in remote:
        matrices.setdefault(bare(nodes[n].id), []).append(specs[n].resources)

    def together(amount: Callable[[ResourceSpec], float | None]) -> float | None:
        if is_open:
            return None
        each = [[amount(wants) for wants in matrix] for matrix in matrices.values()]
        return _sum_largest_matrix(each, jobs)

    cpus = together(lambda each: each.cpus)
    memory = together(lambda each: each.memory)
    gpus = together(lambda each: each.gpus or 0)
    all_together = Resources(
        cpus, None if memory is None else int(memory), None if gpus is None else int(gpus)
    )
    wants = [specs[n].resources for n in remote]
    need = Need(
        cpus=_find_largest([each.cpus for each in wants]) or None,
        memory=int(_find_largest([each.memory for each in wants])) or None,
        gpus=int(_find_largest([each.gpus for each in wants])) or None,
        nodes=max((specs[n].node_count for n in found.todo), default=1),
    )
    return Wish(need, hours=_hours_needed(found), together=all_together)


def _sum_largest_matrix(matrices: Sequence[Sequence[float | None]], jobs: int) -> float | None:
    """Return the total amount of the largest matrix, or None if an amount is unknown.

    At most `jobs` instances run at once; 0 means all.
    """
    totals: list[float | None] = []
    for amounts in matrices:
        if None in amounts:
            return None
        largest = sorted((amount or 0.0 for amount in amounts), reverse=True)
        totals.append(sum(largest[: jobs or None]))
    return _find_largest(totals)


def _find_largest(amounts: Sequence[float | None]) -> float:
    return max((amount or 0.0 for amount in amounts), default=0.0)


def _hours_needed(found: Survey) -> float | None:
    """Return the maximum time for which the run needs hosts, in hours, or None without limits."""
    timeouts = []
    for n in found.todo:
        spec = found.plan.specs()[n]
        # What a `select` chooses is not known yet, so the run has no bound by its steps.
        is_open = spec.select is not None
        timeouts.append(None if is_open else spec.options.timeout)
    total_timeout = _sum(timeouts)  # None if a step has no timeout
    bounds = [found.plan.settings.limits.time, total_timeout]
    seconds = min((each for each in bounds if each is not None), default=None)
    return None if seconds is None else (seconds + SPARE) / 3600


def default_jobs(found: Survey, host_pool: HostPool) -> int:
    """Return the default number of parallel steps.

    It is the number of processors here, or the number of slots on the hosts.
    """
    processors = host_pool.local_place.capacity.processors
    if host_pool.is_priced:  # the slots of a rented machine are not known yet
        return processors + len(find_remote_steps(found, host_pool))
    if host_pool.is_remote:
        return sum(place.capacity.slots or 1 for place in host_pool.places)
    return processors


def refuse_too_large(
    ws: Workspace,
    found: Survey,
    host_pool: HostPool,
    settings: Settings,
    offered: Collection[Need] = (),
) -> None:
    """Refuse steps that are too large for every host, listing all of them.

    `offered` are the needs for which machines are on offer. Raises CannotRun, Invalid, NoHost.
    """
    faults = _SizeFaults()
    nodes, specs = found.plan.nodes, found.plan.specs()
    for n in _list_command_nodes(found):
        id, spec = nodes[n].id, specs[n]
        is_local = bool(nodes[n].flags & LOCAL) or host_pool.runs_locally(spec)
        if spec.node_count > 1:
            faults.wrong += _report_too_few_hosts(id, spec, host_pool)
        if host_pool.is_priced and not is_local:
            if host_pool.need(spec) not in offered:
                faults.unmet.append(_report_no_offer(id, spec, host_pool))
            continue
        if spec.node_count > 1:
            faults.uneven += _report_uneven_hosts(id, spec, host_pool)
        places = [host_pool.local_place] if is_local else host_pool.places
        faults.wrong += _report_too_small_hosts(id, spec, host_pool, places, settings.pools)
    faults.refuse(ws, found, host_pool)


@dataclass
class _SizeFaults:
    """Reasons for which no host fits some steps of a run."""

    wrong: list[str] = field(default_factory=list)  # steps too large for the hosts
    unmet: list[str] = field(default_factory=list)  # steps for which no machine is on offer
    uneven: list[Problem] = field(default_factory=list)

    def refuse(self, ws: Workspace, found: Survey, host_pool: HostPool) -> None:
        """Refuse the run if there is a reason.  Raises CannotRun, Invalid, NoHost."""
        if self.unmet and not self.wrong:
            raise NoHost(
                "\n".join(dict.fromkeys(self.unmet[:20])),
                fix=f"{_suggest_filters(ws, found, host_pool)}; list the offers with `recipe offers --driver {host_pool.name}`",
            )
        if self.wrong:
            shown = "\n".join(dict.fromkeys([*self.wrong, *self.unmet][:20]))
            raise CannotRun(shown, fix=f"{_suggest_less(ws, found)}, or use another machine")
        if self.uneven:
            raise Invalid(self.uneven)


def _report_no_offer(id: str, spec: StepSpec, host_pool: HostPool) -> str:
    wants = ", ".join(f"{name} {value}" for name, value in spec.resources.as_key.items())
    reason = host_pool.unmet.get(host_pool.need(spec), "")
    words = (
        f"{id} requires {wants or 'a machine'}, but {host_pool.name} has no matching machine now"
    )
    return f"{words} ({reason})" if reason else words


_UNITS: Final = {"gpus": "GPU(s)", "cpus": "processors", "memory": "of memory"}


def _report_too_small_hosts(
    id: str,
    spec: StepSpec,
    host_pool: HostPool,
    places: Sequence[Place],
    pools: Mapping[str, float],
) -> list[str]:
    """Report the resources of which a step requests more than its hosts have.

    `pools` are amounts that the user sets in place of the hosts' own.
    """
    workers = host_pool.head.count_workers(spec)
    owner = "this machine has" if places == [host_pool.local_place] else "its largest host has"
    wrong = []
    for name, unit in _UNITS.items():
        asked = spec.resources.room.get(name)
        if not asked:
            continue
        if name in pools:
            most = pools[name]
        else:
            # There is at least one: `HostPool.open` raises if it has found no place.
            sizes = sorted((place.capacity.total_of(name) for place in places), reverse=True)
            most = sizes[min(workers, len(sizes)) - 1]
        if asked > most:
            need, there = _format_amount(name, asked), _format_amount(name, most)
            wrong.append(f"{id} requires {need} {unit}, but {owner} {there}")
    return wrong


def _format_amount(pool: str, amount: float) -> str:
    if pool == "memory":
        return about(amount)
    decimals = 0 if amount == int(amount) else 3
    return f"{amount:,.{decimals}f}"


def _suggest_less(ws: Workspace, found: Survey) -> str:
    """Suggest a preset of the recipe, or else lower requirements of the step."""
    recipe = parse_recipe(ws, found.source.read_bytes(), str(found.source))
    if not recipe.presets:
        return "reduce the `resources` of the step"
    example = "smoke" if "smoke" in recipe.presets else next(iter(recipe.presets))
    return f"use a preset that fits (`--preset {example}`)"


def _suggest_filters(ws: Workspace, found: Survey, host_pool: HostPool) -> str:
    """Suggest a known name for a misspelled GPU name in steps or settings, or else wider filters."""
    words = [spec.resources.gpu for spec in found.plan.specs()]
    words.append(host_pool.where.get("gpu") or str(ws.config.driver(host_pool.name).get("gpu", "")))
    for word in words:
        suggestion = _suggest_gpu(word) if word else ""
        if suggestion:
            return suggestion
    return "relax the filters (`--where`, or the driver's settings)"


def _suggest_gpu(word: str) -> str:
    """Suggest a known GPU name for a misspelled one; return "" if the name is known."""
    from ..advice.estimates import load_hardware

    known: dict[str, None] = {}
    for gpu in load_hardware().gpus:
        known |= dict.fromkeys(name.lower() for name in (gpu.name, gpu.asked, *gpu.names))
    plain = word.lower().replace("_", " ")
    if any(plain in name for name in known):
        return ""
    return did_you_mean(plain, [*known])


def _report_unreachable_inputs(found: Survey, n: int) -> list[str]:
    """List the `temporary` inputs of a multi-node step, which exist on one host only."""
    if found.plan.specs()[n].node_count == 1:
        return []

    nodes, wrong = found.plan.nodes, []
    for each in nodes[n].upstream:
        producer = nodes[each.producer]
        temporary = {name for name, _, flags in producer.outputs if flags & TEMPORARY}
        if each.output in temporary:
            wrong.append(
                f"{nodes[n].id} runs on several nodes but reads {producer.id}'s {each.output}, which is `temporary` and stays on one node"
            )
    return wrong


def _report_too_many_nodes(ws: Workspace, found: Survey) -> list[Problem]:
    """Report steps that request more nodes than `[limits] max_nodes`."""
    most = ws.config.limits.get("max_nodes")
    if most is None:
        return []
    asked = {found.plan.nodes[n].id: found.plan.specs()[n].node_count for n in found.todo}
    fix = "request fewer nodes, or raise the limit in the file that `recipe config` shows"
    return [
        Problem(
            "nodes", f"{id} requests {count} nodes, but `[limits] max_nodes` is {most:g}", fix=fix
        )
        for id, count in asked.items()
        if count > most
    ]


def _report_unusable_head(ws: Workspace, found: Survey, settings: Settings) -> list[Problem]:
    """Report a stack whose head node this plan cannot use."""
    if not settings.stack or ws.config.stack(settings.stack).head is None:
        return []
    specs, whose = found.plan.specs(), f"the stack {settings.stack} has a head"
    if all(spec.nodes in (None, 1) for spec in specs):
        words = f"{whose}, but no step of {found.plan.recipe} runs on several nodes"
        return [
            Problem(
                "nodes",
                words,
                fix="set `nodes: N` in a step, counting the head, or choose a stack without a head",
            )
        ]
    launched = [
        found.plan.nodes[n].id
        for n in found.todo
        if specs[n].accelerate and specs[n].node_count > 1
    ]
    if not launched:
        return []
    words = f"{whose}, but {', '.join(launched[:5])} would start as many `accelerate` processes on the head as on its workers"
    fix = "choose a stack without a head, or use `run` with a command that checks `node.rank`"
    return [Problem("nodes", words, fix=fix)]


def _report_too_few_hosts(id: str, spec: StepSpec, host_pool: HostPool) -> list[str]:
    """Report a step that requests more nodes than there are hosts."""
    from ..hosts.renting.needs import why_no_group

    workers, headed = host_pool.head.count_workers(spec), host_pool.head.leads(spec)
    if host_pool.is_priced and (leases := host_pool.leases) is not None:
        words = why_no_group(
            id,
            spec,
            host_pool.name,
            leases.driver.traits,
            headed=headed,
            kept=leases.kept_stack is not None,
            most=leases.max_machines,
        )
        return [words] if words else []
    have = sum(bool(place.address) or headed for place in host_pool.places)
    whose = " in addition to the head" if headed else ""
    if have < workers:
        return [
            f"{id} requires {workers} nodes{whose}, but {host_pool.name} has {have} free host(s)"
        ]
    large, own = (
        sum(place.fits(spec.resources.room) for place in host_pool.places),
        len(host_pool.head.find_fitting(spec, host_pool.places)),
    )
    if own < workers <= large:
        cards = f"{spec.resources.gpus} GPU(s)"
        return [
            f"{id} requires {cards} on each of {workers} nodes{whose}, but all hosts of {host_pool.name} are one machine with GPUs for {own}"
        ]
    return []


def _report_uneven_hosts(id: str, spec: StepSpec, host_pool: HostPool) -> list[Problem]:
    """Report a multi-node step whose hosts have different numbers of GPUs.

    A launcher starts the same number of processes on each node.
    """
    if spec.resources.gpus is not None:
        return []
    gpus = {place.name: int(place.capacity.total_of("gpus")) for place in host_pool.places}
    if len(set(gpus.values())) <= 1:
        return []
    counts = ", ".join(f"{count} on {name}" for name, count in gpus.items())
    message = (
        f"{id} runs on {spec.nodes} nodes, but the hosts have different numbers of GPUs ({counts})"
    )
    return [Problem("nodes", message, fix="set the GPUs per node with `resources: {gpus: N}`")]
