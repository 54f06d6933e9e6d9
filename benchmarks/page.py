"""The web interface in Chromium: how soon runs are compared, what an hour of a live run takes of memory, and what 50 open pages cost the server.

    python benchmarks/page.py [compare] [memory] [readers] [pages] [--seconds 30] [--pages 50]

`compare` selects 20 curves of 10,000 points of 3 metrics, which reads them, and opens them, from the key to the drawn frame; and again without that.
`memory` follows a run that reports the 36,000 points of an hour at 10 a second in 2 minutes, and measures the heap after a collection of garbage.
`pages` measures the server's processor time while so many pages of Chromium show one live run, each as in a browser of its own: with a token and a
stream of its own; then while the same count of tabs of one browser does, which share a stream. `readers` does the first with programs that ask what
a page asks, which leaves the processors to the server. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import requests

sys.path.insert(0, str(Path(__file__).parents[1]))

from runner.interface.cli.main import main
from tests.servers.rest import Rest
from tests.tools import chromium

CURVES: Final = 20
POINTS: Final = 10_000
HOUR: Final = 36_000
"""Points of an hour, at 10 a second."""
LAPSE: Final = 120.0
"""Seconds in which they are reported."""
RECIPE: Final = """\
recipe: fit@1
summary: Report as many points as asked, as fast as asked.
inputs:
  count: {type: integer, default: 10}
  pause: {type: number, default: 0}
  rate: {type: number, default: 1}
steps:
  fit:
    run: [python3, fit.py, "{{ inputs.count }}", "{{ inputs.pause }}", "{{ inputs.rate }}", "{{ outputs.o }}"]
    code: [fit.py]
    metrics: true
    outputs: {o: fit.txt}
"""
PROGRAM: Final = """\
import json, math, os, sys, time
count, pause, rate, out = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
begun = time.monotonic()
with open(os.environ["RECIPE_METRICS"], "a", buffering=1 if pause else -1) as told:
    for n in range(count):
        loss = 3 * math.exp(-rate * n / 900) + 0.01 * (n % 7)
        said = {"step": n, "max_steps": count, "loss": loss, "val_loss": loss * 1.1, "score": 1 - loss}
        said |= {"grad_norm": n % 11, "lr": rate} if pause else {}
        told.write(json.dumps(said) + "\\n")
        time.sleep(max(0.0, begun + n * pause - time.monotonic()))
open(out, "w").write("x")
"""
WINDOW: Final = {"width": 320, "height": 240}
"""Of each of many pages: what is drawn out of sight costs no pixels, and is asked for all the same."""
SETTLE: Final = 5.0
"""Seconds before a measurement."""
OPEN: Final = """() => new Promise(done => {
  const begun = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "c", bubbles: true }));
  const look = () => {
    if (document.querySelectorAll(".multiple canvas").length < 3) requestAnimationFrame(look);
    else requestAnimationFrame(() => done(performance.now() - begun));
  };
  look();
})"""


@contextmanager
def serving(*sweep: str) -> Iterator[Rest]:
    """A server with a worker, in whose workspace a sweep has run."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "space"
        root.mkdir()
        os.environ["RECIPE_LEDGER"] = f"{folder}/ledger.db"
        (root / "fit.yaml").write_text(RECIPE)
        (root / "fit.py").write_text(PROGRAM)
        (root / "recipe.toml").write_text('[recipes]\nallow = ["./fit.yaml"]\n')
        if sweep:
            main(["sweep", "-q", "-C", str(root), "./fit.yaml", *sweep])
        with Rest(root, "--with-worker") as rest:
            yield rest


def token(rest: Rest) -> str:
    return str(rest.ask("POST", "/v1/tokens", {"scope": "operate"}).json()["token"])


def processor(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(args: argparse.Namespace) -> dict[str, object]:
    rates = ",".join(str(n / 4) for n in range(1, CURVES + 1))
    with serving(f"count={POINTS}", f"rate={rates}") as rest, chromium() as browser:
        page = browser.new_page()
        page.goto(f"{rest.url}/#token={token(rest)}")
        page.wait_for_selector("tr[data-run]")
        begun = processor(rest.process.pid)
        page.keyboard.press("j")
        selected = time.monotonic()
        with page.expect_response(lambda answer: "bins=" in answer.url):
            page.keyboard.press("x")
        prepared = time.monotonic() - selected
        reading = processor(rest.process.pid) - begun
        taken, used = [], []
        for _ in range(6):
            begun = processor(rest.process.pid)
            taken.append(page.evaluate(OPEN) / 1000)
            used.append(processor(rest.process.pid) - begun)
            page.evaluate("location.hash = ''")
            page.wait_for_selector("tr[data-run]")
    return {
        "prepared s": round(prepared, 2),
        "opened s": round(taken[0], 2),
        "again s": round(median(taken[1:]), 2),
        "server s, prepared": round(reading, 2),
        "server s, again": round(median(used[1:]), 2),
    }


def memory(args: argparse.Namespace) -> dict[str, object]:
    with serving() as rest, chromium() as browser:
        run = rest.submit("fit", inputs={"count": HOUR, "pause": LAPSE / HOUR})
        rest.until(run, "ACTIVE")
        page = browser.new_page()
        page.goto(f"{rest.url}/#token={token(rest)}&run={run}")
        page.wait_for_selector(".multiple canvas")
        tool = page.context.new_cdp_session(page)

        def heap() -> float:
            tool.send("HeapProfiler.collectGarbage")
            return float(tool.send("Runtime.getHeapUsage")["usedSize"]) / 1e6

        begun = heap()
        most = begun
        while rest.get(f"/v1/runs/{run}")["state"] != "COMPLETED":
            page.wait_for_timeout(5000)
            most = max(most, heap())
        page.wait_for_selector("#chip >> text=completed")
        nodes = page.evaluate("document.querySelectorAll('*').length")
        return {
            "begun MB": round(begun, 1),
            "most MB": round(most, 1),
            "end MB": round(heap(), 1),
            "elements": nodes,
        }


class Reader:
    """A program that asks what an open page of a live run asks: the run, its curves, outputs and reasons, one stream, and the run each 30 seconds."""

    def __init__(self, rest: Rest, run: str) -> None:
        self._rest, self._run, self._token = rest, run, token(rest)
        self._ends = threading.Event()
        self.heard = 0
        """Events of the stream."""
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._follow, self._refresh)
        ]
        for path in ("", "/metrics?bins=900", "/artifacts", "/why"):
            rest.ask("GET", f"/v1/runs/{run}{path}", token=self._token)
        for thread in self._threads:
            thread.start()

    def _follow(self) -> None:
        kinds = "&".join(f"kind={kind}" for kind in ("move", "progress", "metrics", "warning"))
        path = f"/v1/runs/{self._run}/stream?{kinds}"
        with self._rest.follow(path, token=self._token) as stream:
            for _ in stream:
                self.heard += 1
                if self._ends.is_set():
                    return

    def _refresh(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        while not self._ends.wait(30.0):
            requests.get(f"{self._rest.url}/v1/runs/{self._run}", headers=headers, timeout=30)

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def readers(args: argparse.Namespace) -> dict[str, object]:
    with serving() as rest:
        run = _submit_fit(rest)
        alone = _cost(rest, args)
        programs = [Reader(rest, run) for _ in range(args.pages)]
        before = sum(reader.heard for reader in programs)
        followed = _cost(rest, args)
        heard = sum(reader.heard for reader in programs) - before
        for reader in programs:
            reader.close()
        rest.ask("POST", f"/v1/runs/{run}/cancel", {})
    return {
        "no page, % of a core": alone,
        f"{args.pages} readers, % of a core": followed,
        "events a second of a reader": round(heard / args.pages / (args.seconds + SETTLE), 1),
    }


def pages(args: argparse.Namespace) -> dict[str, object]:
    with serving() as rest, chromium() as browser:
        run = _submit_fit(rest)
        found: dict[str, object] = {"no page, % of a core": _cost(rest, args)}
        shared, known = browser.new_context(viewport=WINDOW), token(rest)
        kinds: dict[str, Callable[[], tuple[Any, str]]] = {
            "browsers": lambda: (browser.new_context(viewport=WINDOW), token(rest)),
            "tabs of one browser": lambda: (shared, known),
        }
        for kind, place in kinds.items():
            tabs = [_showing(rest, run, *place()) for _ in range(args.pages)]
            before = [_points(tab) for tab in tabs]
            found[f"{args.pages} {kind}, % of a core"] = _cost(rest, args)
            grew = sum(_points(tab) > count for tab, count in zip(tabs, before, strict=True))
            found[f"{kind} whose curves grew"] = grew
            print(json.dumps(found), file=sys.stderr)
            for tab in tabs:
                tab.close()
        rest.ask("POST", f"/v1/runs/{run}/cancel", {})
    return found


def _submit_fit(rest: Rest) -> str:
    """Submit a run that reports 10 points per second for hours, and return its id."""
    run = rest.submit("fit", inputs={"count": 100_000, "pause": 0.1})
    rest.until(run, "ACTIVE")
    return str(run)


def _showing(rest: Rest, run: str, context: Any, secret: str) -> Any:
    """A new page of a browser that shows the run with its live curves."""
    tab = context.new_page()
    tab.set_default_timeout(120_000)
    tab.goto(f"{rest.url}/#token={secret}&run={run}")
    tab.wait_for_selector(".multiple canvas")
    return tab


def _points(tab: Any) -> int:
    return int(tab.get_attribute("[data-metric=loss]", "data-points"))


def _cost(rest: Rest, args: argparse.Namespace) -> float:
    """Percent of a core that the server takes."""
    time.sleep(SETTLE)
    begun, now = processor(rest.process.pid), time.monotonic()
    time.sleep(args.seconds)
    return round(100 * (processor(rest.process.pid) - begun) / (time.monotonic() - now), 1)


MEASURES: Final = {"compare": compare, "memory": memory, "readers": readers, "pages": pages}


def measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "measures", nargs="*", default=[], help="compare, memory, readers, pages (all)"
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pages", type=int, default=50)
    args = parser.parse_args()
    for name in args.measures or MEASURES:
        print(json.dumps({name: MEASURES[name](args), "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    measure()
