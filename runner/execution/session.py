"""One path from a request to its end: survey, refuse what cannot work, submit, work, report.  `plan` is its first half.  Knows only the order."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ..errors import CannotRun, Infrastructure, Invalid, NotFound, Problem, RecipeError, did_you_mean
from ..logs import Log, mask
from ..paths import shipped
from ..planning.ids import names
from ..planning.judge import FRESH, MAYBE, RESTORE, RUN, SKIPPED, Verdict
from ..planning.step import StepSpec
from ..secrets import Masker
from ..storage.files import Content
from ..storage.workspace import Workspace
from ..survey.env_files import EnvFiles
from ..survey.survey import Request, Survey, out_dir, survey

if TYPE_CHECKING:
    from drivers.base import Need

    from ..hosts.pool import HostPool
    from ..storage.runs import Event, RunRow
    from .commit import GroupCommit
    from .loop import Report
    from .resume import Claimed
    from .unattended import END
    from .work import Failure


@dataclass(frozen=True, slots=True)
class Choice:
    """Which steps, of all that the plan has."""

    only: str | None = None
    until: str | None = None
    begin: str | None = None  # --from: this step and everything after it, whatever is remembered
    again: tuple[str, ...] = ()  # -R
    all: bool = False  # -B


class Overview(NamedTuple):
    """What is about to happen."""

    run: str
    recipe: str
    total: int
    fresh: int
    to_run: Sequence[str]
    expected: Mapping[str, float]
    jobs: int
    workspace: str
    masker: Masker = Masker()
    """Takes the run's secrets out of what a step prints."""
    command: Callable[[str], str] = lambda id: ""
    """A step's command as it would be typed, by the step's id."""
    steps: Callable[[str], float | None] = lambda id: None
    """How many steps a training takes, by the step's id; None where its inputs do not say."""


_log = Log("session")


class Summary(NamedTuple):
    """What happened.  `results` are (name, path) of what was published."""

    state: str
    counts: Mapping[str, int]
    seconds: float
    failed: Sequence[Failure] = ()
    results: Sequence[tuple[str, str]] = ()
    run: str = ""
    interrupted: bool = False
    left_running: Sequence[str] = ()


class Listener(Protocol):
    """Hears a run from beginning to end.  `tick` comes about ten times a second while the run waits."""

    def begin(self, overview: Overview) -> None: ...
    def events(self, batch: Sequence[Event]) -> None: ...
    def tick(self) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self, summary: Summary) -> None: ...


class Label(NamedTuple):
    """What the caller calls a run, for `runs` and `results`."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


NO_LABEL: Final = Label()


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run, as opposed to what."""

    driver: str = "local"  # where hosts come from
    hosts: tuple[str, ...] = ()  # for the driver, instead of those in the settings
    jobs: int = 0  # 0: one per processor here, or as many as the hosts have places
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = field(default_factory=dict)
    allow: tuple[str, ...] = ()  # preflight rules that are not asked; `all`: none is
    everything_there: bool = False  # on rented machines also steps that ask for no GPU
    label: Label = NO_LABEL
    python: str = ""  # for steps that have no lock: a path, a virtual environment, a name on PATH; else see hosts/interpreters.py


def look(ws: Workspace, request: Request, choice: Choice = Choice()) -> Survey:
    """What running `request` would do: the most that it will do, with reasons.  Raises Invalid, NotFound."""
    found = survey(ws, request, forced=frozenset(choice.again) | ({choice.begin} if choice.begin else frozenset()), all=choice.all)
    _check_ids(found, [*choice.again, *(id for id in (choice.only, choice.until, choice.begin) if id)])
    if choice.begin:
        later = found.plan.after(_named(found, choice.begin))
        found = survey(ws, request, forced=frozenset(choice.again) | {found.plan.nodes[n].id for n in later})
    if choice.only or choice.until:
        _restrict(found, choice)
    demand(ws, found)
    if ws.remote_cache is not None:
        from ..survey import remote_results

        remote_results.explain(ws, ws.remote_cache, found)
    return found


def demand(ws: Workspace, found: Survey) -> None:
    """A fresh step whose bytes are gone, and which a step that may run needs, runs too; from the last step to the first.

    One whose bytes a shared store has is restored from there.
    """
    nodes = found.plan.nodes
    taken = [u for n, verdict in enumerate(found.verdicts) if verdict.answer in (RUN, MAYBE) for u in nodes[n].upstream if u[0] in found.made]
    ws.objects.expect([Content(content) for u in taken if (content := found.made[u[0]].outputs.get(u[1])) is not None])
    for n in range(len(nodes) - 1, -1, -1):
        if found.verdicts[n].answer not in (RUN, MAYBE):
            continue
        for producer, output, _name, _below in nodes[n].upstream:
            verdict = found.verdicts[producer]
            content = found.made[producer].outputs.get(output) if producer in found.made else None
            if verdict.answer not in (FRESH, RESTORE) or content is None or ws.objects.intact(Content(content)):
                continue
            if _rescue(ws, found, producer, content):
                continue
            if content in ws.stored:
                if verdict.answer == FRESH:
                    found.verdicts[producer] = verdict._replace(answer=RESTORE, reasons=(*verdict.reasons, f"{nodes[n].id} needs it here"))
            else:
                found.verdicts[producer] = Verdict(
                    RUN, verdict.key, (f"its output {output} is not stored any more, and {nodes[n].id} needs it",), None
                )
                found.made.pop(producer)


def run(ws: Workspace, request: Request, choice: Choice, settings: Settings, listener: Listener, resumed: str = "") -> Summary:
    """Run what is not fresh.  Raises before anything starts when the request cannot work; a step that fails is in the summary.

    `resumed`: the run that goes on with it, paused or without a worker; by default one of the same request, else a new one.
    """
    since = _Since(time.monotonic(), ws.store.database.version())
    found = look(ws, request, choice)
    todo = found.todo
    _log.info("survey of %d steps took %.3f s, %d to run", len(found.verdicts), since.seconds, len(todo))
    if not todo:
        total, fresh = _sizes(found)
        listener.begin(Overview("", found.plan.recipe, total, fresh, (), {}, settings.jobs, str(ws.root)))
        _tell(ws, listener)
        if settings.driver != "local":
            from ..hosts import reaper

            for words in reaper.settle(settings.driver, settings.hosts, ws):
                listener.say(words)
        summary = Summary("COMPLETED", {"FRESH": fresh}, since.seconds, results=results(ws, found))
        listener.end(summary)
        return summary
    preflight(ws, found, settings)
    _check(ws, found, settings, listener)
    return _work(ws, found, choice, settings, listener, since, resumed)


class _Since(NamedTuple):
    """When a request came."""

    at: float  # by a clock that nobody sets
    version: int  # of the store

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.at


def _sizes(found: Survey) -> tuple[int, int]:
    """How many steps are asked for, and how many of them are fresh."""
    answers = [verdict.answer for verdict in found.verdicts]
    return len(answers) - answers.count(SKIPPED), answers.count(FRESH)


def _work(ws: Workspace, found: Survey, choice: Choice, settings: Settings, listener: Listener, since: _Since, resumed: str) -> Summary:
    import asyncio

    from ..hosts import client
    from ..planning.secret_values import all_given, of_addresses

    masker = Masker([*all_given(found.plan, os.environ), *of_addresses(ws.addresses.values())])
    mask(masker)
    local = client.here(ws.home / "local")  # what it takes to begin an agent passes while the rest is being prepared

    from ..hosts.interpreters import CURRENT
    from ..hosts.pool import HostPool, need_for
    from . import loop, resume
    from .work import Options, Work

    total, fresh = _sizes(found)
    how = {"driver": settings.driver, "hosts": settings.hosts, "choice": asdict(choice), "nodes": found.request.nodes}
    digest = resume.request_digest(ws, found, how)
    taken = resume.take_over(ws, found, digest, resumed)
    id = taken.id if taken is not None else new_id()
    fence = taken.fence if taken is not None else 0
    commits: GroupCommit | None = None

    async def work() -> tuple[Report, bool]:
        nonlocal commits, fence
        python = CURRENT if found.request.current_python else settings.python
        host_pool = HostPool(ws, id, local, settings.driver, settings.hosts, listener.say, python, settings.everything_there)
        try:
            counts = [found.plan.specs()[n].node_count for n in found.todo]
            await host_pool.open(want=settings.jobs or sum(counts), nodes=max(counts))
            needs = {need_for(spec.resources) for spec in _sent(found, host_pool)} if host_pool.priced else set()
            fits(ws, found, host_pool, settings, await host_pool.offered(needs))
            if found.request.current_python:
                await host_pool.match(host_pool.sites)
            jobs = settings.jobs or _at_once(found, host_pool)
            begins = taken or _submitted(ws, found, id, digest, choice, settings)
            fence = begins.fence
            commits = _begun(ws, found, begins, jobs, listener, total, fresh, masker)
            contended = ws.store.database.version() != since.version
            options = Options(jobs, settings.keep_going, settings.overwrite, settings.link, settings.pools, contended, settings.jobs)
            working = Work(ws, found, commits, host_pool, options, begins, listener.tick)
        except BaseException:
            await host_pool.close(leave=True)
            raise
        report = await loop.run(working)
        if report.state == "COMPLETED" and found.library:
            loop.publish_all(working)
            _point_latest(ws, found)
        return report, working.control.interrupts > 0

    # The plan stays whole until the run ends: the collector need not walk it with every few steps.
    gc.freeze()
    try:
        report, interrupted = asyncio.run(work())
    except BaseException as error:
        _given_up(ws, id, fence, commits, error)
        if ours := _in_our_words(error, ws, settings):
            raise ours from error
        raise
    finally:
        gc.unfreeze()
        if commits is not None:
            commits.keys.close()
    assert commits is not None
    state = _over(ws, commits, report, "interrupted" if interrupted else "")
    if state == "PAUSED" and commits.answers == "resume":  # asked for when everything had stopped already
        return run(ws, found.request, choice, settings, listener, id)
    interrupted = interrupted or (bool(commits.answers) and state in ("CANCELLED", "PAUSED"))
    made = results(ws, found) if report.state == "COMPLETED" else ()
    counts = {**report.counts, "FRESH": report.counts.get("FRESH", 0) + fresh}
    summary = Summary(state, counts, since.seconds, report.failures, made, id, interrupted, report.abandoned)
    if ws.remote_cache is not None and not report.abandoned:
        ws.remote_cache.finish(listener.say)
    _tell(ws, listener)
    listener.end(summary)
    return summary


def _over(ws: Workspace, commits: GroupCommit, report: Report, why: str) -> str:
    """Store the end of a run, and answer its state; one that was left is there for the next worker, a paused one for who resumes it."""
    if report.abandoned:
        commits.flush()
        ws.store.runs.release(commits.run, commits.fence)
        return report.state
    state = _closed(commits, report.state, why)
    if state == "PAUSED":
        ws.store.runs.release(commits.run, commits.fence)
    return state


def _closed(commits: GroupCommit, state: str, why: str) -> str:
    """Store the state in which a run ends, and answer it: a cancel of the last moment wins over any other."""
    from ..planning.schedule import Move
    from ..storage.runs import Requested

    while True:
        reason = {"cancel": "cancelled", "pause": "paused"}.get(commits.answers, why) if state in ("CANCELLED", "PAUSED") else why
        commits.move(Move("run", commits.run, "ACTIVE", state, reason))
        try:
            commits.flush((state, reason))
            return state
        except Requested as error:
            commits.take_back()
            commits.answers = error.request
            state = "CANCELLED" if error.request == "cancel" else state


def end_unattended(ws: Workspace, row: RunRow, state: END, say: Callable[[str], None]) -> bool:
    """Cancel or pause a run that no worker has.  False: a worker has it after all.

    What it left running on this machine is stopped.  What it left on others is named: a run with the same driver takes it up, or ends it.
    """
    import asyncio

    from ..hosts import client
    from . import unattended
    from .orphans import left_by

    fence = unattended.claimed(ws, row)
    if fence is None:
        return False
    names, elsewhere = left_by(f"{ws.home}/attempts", row.id)
    for name, site in elsewhere.items():
        say(f"{site} may go on with {name}, a job of {row.id}: `recipe run` with the same driver takes it up, or ends it")

    async def end() -> None:
        local = client.here(ws.home / "local")
        await unattended.end(local, names)
        await local.aclose()

    try:
        if names:
            asyncio.run(end())
        unattended.close(ws, row, fence, state)
    except BaseException:
        ws.store.runs.release(row.id, fence)
        raise
    return True


def _given_up(ws: Workspace, id: str, fence: int, commits: GroupCommit | None, error: BaseException) -> None:
    """Store that an error ended a run, or leave the run to the next worker."""
    from drivers.base import DriverError

    if commits is not None and isinstance(error, (RecipeError, DriverError)):
        with contextlib.suppress(Infrastructure):  # the store itself may be what failed
            _closed(commits, "FAILED", str(error))
    if fence:
        ws.store.runs.release(id, fence)


def _in_our_words(error: BaseException, ws: Workspace, settings: Settings) -> RecipeError | None:
    """What the person at the keyboard can act on, for an error from below; None for any other."""
    from drivers.base import DriverError

    if isinstance(error, DriverError):
        return Infrastructure(str(error), fix=f"`recipe doctor --driver {settings.driver}` looks at each part of the way there")
    if isinstance(error, OSError):
        from ..storage.files import no_space

        return no_space(error, str(error.filename or ws.home))
    return None


def _submitted(ws: Workspace, found: Survey, id: str, digest: str, choice: Choice, settings: Settings) -> Claimed:
    """A new run, stored and claimed."""
    from ..storage.crash import crashpoint
    from ..storage.runs import RunRow
    from .resume import Claimed

    total, fresh = _sizes(found)
    data = {"source": str(found.source), "asked": asked(found.request), "digest": digest, "total": total, "fresh": fresh}
    data |= {"choice": asdict(choice), "settings": {name: value for name, value in asdict(settings).items() if name != "label"}}
    data |= {name: value for name, value in settings.label._asdict().items() if value}
    ws.store.runs.submit(RunRow(id, found.plan.recipe, found.plan.digest, found.plan.inputs, str(ws.root), created=time.time(), data=data))
    fence = ws.store.runs.claim(id, f"process {os.getpid()}")
    if fence is None:
        raise Infrastructure(f"the new run {id} is claimed by somebody else")
    crashpoint("run-claimed")
    return Claimed(id, fence)


def _begun(ws: Workspace, found: Survey, begins: Claimed, jobs: int, listener: Listener, total: int, fresh: int, masker: Masker) -> GroupCommit:
    """The pen of a claimed run; what it begins with is noted and shown."""
    from ..planning.schedule import Move
    from ..survey import run_graph
    from ..survey.input_manifests import remember
    from .commit import GroupCommit

    recipe, ids = found.plan.recipe, [found.plan.nodes[n].id for n in found.todo]
    remember(ws, found)
    if not begins.resumed:
        run_graph.remember(ws, begins.id, found)
    expected = ws.store.index.expected(recipe, ids)
    _log.info("run %s %s: %d steps, %d at once", begins.id, "resumed" if begins.resumed else "submitted", len(ids), jobs)
    commits = GroupCommit(ws, begins.id, begins.fence, recipe, listener, expected, listener.say, masker, tries=begins.tries, made=begins.made)
    listener.begin(
        Overview(begins.id, recipe, total, fresh, ids, expected, jobs, str(ws.root), masker, partial(_typed, found), partial(_steps, found))
    )
    _tell(ws, listener)
    if begins.resumed:
        listener.say(f"resuming run {begins.id}, {'which was paused' if begins.state == 'PAUSED' else 'whose worker is gone'}")
    commits.move(Move("run", begins.id, begins.state, "ACTIVE", "resumed" if begins.resumed else "", {"fresh": fresh, "steps": len(ids)}))
    return commits


def _tell(ws: Workspace, listener: Listener) -> None:
    """What a person should know of the store that is shared."""
    for notice in ws.remote_cache.told() if ws.remote_cache is not None else ():
        listener.say(notice)


def _typed(found: Survey, id: str) -> str:
    from ..survey.explain import shown_command

    return shown_command(found, found.plan.index[id])[0]


_TOTALS: Final = ("max_steps", "total_steps", "train_steps", "num_steps")
"""Inputs that say how many steps a training takes."""


def _steps(found: Survey, id: str) -> float | None:
    n = found.plan.index.get(id)
    author = found.plan.specs()[n].author if n is not None else {}
    reads = author.get("reads", {})
    given = (reads.get(f"{kind}.{name}") for name in _TOTALS for kind in ("matrix", "inputs"))
    return next((float(value) for value in given if isinstance(value, (int, float)) and value > 0), None)


def results(ws: Workspace, found: Survey) -> list[tuple[str, str]]:
    """The outputs that the recipe declares, and where they lie; a recipe that declares none has its steps' files where they say."""
    base = out_dir(ws, found.plan, found.library, found.request)
    shown = []
    for n, output, path, name in found.plan.publish:
        made = found.made.get(n)
        if name and (made is None or output in made.outputs) and os.path.lexists(base / path):
            shown.append((name, os.path.relpath(base / path, Path.cwd())))
    return shown


def preflight(ws: Workspace, found: Survey, settings: Settings) -> None:
    """Refuse what cannot work here, before anything starts: every reason at once."""
    wrong, gone, unset, unread = [], [], list[str](), list[str]()
    specs, env_files = found.plan.specs(), EnvFiles(ws.root)
    for n in found.todo:
        if found.verdicts[n].answer == RESTORE or specs[n].select is not None:
            continue
        from ..advice.facts.missing_inputs import missing
        from ..planning.secret_values import faults

        spec, id = specs[n], found.plan.nodes[n].id
        gone += [f"{id} needs {path}, which {why}" for path, why in missing(ws, found, n)]
        if isinstance(spec.nodes, str):
            wrong.append(f"{id} has as many nodes as `{spec.nodes}` says, which is not known before the run: `nodes` may read inputs and the matrix")
        elif spec.node_count > 1 and settings.driver == "local":
            wrong.append(f"{id} needs {spec.nodes} nodes; the driver local gives one")
        wrong += _kept_apart(found, n)
        unset += faults(id, spec, os.environ)
        unread += env_files.faults(spec.env_files)
    clashes = [] if settings.overwrite else found.conflicts
    if clashes:
        from ..survey.explain import replaced

        shown = "\n".join(f"the run would replace {words}" for words in replaced(ws, clashes[:5]))
        shown += f"\nand {len(clashes) - 5} more" if len(clashes) > 5 else ""
        raise CannotRun(shown, fix="move it away or give --overwrite; `recipe adopt STEP` takes it for what the step makes")
    if gone:
        lines = [*gone, *unset, *wrong]
        shown = "\n".join(lines[:20]) + (f"\nand {len(lines) - 20} more" if len(lines) > 20 else "")
        raise CannotRun(shown, fix=f"give it, or correct its name: paths of a recipe begin at {ws.root}, those with ./ or ../ at its own folder")
    if unread:
        raise CannotRun(
            "\n".join(dict.fromkeys([*unread, *unset, *wrong])),
            fix=f"write it, with a line NAME=value for each variable, or take it out of `env_file`; its path begins at {ws.root}",
        )
    if unset:
        raise CannotRun("\n".join(dict.fromkeys([*unset, *wrong])), fix="a secret comes from the environment: export its variable, and run again")
    if wrong:
        shown = "\n".join(dict.fromkeys(wrong[:20]))
        raise CannotRun(shown, fix="use a preset that fits (`--preset smoke`), or another driver")


def _check(ws: Workspace, found: Survey, settings: Settings, listener: Listener) -> None:
    """Ask the preflight rules: say what is a warning, refuse what is an error.  Raises Invalid."""
    if not (numbers := concerned(found)):
        return
    from ..advice import findings, preflight

    python = "current" if found.request.current_python else settings.python
    verdict = preflight.check(ws, found, numbers, driver=settings.driver, python=python, allow=settings.allow)
    findings.refuse(verdict, found)
    for finding in verdict.findings:
        if finding.rule.severity == "warning":
            listener.say(f"warning: {finding.rule.id}: {finding.message}")


def concerned(found: Survey) -> list[int]:
    """The nodes that may run, of a recipe that may train or has preflight rules beside it; else none.  Costs next to nothing."""
    if not found.todo:
        return []

    specs, ours = found.plan.specs(), str(shipped() / "recipes")
    own = any(os.path.realpath(home) != ours and os.path.exists(f"{home}/gotchas.yaml") for home in {str(found.source.parent), *found.plan.homes})
    return found.todo if own or any(map(_may_train, specs)) else []


def _may_train(spec: StepSpec) -> bool:
    return spec.select is None and bool(spec.accelerate or spec.state or spec.resources.gpus or "train" in spec.step)


def _sent(found: Survey, host_pool: HostPool) -> list[StepSpec]:
    """What runs elsewhere than on this machine."""
    from ..planning.plan import LOCAL

    nodes, specs = found.plan.nodes, found.plan.specs()
    there = [specs[n] for n in found.todo if not nodes[n].flags & LOCAL and specs[n].select is None]
    return [spec for spec in there if not host_pool.stays(spec.resources)]


def _at_once(found: Survey, host_pool: HostPool) -> int:
    """How many steps run at once where nobody says it: as many as there are processors here, or places elsewhere."""
    processors = len(os.sched_getaffinity(0))
    if host_pool.priced:  # how many a machine takes is seen when it is up
        return processors + len(_sent(found, host_pool))
    return sum(site.slots or 1 for site in host_pool.sites) if host_pool.away else processors


def fits(ws: Workspace, found: Survey, host_pool: HostPool, settings: Settings, offered: Collection[Need] = ()) -> None:
    """Refuse steps that no place has room for, before anything starts: every one at once.  Raises CannotRun, Invalid."""
    from ..hosts.pool import need_for
    from ..language.units import about
    from ..planning.plan import LOCAL

    wrong, uneven = [], list[Problem]()
    specs = found.plan.specs()
    for n in found.todo:
        if found.verdicts[n].answer == RESTORE or specs[n].select is not None:
            continue
        node, wants = found.plan.nodes[n], specs[n].resources
        near = bool(node.flags & LOCAL) or host_pool.stays(wants)
        if host_pool.priced and not near:
            if need_for(wants) not in offered:
                asked_for = ", ".join(f"{name} {value}" for name, value in wants.asked.items())
                wrong.append(f"{node.id} needs {asked_for or 'a machine'}; {host_pool.name} offers no such machine now")
            continue
        sites, count = [host_pool.here] if near else host_pool.sites, specs[n].node_count
        if count > 1:
            uneven += _uneven(node.id, specs[n], host_pool)
            wrong += _few(node.id, specs[n], host_pool)
        for name, unit in (("gpus", "GPU(s)"), ("cpus", "processors"), ("memory", "")):
            asked = wants.room.get(name)
            if not asked:
                continue
            sizes = sorted((site.has(name) for site in sites), reverse=True)
            most = settings.pools[name] if name in settings.pools else sizes[min(count, len(sizes)) - 1]
            if asked > most:
                whose = "this machine has" if sites == [host_pool.here] else "its largest host has"
                need, there = (f"{each:,.{0 if each == int(each) else 3}f}" if unit else about(each) for each in (asked, most))
                wrong.append(f"{node.id} needs {need} {unit or 'of memory'}; {whose} {there}")
    if wrong:
        shown = "\n".join(dict.fromkeys(wrong[:20]))
        raise CannotRun(shown, fix="use a preset that fits (`--preset smoke`), or another machine")
    if uneven:
        raise Invalid(uneven)


def _kept_apart(found: Survey, n: int) -> list[str]:
    """What a step on several nodes takes that stays on one host."""
    if found.plan.specs()[n].node_count == 1:
        return []
    from ..planning.step import TEMPORARY

    nodes, wrong = found.plan.nodes, []
    for each in nodes[n].upstream:
        if any(name == each.output and flags & TEMPORARY for name, _, flags in nodes[each.producer].outputs):
            wrong.append(
                f"{nodes[n].id} runs on several nodes and takes {nodes[each.producer].id}'s {each.output}, which is `temporary`: it stays on one"
            )
    return wrong


def _few(id: str, spec: StepSpec, host_pool: HostPool) -> list[str]:
    """Words for a step that has more nodes than there are hosts."""
    if host_pool.priced:
        return [f"{id} needs {spec.nodes} nodes; {host_pool.name} rents single machines"]
    have = sum(bool(site.address) for site in host_pool.sites)
    return [f"{id} needs {spec.nodes} nodes; {host_pool.name} has {have} host(s) free"] if have < spec.node_count else []


def _uneven(id: str, spec: StepSpec, host_pool: HostPool) -> list[Problem]:
    """Words for hosts that would not be given the same work: a launcher starts as many processes on each node."""
    if spec.resources.gpus is not None:
        return []
    gpus = {site.name: int(site.has("gpus")) for site in host_pool.sites}
    if len(set(gpus.values())) <= 1:
        return []
    counts = ", ".join(f"{count} on {name}" for name, count in gpus.items())
    message = f"{id} runs on {spec.nodes} nodes, and the hosts have different numbers of GPUs ({counts})"
    return [Problem("nodes", message, fix="say with `resources: {gpus: N}` how many each node takes")]


def asked(request: Request) -> dict[str, object]:
    """A request as it is stored with its run: what `why` and `status` ask about when nothing else is named."""
    inputs = json.loads(json.dumps(dict(request.inputs), default=str))
    out = str(request.out) if request.out is not None else None
    return {
        "recipe": request.recipe,
        "inputs": inputs,
        "preset": request.preset,
        "out": out,
        "current_python": request.current_python,
        "nodes": request.nodes,
    }


def new_id() -> str:
    """A run's name: the time it began, to read and to sort by, and enough chance to be the only one."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(3).hex()


def _rescue(ws: Workspace, found: Survey, producer: int, content: str) -> bool:
    """A published copy that still holds the bytes goes back into the store."""
    from ..storage.files import Content

    for output, path in found.places.get(producer, ()):
        if found.made[producer].outputs.get(output) == content and found.facts.there.get(path) == content:
            if not ws.read_only:
                ws.objects.remove(Content(content))
                ws.objects.put(ws.root / path, Content(content), move=False)
            return True
    return False


def _check_ids(found: Survey, asked: Sequence[str]) -> None:
    known = {node.id for node in found.plan.nodes}
    for id in asked:
        if not _named(found, id):
            hint = did_you_mean(id, {k.partition("[")[0] for k in known} | known)
            raise NotFound(f'{found.plan.recipe} has no step "{id}"', fix=hint or f"its steps: {', '.join(sorted(known)[:10])}")


def _named(found: Survey, id: str) -> set[int]:
    return {n for n, node in enumerate(found.plan.nodes) if id in names(node.id)}


def _restrict(found: Survey, choice: Choice) -> None:
    """Leave alone what was not asked for."""
    asked = _named(found, choice.only or choice.until or "")
    wanted = found.plan.before(asked) if choice.until else asked
    for n, verdict in enumerate(found.verdicts):
        if choice.only and n not in wanted and any(n in found.plan.needs(a) for a in asked) and verdict.answer in (RUN, MAYBE):
            raise CannotRun(f"{found.plan.nodes[n].id}, which {choice.only} needs, is not fresh", fix=f"run it first, or use --until {choice.only}")
        if n not in wanted and verdict.answer in (RUN, MAYBE, RESTORE):
            found.verdicts[n] = Verdict(SKIPPED, None, ("not asked for",), None)


def _point_latest(ws: Workspace, found: Survey) -> None:
    """Link `latest` to the folder of this run's results, if it published any."""
    base = out_dir(ws, found.plan, found.library, found.request)
    if found.request.out is None and base.is_dir():
        link = base.parent / "latest"
        fresh = link.with_name(f"latest.{os.getpid()}")
        fresh.symlink_to(base.name)
        fresh.replace(link)
