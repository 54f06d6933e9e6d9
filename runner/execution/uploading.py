"""Upload of a run's results to its `--out` address, before the run is COMPLETED.

A run that changes nothing needs one request, which checks the earlier upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..digest import of_value
from ..errors import Infrastructure, RecipeError
from ..language.units import about, count_text
from ..paths import temporary_name
from ..planning.judge import StepResult
from ..planning.plan import Plan
from ..planning.step import TEMPORARY
from ..retry import backoff, retry
from ..settings import StoreSettings
from ..storage.buckets import hub, results_folder
from ..storage.buckets import opening as buckets
from ..storage.buckets.bucket import Bucket, BucketUnreachable
from ..storage.buckets.results_folder import MANIFEST, UploadFile, manifest
from ..storage.content.disk import delete
from ..storage.content.files import Content, Entry
from ..storage.workspace import Workspace

if TYPE_CHECKING:
    from ..survey.survey import Survey
    from .terms import Listener

HUB: Final = "hf://"
TRIES: Final = 3
"""Maximum number of upload attempts; each attempt continues with the missing files."""
PAUSE: Final = 5.0
"""Delay before the next upload attempt, in seconds."""
SPOKEN: Final = 10.0
"""Interval between progress messages of a long upload, in seconds."""
LATEST: Final = "latest.json"
"""Name of the file with the name of a recipe's latest result directory."""


def check(ws: Workspace, plan: Plan, address: str) -> None:
    """Check that the upload address can be used.

    Raises Invalid, Infrastructure.
    """
    if address.startswith(HUB):
        hub.check(address, ws.environ)
    else:
        bucket = _bucket(ws, f"{address}/{plan.recipe}")
        bucket.load()
        bucket.check(LATEST)


def upload(
    ws: Workspace,
    plan: Plan,
    made: Mapping[int, StepResult],
    address: str,
    listener: Listener,
    run: str = "",
) -> None:
    """Upload the results of a plan, with the logs and the report of `run` if given.

    Raises Infrastructure if a result is missing or the upload fails.
    """
    results = _list_results(plan, made)
    endpoint = _endpoint(ws, address)
    identity = of_value("results", [address, endpoint, plan.recipe, plan.digest, results])
    note = ws.home / "uploaded" / of_value("results", [address, endpoint, plan.recipe, plan.digest])
    if address.startswith(HUB):
        target = address
    else:
        target = f"{address}/{plan.recipe}/{plan.digest[:12]}"
    shown = f"{target} at {endpoint}" if endpoint else target
    sent_before, _, size = _read_note(note).partition(" ")
    if sent_before == identity:
        if _is_uploaded(ws, target, shown, int(size)):
            listener.say(f"results are at {shown}, as uploaded before")
            return
        listener.say(f"the results are no longer at {shown}; uploading them again")
    facts = {
        "run": run,
        "recipe": plan.recipe,
        "plan": plan.digest,
        "inputs": plan.inputs,
        "outputs": {name: path for name, path, _ in results},
    }
    beside = ws.home / "partial" / temporary_name("results")
    try:
        files: list[UploadFile] = []
        for _, path, content in results:
            stored = _find_stored(ws, path, Content(content))
            files += results_folder.files_at(path, *stored)
        if run:
            files += _collect_run_files(ws, run, beside, listener)
        total = sum(file.size for file in files)
        number = count_text(len(files), "file")
        listener.say(f"uploading results to {shown}: {number}, {about(total)}")
        began = time.monotonic()
        sent = _retry(
            lambda: _upload_files(
                ws, plan, address, files, facts, beside, _progress_reporter(total, listener)
            ),
            listener,
        )
        listener.say(
            f"results are at {shown}: {about(sent)} sent in {time.monotonic() - began:.1f} s"
        )
    finally:
        delete(beside)
    listing = 0 if address.startswith(HUB) else len(manifest(files, facts, complete=True))
    ws.write(note, f"{identity} {listing}".encode())


def _list_results(plan: Plan, made: Mapping[int, StepResult]) -> list[tuple[str, str, str]]:
    """Return the name, path and content of each published output that is not temporary."""
    results = []
    for n, output, path, name in plan.publish:
        flags = {each.name: each.flags for each in plan.nodes[n].outputs}
        if n not in made or flags.get(output, TEMPORARY) & TEMPORARY:
            continue
        content = made[n].outputs.get(output)
        if content:
            results.append((name or path, path, content))
    return results


def find_maker(ws: Workspace, found: Survey) -> str:
    """Return the last run that created one of the up-to-date results; empty if there is none."""
    keys = [verdict.key for verdict in found.verdicts if verdict.key is not None]
    makers = {trace.run for trace in ws.store.index.traces(keys).values()}
    runs = {row.id for row in ws.store.runs.latest(recipe=found.plan.recipe, last=1000)}
    return max(makers & runs, default="")


def _upload_files(
    ws: Workspace,
    plan: Plan,
    address: str,
    files: list[UploadFile],
    facts: Mapping[str, object],
    beside: Path,
    progress: Callable[[int], object],
) -> int:
    if address.startswith(HUB):
        return hub.upload(address, files, facts, ws.environ, beside)
    folder = plan.digest[:12]
    sent = results_folder.upload(
        _bucket(ws, f"{address}/{plan.recipe}/{folder}"), files, facts, progress
    )
    results_folder.point(_bucket(ws, f"{address}/{plan.recipe}"), LATEST, folder, facts)
    return sent


def _is_uploaded(ws: Workspace, address: str, shown: str, size: int) -> bool:
    """Return True if the manifest of an earlier upload exists with `size` bytes.

    Raises Infrastructure if the store does not answer.
    """
    try:
        if address.startswith(HUB):
            return hub.is_there(address, ws.environ)
        found = _bucket(ws, address).head(MANIFEST)
    except RecipeError as error:
        raise Infrastructure(
            f"cannot check the results at {shown}: {error}", fix=error.fix
        ) from error
    return found is not None and found.size == size


def _endpoint(ws: Workspace, address: str) -> str:
    """Return the custom endpoint URL for an address; empty for the provider's own endpoint."""
    scheme = address.partition("://")[0]
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "gs": ("STORAGE_EMULATOR_HOST",),
        "hf": ("HF_ENDPOINT",),
    }
    store = ws.config.store_of(address)
    said = (store.endpoint if store else "", *(ws.environ.get(each) for each in names[scheme]))
    return next(filter(None, said), "")


def _bucket(ws: Workspace, address: str) -> Bucket:
    """Open the bucket directory at an address with the settings of its store."""
    store = ws.config.store_of(address) or StoreSettings("", address)
    return buckets.open(store._replace(url=address), ws.root)


def _find_stored(
    ws: Workspace, path: str, content: Content
) -> tuple[Path, Content, Callable[[], list[Entry]]]:
    """Return the path, content and entries of a stored output, downloaded if necessary.

    Raises Infrastructure if the output is not stored anywhere.
    """
    cache = ws.remote_cache
    if not ws.objects.intact(content) and (cache is None or cache.bring([content])):
        raise Infrastructure(
            f"cannot upload {path}: it is no longer stored in this workspace",
            fix="run again with `-B` to create it again",
        )
    return ws.objects.path(content), content, lambda: ws.objects.manifests.entries(content)


def _collect_run_files(
    ws: Workspace, run: str, beside: Path, listener: Listener
) -> list[UploadFile]:
    """Return the logs of a run and its HTML report as files to upload."""
    beside.mkdir(parents=True, exist_ok=True)
    page = beside / "report.html"
    page.write_text(listener.page(ws, run), "utf-8")
    logs = sorted((ws.home / "runs" / run).glob("*.log"))
    return [
        results_folder.of_path("report.html", page),
        *(results_folder.of_path(f"logs/{log.name}", log) for log in logs),
    ]


def _retry(do: Callable[[], int], listener: Listener) -> int:
    """Call the upload function `do`, and repeat the call after a lost connection.

    Raises Infrastructure.
    """

    def say(error: Exception) -> None:
        listener.say(f"lost the connection during the upload; resuming in {PAUSE:g} s: {error}")

    try:
        return retry(do, backoff(BucketUnreachable, TRIES, PAUSE, PAUSE), on_retry=say)
    except RecipeError as error:
        raise Infrastructure(
            f"cannot upload the results: {error}",
            fix=f"{error.fix}; then run again to repeat only the upload",
        ) from error


def _progress_reporter(size: int, listener: Listener) -> Callable[[int], None]:
    """Return a progress callback that shows an upload message every `SPOKEN` seconds."""
    began = spoken = time.monotonic()
    done = 0

    def progress(more: int) -> None:
        nonlocal done, spoken
        done += more
        now = time.monotonic()
        if now - spoken > SPOKEN:
            spoken = now
            left = (size - done) * (now - began) / max(done, 1)
            listener.say(
                f"uploaded {about(done)} of {about(size)}, {about(int(done / (now - began)))}/s, about {left:.0f} s left"
            )

    return progress


def _read_note(note: Path) -> str:
    try:
        return note.read_text()
    except FileNotFoundError:
        return ""
