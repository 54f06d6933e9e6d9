"""Render a run as one self-contained HTML report that loads no other files.

All names, logs and values of a run are untrusted text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

from ...paths import VERSION
from ...planning.halving import STOPPED
from ...planning.ids import bare, readable
from ...storage.workspace import Workspace
from ...survey import comparison, run_story
from ...survey.comparison import Cell, Comparison, is_comparable
from ...survey.run_story import IMAGES, StepInstance, Story
from .. import drawing
from ..tables import cell
from ..tail import span
from . import bundle

HERE: Final = Path(__file__).parent
SMOOTH: Final = (0.0, 0.6, 0.9)
_ROWS, _LINES, _BOXES, _BARS, _FAILURES, _CURVES, _NUMBERS = 2000, 40, 200, 2000, 20, 200, 200_000
_CHARTS = 12  # most metrics with a chart
_PICTURES = 5 << 20  # total size of all images in bytes
_SIGNS: Final = {"done": "✓", "failed": "✗", "fresh": "=", "running": "…", "waiting": "·"}
_WORST: Final = ("failed", "running", "blocked", "cancelled", "done", "waiting", "fresh", "skipped")
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|[\x80-\x9f]"
)
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)


def visible(text: str) -> str:
    """Make untrusted text safe to display.

    Removes terminal escape sequences. Writes control, format and private-use characters as code
    points, such as `<U+202E>` for a change of the text direction.
    """
    kept = []
    for char in _ANSI.sub("", text):
        hidden = char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co")
        kept.append(f"<U+{ord(char):04X}>" if hidden else char)
    return "".join(kept)


def log_lines(data: bytes, most: int = _LINES) -> str:
    """Return the last lines of a log, with only the last text of lines with carriage returns."""
    lines = [
        line.rstrip("\r").rpartition("\r")[2]
        for line in data.decode(errors="replace").rstrip().split("\n")
    ]
    return visible("\n".join(line[:2000] for line in lines[-most:]))


def of_run(ws: Workspace, run: str, state: str = "COMPLETED") -> str:
    """Return the HTML report of a run, with `state` as its displayed state."""
    row = ws.store.runs.get(run)
    data: Mapping[str, Any] = row.data
    asked: Mapping[str, Any] = data.get("asked") or {}
    words = [f"--preset {asked['preset']}"] if asked.get("preset") else []
    words += [f"{name}={value}" for name, value in (asked.get("inputs") or {}).items()]
    label = " ".join(
        filter(None, [str(data.get("name") or ""), *(f"#{tag}" for tag in data.get("tags") or ())])
    )
    return render(run_story.tell_story(ws, row), state=state, label=label, given=" ".join(words))


def render(story: Story, *, state: str, label: str, given: str) -> str:
    """Return the HTML report. `state` is the displayed run state, `given` the command arguments."""
    import jinja2

    view, data = _view(story, state, label, given)
    sheets = ("base.css", "report.css", *(("vendor/uPlot.min.css",) if data else ()))
    style, script = bundle.style(*sheets), bundle.script("report")
    scripts = [script, *([bundle.library(bundle.CHARTS)] if data else [])]
    allowed = f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    ours = environment.filters["safe"]
    return environment.from_string((HERE / "report.html").read_text("utf-8")).render(
        view=view, policy=policy, style=ours(style), script=ours(script), chart=ours(scripts[-1]),
        data=ours(_embed_json(data)), licence=(HERE / "vendor" / "uPlot.LICENSE").read_text("utf-8"),
    )  # fmt: skip


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed_json(data: object) -> str:
    """Return JSON without characters that have a meaning in HTML."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Curves(TypedDict):
    """The chart of one metric.  `curves` has the y values of each curve by smoothing weight."""

    x: list[float]
    curves: dict[str, list[list[float | None]]]
    names: list[str]
    values: list[dict[str, str]]
    failed: list[bool]
    best: int
    frame: tuple[float, float] | None
    leaving: int  # curves that leave the frame
    log: bool  # start with a logarithmic scale


def _state(state: str) -> str:
    """Return the label and CSS class for the state of a step or run."""
    if state in ("BLOCKED", "SKIPPED", "CANCELLED"):
        return state.lower()
    known = {
        "DONE": "done",
        "COMPLETED": "done",
        "FAILED": "failed",
        "FRESH": "fresh",
        "WAITING": "waiting",
        "READY": "waiting",
        "QUEUED": "waiting",
    }
    return known.get(state, "running" if state in ("RUNNING", "ACTIVE", "EXECUTING") else "other")


def _seconds(each: StepInstance) -> float:
    return (
        sum(
            max(0.0, (attempt.ended or 0.0) - (attempt.started or 0.0)) for attempt in each.attempts
        )
        if each.state != "FRESH"
        else 0.0
    )


def _name(id: str) -> str:
    return visible(readable(id))


def _view(story: Story, state: str, label: str, given: str) -> tuple[Mapping[str, object], object]:
    """Return the template's variables and the chart data, which is empty without charts."""
    row, instances = story.row, story.instances
    tally = Counter(_state(each.state) for each in instances)
    waiting = sum(story.counts.values()) - len(instances)
    tally["waiting"] += max(0, waiting)
    tables = comparison.compare(
        [each.result for each in instances if each.result is not None and each.result.metrics],
        _choose_criteria(story),
    )
    main = next((table for table in tables if table.best is not None), None)
    curves, smooth = _curves(story, tables)
    keys = list(
        dict.fromkeys(
            name for found in curves.values() for values in found["values"] for name in values
        )
    )
    data = (
        {"x": "step", "metrics": {visible(name): found for name, found in curves.items()}}
        if curves
        else {}
    )
    time_view, path = _time(story), drawing.critical(story.needs, _end_times(story))
    images, left = _images(story)
    anchors = {id: f"log-{n}" for n, id in enumerate(story.logs)}
    table = _table(tables, instances)
    view: dict[str, object] = {
        "recipe": visible(row.recipe), "id": row.id,
        "state": _state(row.state), "sign": _SIGNS.get(_state(row.state), "–"), "word": state.lower().replace("_", " "),
        "label": visible(label), "note": visible(str(row.data.get("note", ""))), "given": visible(given),
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created)), "took": span(row.ended - row.created) if row.ended else "",
        "work": span(sum(map(_seconds, instances))), "total": sum(story.counts.values()),
        "tally": ", ".join(f"{count} {word}" for word, count in tally.items() if count), "failed": tally["failed"],
        "best": None if main is None or main.best is None or main.by is None else {
            "value": cell(comparison.last_number(main.best, main.by.metric)), "words": visible(main.by.words), "step": _name(main.best.step)},
        "failures": _failures(story, anchors), "graph": _graph(story, path), "time": time_view,
        "critical": " → ".join(map(visible, path)) if len(path) > 1 else "",
        "curves": {"metrics": [visible(name) for name in curves], "groups": keys, "smooth": smooth} if curves else None,
        "images": images, "table": table, "texts": _texts(story),
        "why": [{"id": _name(id), "text": visible("; ".join(why))} for id, why in list(story.why.items())[:_ROWS]],
        "logs": [_log(each, story, anchors) for each in sorted(instances, key=lambda each: each.state != "FAILED") if each.id in story.logs],
        "links": [{"step": _name(each.step), "name": visible(each.name), "to": visible(each.to), "opens": each.to.startswith(("https://", "http://"))}
                  for each in story.links[:_ROWS]],
        "inputs": [(visible(name), visible(_text(value))) for name, value in row.inputs.items()], "environment": _environment(story),
        "left_out": [*map(visible, story.left_out), *left], "version": VERSION,
    }  # fmt: skip
    parts = [("Failed", "failed", "failures"), ("Steps", "steps", "graph"), ("Time", "time", "time"), ("Curves", "curves", "curves"),
             ("Images", "images", "images"), ("Table", "table", "table"), ("Data", "files", "texts"), ("Why", "why", "graph"),
             ("Logs", "logs", "logs"), ("Inputs", "inputs", "graph")]  # fmt: skip
    view["parts"] = [(name, id) for name, id, due in parts if view[due]]
    return view, data


def _choose_criteria(story: Story) -> Mapping[str, comparison.Criterion]:
    """Return the criterion of each step compared by a `select` step.

    Reads the criterion from the reason of the `select` step: `… has the least eval_loss, 0.1`.
    """
    found = {}
    for each in story.instances:
        if match := re.search(r"^(\S+) has the (least|greatest) (\S+),", each.detail):
            found[bare(match[1])] = comparison.Criterion(match[3], match[2] == "least")
    return found


def _end_times(story: Story) -> dict[str, float]:
    ends: dict[str, float] = {}
    for each in story.instances:
        if each.state != "FRESH" and each.attempts:
            ends[each.step] = max(ends.get(each.step, 0.0), each.attempts[-1].ended or 0.0)
    return ends


def _failures(story: Story, anchors: Mapping[str, str]) -> list[Mapping[str, object]]:
    """Return one card for each failed step, with the first failed instance of the step."""
    many: dict[str, list[StepInstance]] = {}
    for each in story.instances:
        if each.state == "FAILED":
            many.setdefault(each.step, []).append(each)
    return [
        {"id": _name(first.id), "step": visible(step), "detail": visible(first.detail), "more": len(rest),
         "lines": log_lines(story.logs.get(first.id, b""), 6), "anchor": anchors.get(first.id, "")}
        for step, (first, *rest) in list(many.items())[:_FAILURES]
    ]  # fmt: skip


def _graph(story: Story, path: Sequence[str]) -> Mapping[str, object]:
    steps = dict(list(story.needs.items())[:_BOXES])
    placed, width, height = drawing.boxes(steps)
    at = {box.step: box for box in placed}
    found = []
    for box in placed:
        mine = [each for each in story.instances if each.step == box.step]
        tally = Counter(_state(each.state) for each in mine)
        tally["waiting"] += max(0, story.counts.get(box.step, 0) - len(mine))
        tally = +tally
        worst = next((word for word in _WORST if tally[word]), "waiting")
        total, x, parts = max(sum(tally.values()), 1), box.x + 10.0, []
        for word, count in sorted(tally.items()):
            parts.append({"state": word, "x": round(x, 1), "width": round(176 * count / total, 1)})
            x += 176 * count / total
        spent = sum(map(_seconds, mine))
        name = visible(box.step)
        found.append({
            "x": box.x, "y": box.y, "name": name if len(name) <= 18 else name[:17] + "…", "title": name,
            "state": worst, "sign": _SIGNS.get(worst, "–"),
            "count": story.counts.get(box.step, len(mine)), "took": span(spent) if spent else "", "critical": box.step in path, "parts": parts,
            "tally": ", ".join(f"{count} {word}" for word, count in sorted(tally.items()))[:30],
        })  # fmt: skip
    edges = [_edge(at[need], box) for box in placed for need in steps[box.step] if need in at]
    return {"boxes": found, "edges": edges, "width": width, "height": height}


def _edge(a: drawing.Box, b: drawing.Box) -> str:
    x, y, u, v = a.x + drawing.WIDTH, a.y + drawing.HEIGHT / 2, b.x, b.y + drawing.HEIGHT / 2
    if u - x > drawing.ACROSS:  # an edge across several layers runs below their boxes
        low = max(y, v) + drawing.HEIGHT / 2 + drawing.DOWN / 2
        return f"M{x} {y}C{x + 40} {y} {x} {low} {x + 50} {low}H{u - 50}C{u} {low} {u - 40} {v} {u} {v}m-7 -4l7 4l-7 4"
    middle = (x + u) / 2
    return f"M{x} {y}C{middle} {y} {middle} {v} {u} {v}m-7 -4l7 4l-7 4"


def _time(story: Story) -> Mapping[str, object] | None:
    """Return the timeline of the run's finished attempts; None without such attempts.

    The timeline has rows by host and step, with more rows for simultaneous attempts.
    """
    away = any(each.place for each in story.instances)
    bars = [
        drawing.TimelineBar(
            (each.place or "here") if away else "",
            each.step,
            attempt.started,
            attempt.ended,
            each.id,
            {"done": "done", STOPPED: "skipped"}.get(attempt.outcome, "failed"),
        )
        for each in story.instances
        for attempt in (each.attempts if each.state != "FRESH" else ())
        if attempt.started is not None and attempt.ended is not None
    ]
    if not bars:
        return None
    bars = sorted(bars, key=lambda bar: bar.begun - bar.ended)[:_BARS]
    begin = min(bar.begun for bar in bars)
    whole = max(max(bar.ended for bar in bars) - begin, 1e-3)
    order = {step: n for n, step in enumerate(story.needs)}
    scale, y, rows, drawn = 960 / whole, 0, [], []
    for (place, step), lanes in sorted(
        drawing.lanes(bars).items(), key=lambda item: (item[0][0], order[item[0][1]])
    ):
        name = visible(f"{place} · {step}" if place else step)
        most = f" ×{len(lanes)}" if len(lanes) > 1 else ""
        rows.append({"name": (name if len(name) <= 18 else name[:17] + "…") + most, "y": y})
        for lane in lanes:
            for bar in lane:
                title = f"{_name(bar.name)}: {span(bar.ended - bar.begun)}, {bar.state}"
                x, width = (
                    round(150 + (bar.begun - begin) * scale, 1),
                    round(max((bar.ended - bar.begun) * scale, 2), 1),
                )
                drawn.append({"x": x, "y": y, "width": width, "state": bar.state, "title": title})
            y += 14
        y += 6
    ticks = [
        {"x": round(150 + tick * scale, 1), "text": span(tick) if tick else "0"}
        for tick in drawing.ticks(whole)
    ]
    return {"rows": rows, "bars": drawn, "ticks": ticks, "height": y + 26, "span": span(whole)}


_InstanceCurve: TypeAlias = tuple[StepInstance, list[tuple[float, float]]]


def _curves(story: Story, tables: Sequence[Comparison]) -> tuple[dict[str, Curves], list[str]]:
    """Return the chart of each metric by name, and the smoothing weights as text.

    A chart has the curves of step instances with more than one point of the metric.
    """
    found = _collect_curves(story)
    best = {id(table.best) for table in tables if table.best is not None}
    first = [table.by.metric for table in tables if table.by is not None]
    names = sorted(found, key=lambda name: (name not in first, name))[:_CHARTS]
    curves = sum(min(len(found[name]), _CURVES) for name in names)
    points = max(40, min(drawing.POINTS, _NUMBERS // max(1, len(SMOOTH) * curves)))
    charts = {name: _chart(found[name][:_CURVES], best, points) for name in names}
    return charts, [f"{weight:g}" for weight in SMOOTH]


def _collect_curves(story: Story) -> dict[str, list[_InstanceCurve]]:
    """Return the curves of each metric, sorted by x and with more than one point each."""
    found: dict[str, list[_InstanceCurve]] = {}
    for instance in story.instances:
        for name, values in _points_by_metric(instance).items():
            if len(values) > 1:
                found.setdefault(name, []).append((instance, sorted(values.items())))
    return found


def _points_by_metric(instance: StepInstance) -> dict[str, dict[float, float]]:
    """Return y by x for each metric. If a training step was repeated, its last value counts."""
    metrics: dict[str, dict[float, float]] = {}
    for n, point in enumerate(instance.points):
        step = point.get("step", point.get("epoch", n))
        x = float(step) if is_comparable(step) else float(n)
        for name, value in point.items():
            if is_comparable(value) and comparison.is_outcome(name):
                metrics.setdefault(name, {})[x] = float(value)
    return metrics


def _chart(chosen: Sequence[_InstanceCurve], best: Collection[int], points: int) -> Curves:
    """Return the chart of one metric; `best` has the `id` of each best result."""
    smoothed = {
        f"{weight:g}": drawing.align_curves(
            [drawing.smooth(curve, weight) for _, curve in chosen], points
        )
        for weight in SMOOTH
    }
    frame = drawing.frame([curve for each, curve in chosen if each.state != "FAILED"])
    keys = _differing_keys([each for each, _ in chosen])
    order = sorted(
        range(len(chosen)),
        key=lambda n: [_order(chosen[n][0].values.get(key)) for key in keys],
    )
    instances = [chosen[n][0] for n in order]
    return {
        "x": smoothed["0"][0],
        "curves": {weight: [rows[n] for n in order] for weight, (_, rows) in smoothed.items()},
        "names": [_name(each.id) for each in instances],
        "values": [
            {visible(key): visible(_text(each.values.get(key))) for key in keys}
            for each in instances
        ],
        "failed": [each.state == "FAILED" for each in instances],
        "best": next((at for at, each in enumerate(instances) if id(each.result) in best), -1),
        "frame": frame,
        "leaving": _count_outside(frame, [curve for _, curve in chosen]),
        "log": frame is not None and frame[0] > 0 and frame[1] / frame[0] > 1000,
    }


def _differing_keys(instances: Sequence[StepInstance]) -> list[str]:
    """Return the inputs whose values differ between the instances, sorted."""
    keys = {key for each in instances for key in each.values}
    return sorted(key for key in keys if len({str(each.values.get(key)) for each in instances}) > 1)


def _count_outside(
    frame: tuple[float, float] | None, curves: Iterable[Sequence[tuple[float, float]]]
) -> int:
    """Return the number of curves that leave the frame."""
    if frame is None:
        return 0
    low, high = frame
    return sum(any(not low <= y <= high for _, y in curve) for curve in curves)


def _order(value: Cell) -> tuple[float, str]:
    try:
        return float(str(value)), ""
    except ValueError:
        return float("inf"), str(value)


def _text(value: object) -> str:
    return (
        ""
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )


def _type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes; None for other formats."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def _images(story: Story) -> tuple[list[Mapping[str, str]], list[str]]:
    """Return the images as data URLs, and a note about images left out for their size."""
    instances = {each.id: each for each in story.instances}
    found: list[Mapping[str, str]] = []
    room, passed = _PICTURES, 0
    for file in story.files:
        if not file.path.lower().endswith(IMAGES) or (kind := _type(file.data)) is None:
            continue
        if len(file.data) > room:
            passed += 1
            continue
        room -= len(file.data)
        values = ", ".join(
            f"{name} {_text(value)}" for name, value in instances[file.id].values.items()
        )
        alt = visible(f"{instances[file.id].step}{f', {values}' if values else ''}")
        found.append(
            {
                "source": f"data:{kind};base64,{base64.b64encode(file.data).decode()}",
                "alt": alt,
                "path": visible(file.path),
            }
        )
    return found, [f"{passed} more images are left out for size"] if passed else []


def _texts(story: Story) -> list[Mapping[str, str]]:
    texts = [file for file in story.files if not file.path.lower().endswith(IMAGES)]
    return [
        {"id": _name(file.id), "path": visible(file.path), "text": log_lines(file.data, 400)}
        for file in texts[:60]
    ]


def _table(
    tables: Sequence[Comparison], instances: Sequence[StepInstance]
) -> Mapping[str, object] | None:
    """Return the table of compared step instances; None if no instances are compared.

    Its columns are the differing inputs, state, time, attempts, memory and metrics.
    """
    by_result = {id(each.result): each for each in instances if each.result is not None}
    rows = [(table, result) for table in tables for result in table.results]
    if not rows:
        return None
    inputs = list(
        dict.fromkeys(
            name for table in tables for name in comparison.differing_inputs(table.results)
        )
    )
    metrics = list(
        dict.fromkeys(name for table in tables for name in comparison.metric_names(table.results))
    )[:8]
    shown_rows = []
    for table, result in rows[:_ROWS]:
        each = by_result[id(result)]
        peaks = [
            peak
            for attempt in each.attempts
            if isinstance(peak := attempt.exit.get("peak_memory"), int)
        ]
        values: list[Cell] = [
            _name(each.id),
            *(result.values.get(name) for name in inputs),
            each.state.lower(),
            result.seconds,
            len(each.attempts),
        ]
        values += [round(max(peaks) / 1e6, 1) if peaks else None]
        values += [
            result.metrics[name].last if name in result.metrics else None for name in metrics
        ]
        cells = [
            {"text": visible(cell(value)), "number": value if is_comparable(value) else None}
            for value in values
        ]
        shown_rows.append({"best": result is table.best, "cells": cells})
    head = ["step", *inputs, "state", "seconds", "tries", "memory (MB)", *metrics]
    left = (
        f"the first {_ROWS} of {len(rows)} rows; all are in `recipe results --csv`"
        if len(rows) > _ROWS
        else ""
    )
    return {"head": [visible(name) for name in head], "rows": shown_rows, "note": left}


def _log(each: StepInstance, story: Story, anchors: Mapping[str, str]) -> Mapping[str, object]:
    words = each.state.lower() + (
        f" · from run {each.source}" if each.source != story.row.id else ""
    )
    return {
        "id": _name(each.id),
        "anchor": anchors[each.id],
        "words": words,
        "text": log_lines(story.logs[each.id]),
        "bad": each.state == "FAILED",
    }


def _environment(story: Story) -> list[tuple[str, str]]:
    pythons = Counter(
        str(attempt.exit["python"])
        for each in story.instances
        for attempt in each.attempts
        if attempt.exit.get("python")
    )
    places = Counter(
        each.place or "this machine"
        for each in story.instances
        if each.attempts and each.state != "FRESH"
    )
    found = [
        ("Python", ", ".join(re.sub(r"^.*\((.*)\)$", r"\1", python) for python in pythons)),
        ("places", _count_words(places)),
    ]
    return [(name, visible(value)) for name, value in [*found, ("recipe", VERSION)] if value]


def _count_words(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} ({count} step{'s' if count != 1 else ''})" for name, count in counts.items()
    )
