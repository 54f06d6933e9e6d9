"""Staging of a step's inputs into its attempt directory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...hosts.place.overlays import WORD, Overlays
from ...hosts.place.place import Place
from ...hosts.place.staging import AttemptDirectory
from ...planning.plan import Node
from ...planning.step import Source, StepSpec, Upstream
from ...storage.content.files import Content
from ...storage.content.inputs import StoredInputs
from ...storage.git_checkout import checkout, locate
from ...storage.sources import fetch, identify_files
from ...storage.workspace import Workspace
from .commit import GroupCommit
from .environments import StepEnvironments
from .run_plan import RunPlan


class InputStager:
    """Stager of the inputs of one run's attempts."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        commits: GroupCommit,
        environments: StepEnvironments,
    ) -> None:
        self._ws, self._steps, self._commits = ws, steps, commits
        self._environments = environments
        self._top = str(ws.root)
        self._inputs = StoredInputs(ws.objects, ws.cache)
        self._explained: set[tuple[str, str]] = set()  # explained inputs with reasons
        wants_overlays = ws.config.inputs == WORD
        self._overlays = Overlays(str(ws.home)) if wants_overlays else None

    def stage(self, node: Node, spec: StepSpec, directory: AttemptDirectory, place: Place) -> None:
        """Link or copy all inputs of a step into its attempt directory.

        An output that exists only on the step's host is added as a reference.
        """
        cache = self._ws.cache
        directory.boxed = bool(self._environments.container_image(spec, place))
        is_closed = directory.boxed or bool(self._environments.sandbox(spec))
        if self._overlays is not None and not is_closed and not place.elsewhere:
            directory.overlays = self._usable_overlays()
        inputs = None if place.own_disk else self._inputs
        add = functools.partial(directory.add_path, cache, inputs=inputs)
        for at, content, source, name, group in self._declared_inputs(node):
            add(at, content, source, name, copy=not group, group=group)
        for url, commit, at in spec.git:
            repository = locate(url, self._steps.plan.homes[node.home])
            checkout(self._ws, repository, commit, Path(directory.target_of(at)))
        for taken in node.takes:
            if taken.kind == "path":
                self._stage_path(taken, directory, add)
            # The host itself downloads an input that is an object already.
            elif taken.kind != "stream" and taken.name not in directory.objects:
                source = self._fetch(taken)
                add(source, None, source, taken.name)
        for upstream in node.upstream:
            self._stage_output(upstream, directory, place, add)
        directory.stage_queued_files(cache, self._inputs)

    def _stage_path(
        self, taken: Source, directory: AttemptDirectory, add: Callable[..., None]
    ) -> None:
        """Stage a file or directory of the caller, or only some files of a directory."""
        source = str(self._ws.absolute(taken.address))
        known = self._steps.facts.takes[taken.lookup_key]
        if not taken.only or not os.path.isdir(source):
            add(source, known, source, taken.name)
            return
        identity, contents = identify_files(self._ws.cache, source, taken.only)
        for path in contents:
            each = f"{source}/{path}"
            add(each, contents[path], each, f"{taken.name}/{path}", group=taken.name)
        if identity != known:
            directory.doubtful.append(source)  # a file changed after the key was computed

    def _fetch(self, taken: Source) -> str:
        """Download an input to this machine, and return its path."""
        identity = str(self._steps.facts.takes[taken.lookup_key])
        source = fetch(self._ws, taken.kind, taken.address, identity, taken.only)
        if taken.address in self._ws.addresses:
            self._ws.store.runs.forget_opener(self._commits.run, taken.address)
        return str(source)

    def _stage_output(
        self,
        upstream: Upstream,
        directory: AttemptDirectory,
        place: Place,
        add: Callable[..., None],
    ) -> None:
        """Stage an output of an earlier step, or a file below it."""
        producer, output, name, below = upstream
        objects = self._ws.objects
        made = self._steps.made[producer].outputs.get(output)
        if made is None:
            return  # a missing optional output
        if below and place.own_disk:
            source = f"{objects.path(Content(made))}/{below}"
            add(source, None, source, name)
        elif below:
            directory.add_part(objects, made, below, name)
        elif place.folder.holds(made) and not objects.has(Content(made)):
            directory.objects[name] = made
        else:
            directory.add_object(objects, made, name, by_link=place.own_disk)

    def _usable_overlays(self) -> Overlays | None:
        """Return the overlay mounts for writable inputs; None, with a message, if they fail."""
        overlays = self._overlays
        if overlays is None or not (why := overlays.refusal(str(self._ws.home))):
            return overlays
        self._overlays = None
        self._commits.say(
            f'inputs = "{WORD}" of recipe.toml is not supported on this machine ({why}): '
            "steps get read-only inputs instead"
        )
        return None

    def explain(self, node: Node, directory: AttemptDirectory) -> None:
        """Explain, once per run, why an input is a link or is copied for each step."""
        for name, why in directory.notices.items():
            if (name, why) not in self._explained:
                self._explained.add((name, why))
                self._commits.say(f"{node.id}: input {name}: {why}")

    def _declared_inputs(self, node: Node) -> Iterator[tuple[str, str | None, str, str, str]]:
        """Yield the caller's files and directories that a step declares as inputs.

        Each item is (name in the cache, content, path, name in the directory, pattern). The
        pattern is empty for code, which is copied.
        """
        facts = self._steps.facts
        found = {path: dep for dep in node.deps for path in facts.matches.get(dep, (dep,))}
        for path in sorted(found):  # a directory before its contents
            yield path, facts.files.get(path), f"{self._top}/{path}", path, found[path]
        for pattern in node.code:
            base = os.path.realpath(self._steps.plan.homes[node.home])
            for name, content in facts.code.get((node.home, pattern), ()):
                yield f"{base}/{name}", content, f"{base}/{name}", name, ""

    def recall(self, node: Node, directory: AttemptDirectory) -> bool:
        """Return True if the inputs staged by an earlier worker match the step's cache key.

        Later checks then treat these inputs as if this worker had staged them.
        """
        same = [
            directory.recall_path(self._ws.cache, at, content or "", source, name)
            for at, content, source, name, _ in self._declared_inputs(node)
        ]
        for name, kind, address, only in node.takes:
            if kind == "path" and not only:
                source, identity = (
                    str(self._ws.absolute(address)),
                    self._steps.facts.takes[kind, address],
                )
                same.append(
                    directory.recall_path(self._ws.cache, source, identity or "", source, name)
                )
        for producer, output, name, below in node.upstream:
            made = self._steps.made[producer].outputs.get(output)
            if made is not None and not below:
                same.append(directory.recall_object(made, name))
        return all(same)
