"""What a step needs is final: must it run, or is its result here already?  Asks the planner, and notes the answer."""

from __future__ import annotations

from collections.abc import Container

from ...errors import RecipeError
from ...planning.judge import FRESH, NOTHING, RESTORE, Made, Verdict, judge
from ...planning.plan import SELECT
from ...planning.schedule import State
from ...planning.secret_values import all_given
from ...storage.content.files import Content
from ...storage.records.index import warnings_in
from ...storage.remote.cache import Downloads
from ...survey.facts import collect_facts
from ...survey.plan_cache import compile_request
from ...survey.survey import find_expansions
from .failing import Cause
from .work import Work


def judge_ready(work: Work) -> bool:
    """Judge every step whose needs are final; True when something moved."""
    moved = False
    for id in work.schedule.ready():
        if work.downloads is not None and (work.downloads.awaited(id) or _behind(work, id)):
            continue
        _judge(work, id, work.steps.plan.index[id])
        moved = True
    return moved


def _judge(work: Work, id: str, n: int) -> None:
    for need in (
        work.steps.plan.needs(n) - work.steps.made.keys()
    ):  # skipped because of another, or failed under an earlier worker, and left out
        if (other := work.steps.plan.nodes[need].id) in work.steps.todo and work.schedule.state(
            other
        ) in (
            State.SKIPPED,
            State.FAILED,
        ):
            work.steps.set_made(need, NOTHING)
    try:
        verdict = _verdict(work, n)
        for _ in range(work.smaller_inputs.take_earlier(id)):
            if not work.smaller_inputs.are_used_by(id):
                work.steps.judged(id, verdict)
            if work.smaller_inputs.divide(id):
                verdict = _verdict(work, n)
    except RecipeError as error:
        return _refuse(work, id, "when", str(error), error.fix)
    work.steps.judged(id, verdict)
    if work.downloads is not None and _sent_for(work, work.downloads, id, n, verdict):
        return None
    reasons = "; ".join(verdict.reasons)
    if verdict.answer in (FRESH, RESTORE):
        assert verdict.made is not None
        return _reuse(work, id, n, verdict, verdict.made)
    if verdict.answer == "skip":
        work.steps.set_made(n, NOTHING)
        work.schedule.judge(id, "skip", reasons)
    elif work.steps.plan.nodes[n].flags & SELECT:
        _refuse(work, id, "select", reasons)
    else:
        work.schedule.judge(id, "run", reasons)
    return None


def _reuse(work: Work, id: str, n: int, verdict: Verdict, made: Made) -> None:
    """A step need not run: what it made earlier is taken, if the steps that need it can have it."""
    if not _can_be_taken(work, n, made):
        gone = "its stored output is gone"
        if work.downloads is None or not _sent_for(
            work, work.downloads, id, n, Verdict("run", verdict.key, (gone,), None)
        ):
            work.schedule.judge(id, "run", gone)
        return
    work.steps.set_made(n, made)
    if (
        work.smaller_inputs.are_used_by(id)
        and verdict.key is not None
        and (trace := work.ws.store.index.trace(verdict.key)) is not None
    ):
        work.smaller_inputs.note_result(id, trace)
    if verdict.answer == RESTORE:
        try:
            work.publisher.publish(n, made)
        except RecipeError as error:
            return _refuse(work, id, "publish", str(error), error.fix)
    data: dict[str, object] = {"restored": True} if verdict.answer == RESTORE else {}
    metrics = work.steps.spec(id).metrics
    if metrics is not None and metrics.in_environment and verdict.key is not None:
        trace = work.ws.store.index.trace(verdict.key)
        if trace is not None and (warnings := warnings_in(trace)):
            data["warnings"] = warnings
    work.schedule.judge(id, "fresh", "; ".join(verdict.reasons), data)
    grow(work)


def _refuse(work: Work, id: str, reason: str, words: str, fix: str = "") -> None:
    """A step that cannot even be judged fails, when it is its turn."""
    work.refused[id] = Cause(reason, words, fix)
    work.schedule.judge(id, "run", "")


def _verdict(work: Work, n: int) -> Verdict:
    id = work.steps.plan.nodes[n].id
    verdict = judge(
        work.steps.plan,
        n,
        work.steps.facts,
        work.steps.made,
        force=work.survey.forces(id),
        targets=work.survey.targets,
    )
    if verdict.forced and verdict.key in work.commits.made:
        # This run has made it anew already.
        return judge(
            work.steps.plan, n, work.steps.facts, work.steps.made, targets=work.survey.targets
        )
    return verdict


def is_made(work: Work, n: int) -> bool:
    """Whether a step that was to run need not any more."""
    verdict = _verdict(work, n)
    return (
        verdict.answer in (FRESH, RESTORE)
        and verdict.made is not None
        and _can_be_taken(work, n, verdict.made)
    )


def _can_be_taken(work: Work, n: int, made: Made) -> bool:
    contents = [made.outputs[name] for name in _taken(work, n) if name in made.outputs]
    cache = work.ws.remote_cache
    there = {
        each
        for each in contents
        if cache is not None and work.ws.delivers and cache.has(Content(each))
    }
    return all(
        each in there
        or work.ws.objects.has(Content(each))
        or any(place.folder.holds(each) for place in work.host_pool.places)
        for each in contents
    )


def _taken(work: Work, n: int) -> set[str]:
    """The outputs of a step that others of this run take."""
    return {
        u.output
        for id in work.steps.consumers(n)
        for u in work.steps.plan.nodes[work.steps.plan.index[id]].upstream
        if u.producer == n
    }


def _sent_for(work: Work, downloads: Downloads, id: str, n: int, verdict: Verdict) -> bool:
    """Whether the shared store is asked for something that this step needs, or what made it runs again: it is judged anew when that is there."""
    node, contents = work.steps.plan.nodes[n], dict[str, int]()
    if verdict.made is not None:
        shown = [
            output
            for output, path in work.survey.targets.get(n, ())
            if work.steps.facts.there.get(path) != verdict.made.outputs.get(output)
        ]
        contents = {
            verdict.made.outputs[name]: n
            for name in {*shown, *_taken(work, n)}
            if name in verdict.made.outputs
        }
    elif verdict.answer == "run":
        contents = {
            work.steps.made[u.producer].outputs[u.output]: u.producer
            for u in node.upstream
            if u.output in work.steps.made[u.producer].outputs
        }
    missing = [
        Content(content) for content in contents if not work.ws.objects.has(Content(content))
    ]
    if downloads.ask(id, node, verdict, missing):
        return True
    lost = {contents[content] for content in missing} if verdict.made is None else set()
    for producer in lost:
        _revive(work, work.steps.plan.nodes[producer].id)
    work.held[id] = {work.steps.plan.nodes[producer].id for producer in lost}
    return bool(lost)


def _revive(work: Work, id: str) -> None:
    """What a step made cannot be had any more: it is judged again, and runs."""
    if id in work.steps.todo:
        if work.schedule.state(id) in (State.FRESH, State.DONE):
            work.schedule.make_again(id, "its stored output is gone")
            work.schedule.judge_again(id, "what it needs may have to be brought")
        return
    work.add({id})


def _behind(work: Work, id: str) -> bool:
    """Whether a step that could be judged waits for one that was found to have to run again."""
    return any(
        work.schedule.state(other) in (State.WAITING, State.READY, State.QUEUED, State.RUNNING)
        for other in work.held.get(id, ())
    )


def grow(work: Work) -> None:
    """A pending matrix whose files are known by now becomes its instances."""
    if not work.steps.plan.pending:
        return
    grown = find_expansions(work.ws, work.steps.plan, work.steps.made)
    fresh = {k: v for k, v in grown.items() if k not in work.survey.globs}
    if not fresh:
        return
    work.survey.globs.update(fresh)
    old = work.steps.plan
    plan = compile_request(work.ws, work.survey.source, work.survey.request, work.survey.globs)
    before = {path for targets in work.survey.targets.values() for _, path in targets}
    work.survey.targets = work.survey.targets_of(work.ws, plan)
    facts = collect_facts(work.ws, plan, work.survey.request)
    facts.there = dict(
        work.ws.cache.contents(
            path for targets in work.survey.targets.values() for _, path in targets
        )
    )
    facts.ours = work.ws.published()
    work.steps.replace(plan, facts)
    work.running.renumber(plan)
    work.commits.masker.learn(all_given(plan, work.ws.environ))
    known = {node.id for node in old.nodes}
    wanted = {work.steps.plan.nodes[n].id for n in work.survey.wanted(work.steps.plan)}
    new = wanted - known | wanted & work.survey.aside
    work.survey.aside -= new
    if work.survey.begin:
        work.survey.forced |= {
            work.steps.plan.nodes[n].id
            for n in work.steps.plan.after(work.steps.plan.named(work.survey.begin))
        }
    work.commits.expanded(fresh, len(new))
    work.add(new | _unpublished(work, before) & wanted)


def _unpublished(work: Work, before: Container[str]) -> set[str]:
    """Fresh steps that are to be published where it was not known `before` that they are.  What this run made is published at once."""
    found = set()
    for n, targets in work.survey.targets.items():
        left = work.steps.made.get(n)
        if (
            left is None
            or not left.ok
            or work.survey.library
            or all(path in before for _, path in targets)
        ):
            continue
        id = work.steps.plan.nodes[n].id
        if id not in work.steps.todo:
            found.add(id)
            continue
        try:
            work.publisher.publish(n, left)
        except RecipeError as error:
            work.commits.say(f"{id}: {error}")
    return found
