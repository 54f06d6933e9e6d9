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

from ...language.units import count_text
from ...paths import VERSION
from ...planning.halving import STOPPED
from ...planning.ids import bare, readable
from ...storage.records.links import TrackerLink
from ...storage.records.runs import AttemptRow
from ...storage.workspace import Workspace
from ...survey import comparison, run_story
from ...survey.comparison import Cell, Comparison, Result, is_comparable
from ...survey.results import peak_memory
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
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co"):
            char = f"<U+{ord(char):04X}>"
        kept.append(char)
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
    labels = [str(data["name"])] if data.get("name") else []
    labels += [f"#{tag}" for tag in data.get("tags") or ()]
    story = run_story.tell_story(ws, row)
    return render(story, state=state, label=" ".join(labels), given=" ".join(words))


def render(story: Story, *, state: str, label: str, given: str) -> str:
    """Return the HTML report. `state` is the displayed run state, `given` the command arguments."""
    import jinja2

    view, data = _view(story, state, label, given)
    sheets = ["base.css", "report.css"]
    script = bundle.script("report")
    scripts = [script]
    if data:
        sheets.append("vendor/uPlot.min.css")
        scripts.append(bundle.library(bundle.CHARTS))
    style = bundle.style(*sheets)
    # The page holds untrusted text: only scripts and styles with these hashes may run.
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


_CLASSES: Final = {
    "DONE": "done",
    "COMPLETED": "done",
    "FAILED": "failed",
    "FRESH": "fresh",
    "WAITING": "waiting",
    "READY": "waiting",
    "QUEUED": "waiting",
    "RUNNING": "running",
    "ACTIVE": "running",
    "EXECUTING": "running",
    "BLOCKED": "blocked",
    "SKIPPED": "skipped",
    "CANCELLED": "cancelled",
}
"""The CSS class of each state, which is also its label."""


def _state(state: str) -> str:
    """Return the label and CSS class for the state of a step or run."""
    return _CLASSES.get(state, "other")


def _seconds(each: StepInstance) -> float:
    """Return the total duration of the attempts; 0 for a cached result."""
    if each.state == "FRESH":
        return 0.0
    return sum(map(_duration, each.attempts))


def _duration(attempt: AttemptRow) -> float:
    """Return the seconds of an attempt; 0 for an attempt that has not ended."""
    return max(0.0, (attempt.ended or 0.0) - (attempt.started or 0.0))


def _name(id: str) -> str:
    return visible(readable(id))


def _view(story: Story, state: str, label: str, given: str) -> tuple[Mapping[str, object], object]:
    """Return the template's variables and the chart data, which is empty without charts."""
    tables = comparison.compare(_results_with_metrics(story), _choose_criteria(story))
    curves, weights = _curves(story, tables)
    controls = _curve_controls(curves, weights) if curves else None
    critical_path = drawing.critical_path(story.needs, _end_times(story))
    images, omissions = _images(story)
    anchors = {id: f"log-{n}" for n, id in enumerate(story.logs)}
    view: dict[str, object] = {
        **_header(story, state, label, given),
        "best": _best(tables),
        "failures": _failures(story, anchors),
        "graph": _graph(story, critical_path),
        "time": _time(story),
        "critical": _critical_text(critical_path),
        "curves": controls,
        "images": images,
        "table": _table(tables, story.instances),
        "texts": _texts(story),
        "why": _reasons(story),
        "logs": _logs(story, anchors),
        "links": [_link(each) for each in story.links[:_ROWS]],
        "inputs": _inputs(story),
        "environment": _environment(story),
        "left_out": [*map(visible, story.left_out), *omissions],
    }
    view["parts"] = [(title, anchor) for title, anchor, key in _SECTIONS if view[key]]
    charts = {visible(name): chart for name, chart in curves.items()}
    data = {"x": "step", "metrics": charts} if charts else {}
    return view, data


def _results_with_metrics(story: Story) -> list[Result]:
    found = []
    for each in story.instances:
        if each.result is not None and each.result.metrics:
            found.append(each.result)
    return found


def _critical_text(path: Sequence[str]) -> str:
    """Return the critical path in one line; empty for a single step."""
    return " → ".join(map(visible, path)) if len(path) > 1 else ""


def _reasons(story: Story) -> list[Mapping[str, str]]:
    """Return why each step ran."""
    found: list[Mapping[str, str]] = []
    for id, reasons in list(story.why.items())[:_ROWS]:
        found.append({"id": _name(id), "text": visible("; ".join(reasons))})
    return found


def _inputs(story: Story) -> list[tuple[str, str]]:
    return [(visible(name), visible(_text(value))) for name, value in story.row.inputs.items()]


_SECTIONS: Final = (
    ("Failed", "failed", "failures"),
    ("Steps", "steps", "graph"),
    ("Time", "time", "time"),
    ("Curves", "curves", "curves"),
    ("Images", "images", "images"),
    ("Table", "table", "table"),
    ("Data", "files", "texts"),
    ("Why", "why", "graph"),
    ("Logs", "logs", "logs"),
    ("Inputs", "inputs", "graph"),
)
"""Title, anchor and the required template variable of each section."""


def _header(story: Story, state: str, label: str, given: str) -> dict[str, object]:
    """Return the template's variables for the head of the page."""
    row, instances = story.row, story.instances
    total = sum(story.counts.values())
    tally = _count_states(instances, total)
    counts = [f"{count} {word}" for word, count in tally.items() if count]
    took = span(row.ended - row.created) if row.ended else ""
    return {
        "recipe": visible(row.recipe),
        "id": row.id,
        "state": _state(row.state),
        "sign": _SIGNS.get(_state(row.state), "–"),
        "word": state.lower().replace("_", " "),
        "label": visible(label),
        "note": visible(str(row.data.get("note", ""))),
        "given": visible(given),
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created)),
        "took": took,
        "work": span(sum(map(_seconds, instances))),
        "total": total,
        "tally": ", ".join(counts),
        "failed": tally["failed"],
        "version": VERSION,
    }


def _count_states(instances: Sequence[StepInstance], total: int) -> Counter[str]:
    """Count instances by state.

    `total` may include instances without a state yet, which are waiting.
    """
    tally = Counter(_state(each.state) for each in instances)
    tally["waiting"] += max(0, total - len(instances))
    return tally


def _best(tables: Sequence[Comparison]) -> Mapping[str, str] | None:
    """Return the best result of the first comparison that has one; None without one."""
    for table in tables:
        if table.best is not None:
            return _describe_best(table.best, table.by)
    return None


def _describe_best(best: Result, by: comparison.Criterion | None) -> Mapping[str, str] | None:
    if by is None:
        return None
    return {
        "value": cell(comparison.last_number(best, by.metric)),
        "words": visible(by.words),
        "step": _name(best.step),
    }


def _curve_controls(curves: Mapping[str, Curves], weights: Sequence[str]) -> Mapping[str, object]:
    """Return the metrics, the inputs to group by, and the smoothing weights of the charts."""
    groups: dict[str, None] = {}
    for chart in curves.values():
        for values in chart["values"]:
            groups |= dict.fromkeys(values)
    return {
        "metrics": [visible(name) for name in curves],
        "groups": list(groups),
        "smooth": weights,
    }


def _link(link: TrackerLink) -> Mapping[str, object]:
    return {
        "step": _name(link.step),
        "name": visible(link.name),
        "to": visible(link.to),
        "opens": link.to.startswith(("https://", "http://")),
    }


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
    cards: list[Mapping[str, object]] = []
    for step, (first, *rest) in list(many.items())[:_FAILURES]:
        card = {
            "id": _name(first.id),
            "step": visible(step),
            "detail": visible(first.detail),
            "more": len(rest),
            "lines": log_lines(story.logs.get(first.id, b""), 6),
            "anchor": anchors.get(first.id, ""),
        }
        cards.append(card)
    return cards


def _graph(story: Story, critical_path: Sequence[str]) -> Mapping[str, object]:
    """Return the boxes and edges of the step graph."""
    steps = dict(list(story.needs.items())[:_BOXES])
    boxes, width, height = drawing.boxes(steps)
    by_step = {box.step: box for box in boxes}
    instances: dict[str, list[StepInstance]] = {}
    for each in story.instances:
        instances.setdefault(each.step, []).append(each)
    drawn = []
    edges = []
    for box in boxes:
        found = instances.get(box.step, [])
        count = story.counts.get(box.step, len(found))
        drawn.append(_box(box, found, count, is_critical=box.step in critical_path))
        for need in steps[box.step]:
            if need in by_step:
                edges.append(_edge(by_step[need], box))
    return {
        "boxes": drawn,
        "edges": edges,
        "width": width,
        "height": height,
    }


def _box(
    box: drawing.Box, instances: Sequence[StepInstance], count: int, *, is_critical: bool
) -> Mapping[str, object]:
    """Return a step's box, with the number of its instances by state; `count` is their total."""
    tally = _count_states(instances, count)
    worst = next((state for state in _WORST if tally[state]), "waiting")
    counts = sorted((state, number) for state, number in tally.items() if number)
    words = ", ".join(f"{number} {state}" for state, number in counts)
    seconds = sum(map(_seconds, instances))
    took = span(seconds) if seconds else ""
    name = visible(box.step)
    return {
        "x": box.x,
        "y": box.y,
        "name": _shorten(name),
        "title": name,
        "state": worst,
        "sign": _SIGNS.get(worst, "–"),
        "count": count,
        "took": took,
        "critical": is_critical,
        "parts": _bar_parts(counts, box.x + 10.0),
        "tally": words[:30],
    }


def _bar_parts(counts: Sequence[tuple[str, int]], x: float) -> list[Mapping[str, object]]:
    """Return the parts of a bar from `x` on, as wide as the share of each state."""
    total = max(sum(count for _, count in counts), 1)
    parts: list[Mapping[str, object]] = []
    for state, count in counts:
        width = 176 * count / total
        parts.append({"state": state, "x": round(x, 1), "width": round(width, 1)})
        x += width
    return parts


def _shorten(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


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
    bars = _list_bars(story)
    if not bars:
        return None
    begin = min(bar.begun for bar in bars)
    whole = max(max(bar.ended for bar in bars) - begin, 1e-3)
    scale = 960 / whole  # pixels per second
    order = {step: n for n, step in enumerate(story.needs)}
    lanes_of = drawing.lanes(bars)
    y = 0
    rows: list[Mapping[str, object]] = []
    drawn: list[Mapping[str, object]] = []
    for place, step in sorted(lanes_of, key=lambda group: (group[0], order[group[1]])):
        lanes = lanes_of[place, step]
        name = visible(f"{place} · {step}") if place else visible(step)
        count = f" ×{len(lanes)}" if len(lanes) > 1 else ""
        rows.append({"name": _shorten(name) + count, "y": y})
        for lane in lanes:
            drawn += [_drawn_bar(bar, begin, scale, y) for bar in lane]
            y += 14
        y += 6
    ticks = [_drawn_tick(tick, scale) for tick in drawing.ticks(whole)]
    return {"rows": rows, "bars": drawn, "ticks": ticks, "height": y + 26, "span": span(whole)}


def _list_bars(story: Story) -> list[drawing.TimelineBar]:
    """Return a bar for each finished attempt of this run, the longest _BARS of them.

    The place of a bar is empty if the whole run was executed on this machine.
    """
    has_hosts = any(each.place for each in story.instances)
    bars = []
    for each in story.instances:
        if each.state == "FRESH":  # its attempts are those of an earlier run
            continue
        place = (each.place or "here") if has_hosts else ""
        for attempt in each.attempts:
            if attempt.started is None or attempt.ended is None:
                continue
            state = {"done": "done", STOPPED: "skipped"}.get(attempt.outcome, "failed")
            bar = drawing.TimelineBar(
                place, each.step, attempt.started, attempt.ended, each.id, state
            )
            bars.append(bar)
    return sorted(bars, key=lambda bar: bar.begun - bar.ended)[:_BARS]


def _drawn_bar(
    bar: drawing.TimelineBar, begin: float, scale: float, y: int
) -> Mapping[str, object]:
    seconds = bar.ended - bar.begun
    return {
        "x": round(150 + (bar.begun - begin) * scale, 1),
        "y": y,
        "width": round(max(seconds * scale, 2), 1),
        "state": bar.state,
        "title": f"{_name(bar.name)}: {span(seconds)}, {bar.state}",
    }


def _drawn_tick(seconds: float, scale: float) -> Mapping[str, object]:
    text = span(seconds) if seconds else "0"
    return {"x": round(150 + seconds * scale, 1), "text": text}


_InstanceCurve: TypeAlias = tuple[StepInstance, list[tuple[float, float]]]


def _curves(story: Story, tables: Sequence[Comparison]) -> tuple[dict[str, Curves], list[str]]:
    """Return the chart of each metric by name, and the smoothing weights as text.

    A chart has the curves of step instances with more than one point of the metric.
    """
    found = _collect_curves(story)
    best = set()
    criteria = set()
    for table in tables:
        if table.best is not None:
            best.add(id(table.best))
        if table.by is not None:
            criteria.add(table.by.metric)
    # The metrics that decide about the best result come first.
    names = sorted(found, key=lambda name: (name not in criteria, name))[:_CHARTS]
    curve_count = sum(min(len(found[name]), _CURVES) for name in names)
    affordable = _NUMBERS // max(1, len(SMOOTH) * curve_count)
    points = max(40, min(drawing.POINTS, affordable))
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


def _chart(found: Sequence[_InstanceCurve], best: Collection[int], points: int) -> Curves:
    """Return the chart of one metric; `best` has the `id` of each best result."""
    # The y range is that of the successful instances. It does not depend on the order.
    frame = drawing.frame([curve for each, curve in found if each.state != "FAILED"])
    keys = _differing_keys([each for each, _ in found])
    ordered = _sort_by_inputs(found, keys)
    instances = [each for each, _ in ordered]
    curves = [curve for _, curve in ordered]
    aligned = {f"{weight:g}": _smooth_and_align(curves, weight, points) for weight in SMOOTH}
    x, _ = aligned["0"]  # smoothing keeps the x values
    smoothed = {weight: rows for weight, (_, rows) in aligned.items()}
    names = [_name(each.id) for each in instances]
    failed = [each.state == "FAILED" for each in instances]
    return {
        "x": x,
        "curves": smoothed,
        "names": names,
        "values": [_visible_values(each, keys) for each in instances],
        "failed": failed,
        "best": _index_of_best(instances, best),
        "frame": frame,
        "leaving": _count_outside(frame, curves),
        "log": _needs_logarithmic_scale(frame),
    }


def _sort_by_inputs(
    curves: Sequence[_InstanceCurve], keys: Sequence[str]
) -> Sequence[_InstanceCurve]:
    """Sort curves by the values of the inputs `keys`."""

    def place(curve: _InstanceCurve) -> list[tuple[float, str]]:
        instance, _ = curve
        return [_order(instance.values.get(key)) for key in keys]

    return sorted(curves, key=place)


def _smooth_and_align(
    curves: Sequence[drawing.Curve], weight: float, points: int
) -> tuple[list[float], list[list[float | None]]]:
    """Smooth curves, and return their common x values and the y values of each curve."""
    return drawing.align_curves([drawing.smooth(curve, weight) for curve in curves], points)


def _visible_values(instance: StepInstance, keys: Sequence[str]) -> dict[str, str]:
    """Return the values of the inputs `keys` as displayable text."""
    return {visible(key): visible(_text(instance.values.get(key))) for key in keys}


def _index_of_best(instances: Sequence[StepInstance], best: Collection[int]) -> int:
    """Return the index of the first instance with a best result; -1 if there is none."""
    for n, instance in enumerate(instances):
        if id(instance.result) in best:
            return n
    return -1


def _needs_logarithmic_scale(frame: tuple[float, float] | None) -> bool:
    """Return True for a positive y range of more than three orders of magnitude."""
    if frame is None:
        return False
    low, high = frame
    return low > 0 and high / low > 1000


def _differing_keys(instances: Sequence[StepInstance]) -> list[str]:
    """Return the inputs whose values differ between the instances, sorted."""
    keys: set[str] = set()
    for each in instances:
        keys.update(each.values)
    return sorted(key for key in keys if _differs(key, instances))


def _differs(key: str, instances: Sequence[StepInstance]) -> bool:
    texts = {str(each.values.get(key)) for each in instances}
    return len(texts) > 1


def _count_outside(
    frame: tuple[float, float] | None, curves: Iterable[Sequence[tuple[float, float]]]
) -> int:
    """Return the number of curves that leave the frame."""
    if frame is None:
        return 0
    low, high = frame
    count = 0
    for curve in curves:
        if any(not low <= y <= high for _, y in curve):
            count += 1
    return count


def _order(value: Cell) -> tuple[float, str]:
    """Return a sort key: numbers by value, then other values as text."""
    try:
        return float(str(value)), ""
    except ValueError:
        return float("inf"), str(value)


def _text(value: object) -> str:
    """Return a text as it is, None as an empty text, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes; None for other formats."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def _images(story: Story) -> tuple[list[Mapping[str, str]], list[str]]:
    """Return the images as data URLs, and a note about images left out for their size."""
    instances = {each.id: each for each in story.instances}
    found: list[Mapping[str, str]] = []
    space, omitted = _PICTURES, 0
    for file in story.files:
        media_type = _type(file.data) if file.path.lower().endswith(IMAGES) else None
        if media_type is None:
            continue
        if len(file.data) > space:
            omitted += 1
            continue
        space -= len(file.data)
        instance = instances[file.id]
        words = [f"{name} {_text(value)}" for name, value in instance.values.items()]
        found.append(
            {
                "source": f"data:{media_type};base64,{base64.b64encode(file.data).decode()}",
                "alt": visible(", ".join([instance.step, *words])),
                "path": visible(file.path),
            }
        )
    notes = [f"{omitted} more images are left out for size"] if omitted else []
    return found, notes


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
    rows: list[tuple[Comparison, Result]] = []
    for table in tables:
        rows += [(table, result) for result in table.results]
    if not rows:
        return None
    # Results are not hashable, and those of two instances may be equal.
    by_result = {id(each.result): each for each in instances if each.result is not None}
    distinct_inputs: dict[str, None] = {}
    distinct_metrics: dict[str, None] = {}
    for table in tables:
        distinct_inputs |= dict.fromkeys(comparison.find_differing_inputs(table.results))
        distinct_metrics |= dict.fromkeys(comparison.list_metric_names(table.results))
    inputs, metrics = list(distinct_inputs), list(distinct_metrics)[:8]
    shown_rows = []
    for table, result in rows[:_ROWS]:
        values = _row_values(by_result[id(result)], result, inputs, metrics)
        cells = [_table_cell(value) for value in values]
        shown_rows.append({"best": result is table.best, "cells": cells})
    head = ["step", *inputs, "state", "seconds", "tries", "memory (MB)", *metrics]
    note = ""
    if len(rows) > _ROWS:
        note = f"the first {_ROWS} of {len(rows)} rows; all are in `recipe results --csv`"
    return {"head": [visible(name) for name in head], "rows": shown_rows, "note": note}


def _table_cell(value: Cell) -> Mapping[str, object]:
    """Return the text of a cell, and the number by which its column is sorted."""
    number = value if is_comparable(value) else None
    return {"text": visible(cell(value)), "number": number}


def _row_values(
    each: StepInstance, result: Result, inputs: Sequence[str], metrics: Sequence[str]
) -> list[Cell]:
    """Return a row of the table: the step, its inputs, facts of its attempts, and its metrics."""
    values = [result.values.get(name) for name in inputs]
    last = [_last_value(result, name) for name in metrics]
    peak = _peak_megabytes(each)
    return [
        _name(each.id),
        *values,
        each.state.lower(),
        result.seconds,
        len(each.attempts),
        peak,
        *last,
    ]


def _peak_megabytes(each: StepInstance) -> float | None:
    peak = peak_memory(each.attempts)
    return None if peak is None else round(peak / 1e6, 1)


def _last_value(result: Result, metric: str) -> Cell:
    return result.metrics[metric].last if metric in result.metrics else None


def _logs(story: Story, anchors: Mapping[str, str]) -> list[Mapping[str, object]]:
    """Return the logs, with those of failed steps first."""
    logged = [each for each in story.instances if each.id in story.logs]
    logged.sort(key=lambda each: each.state != "FAILED")
    return [_log(each, story, anchors) for each in logged]


def _log(each: StepInstance, story: Story, anchors: Mapping[str, str]) -> Mapping[str, object]:
    origin = f" · from run {each.source}" if each.source != story.row.id else ""
    return {
        "id": _name(each.id),
        "anchor": anchors[each.id],
        "words": each.state.lower() + origin,
        "text": log_lines(story.logs[each.id]),
        "bad": each.state == "FAILED",
    }


def _environment(story: Story) -> list[tuple[str, str]]:
    """Return rows with the Python versions, the places of execution and recipe's version."""
    rows = [
        ("Python", ", ".join(_python_versions(story))),
        ("places", _count_words(_count_steps_by_place(story))),
        ("recipe", VERSION),
    ]
    return [(name, visible(value)) for name, value in rows if value]


def _python_versions(story: Story) -> list[str]:
    """Return a version for each Python of the attempts.

    An implementation with its version in brackets is shortened to the version.
    """
    distinct: dict[str, None] = {}
    for each in story.instances:
        for attempt in each.attempts:
            if attempt.exit.get("python"):
                distinct[str(attempt.exit["python"])] = None
    return [re.sub(r"^.*\((.*)\)$", r"\1", python) for python in distinct]


def _count_steps_by_place(story: Story) -> Counter[str]:
    """Return the number of step instances that each place executed."""
    places: Counter[str] = Counter()
    for each in story.instances:
        if each.attempts and each.state != "FRESH":
            places[each.place or "this machine"] += 1
    return places


def _count_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count_text(count, 'step')})" for name, count in counts.items())
