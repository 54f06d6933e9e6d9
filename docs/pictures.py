"""Take the pictures of docs/page.md in a browser, of a server with runs that were really made: `python -m docs.pictures`."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image

from runner.interface.cli.main import main
from runner.storage.records.ledger import LeaseRow, Ledger
from tests.servers.browser import Tab, address
from tests.servers.rest import Rest
from tests.support import RECIPE, until
from tests.tools import chromium

HERE: Final = Path(__file__).parent / "assets/page"
WIDE: Final = 1280
QUALITY: Final = 82
TRAIN: Final = """\
recipe: digits@1
summary: Train a small network on digits, and measure it on digits that it has not seen.
doc: A training that reports its loss, and an evaluation after it.
inputs:
  data: {type: file, doc: Rows of pixels with a label.}
  lr: {type: number, default: 0.01, exclusiveMinimum: 0, maximum: 1, doc: The learning rate.}
  optimizer: {type: choice, choices: [adam, sgd, lion], default: adam, doc: How weights are moved.}
  batch: {type: integer, default: 64, minimum: 1, maximum: 4096, doc: Rows of one step.}
  count: {type: integer, default: 240, minimum: 1, doc: How often weights are moved.}
  seed: {type: integer, default: 0, minimum: 0}
presets: {quick: {count: 60}, careful: {lr: 0.003, count: 600}}
steps:
  train:
    run: |
      python3 -c "
      import json, math, os, random, sys
      random.seed('{{ inputs.seed }}{{ inputs.lr }}{{ inputs.optimizer }}')
      lr, pace = {{ inputs.lr }}, {'adam': 1, 'sgd': 0.45, 'lion': 1.2}['{{ inputs.optimizer }}']
      out = open(os.environ['RECIPE_METRICS'], 'w')
      for n in range({{ inputs.count }}):
          if lr > 0.5 and n > 40: sys.exit('loss is nan at step %d: lower the learning rate' % n)
          loss = 2.3 * math.exp(-n * pace * lr ** 0.6 / 2.4) + 0.04 / pace + lr * 0.9
          noise = 1 + random.gauss(0, 0.06)
          print(json.dumps({'step': n, 'loss': loss * noise, 'val_loss': loss * 1.08, 'accuracy': 1 - min(loss, 2.2) / 2.4}), file=out)
      "
      cat {{ inputs.data }} > {{ outputs.weights }}; : {{ inputs.batch }}
    metrics: true
    outputs: {weights: weights.bin}
  evaluate: {run: 'wc -c < {{ steps.train.weights }} > {{ outputs.scores }}', outputs: {scores: scores.txt}}
"""
SETTINGS: Final = """\
[recipes]
allow = ["./digits.yaml"]
[data]
roots = ["."]
[stores.team]
url = "s3://team/recipes"
[drivers.loopback]
price = 1.2
gpus = 1
root = "cloud"
"""


def seed(root: Path) -> None:
    """Make a workspace with runs that differ, a sweep, and one that failed."""
    root.mkdir()
    (root / "digits.yaml").write_text(TRAIN)
    (root / "recipe.toml").write_text(SETTINGS)
    (root / "digits.csv").write_text("0,1,2\n" * 20_000)
    here = ["-C", str(root), "./digits.yaml", "data=digits.csv"]
    for words in (
        ["--name", "baseline", "--tag", "base"],
        ["lr=0.03", "--note", "Three times the rate."],
        ["lr=0.03", "optimizer=lion"],
        ["lr=0.9"],
        ["optimizer=sgd", "count=400", "--tag", "slow"],
    ):
        main(["run", *here, *words])
    main(["sweep", *here, "lr=0.003,0.01,0.03,0.1", "optimizer=adam,sgd", "--min", "val_loss"])


def rent(root: Path, run: str) -> None:
    """Note machines as providers would rent them: one of a run, one that nothing uses."""
    with Ledger.open(Path(os.environ["RECIPE_LEDGER"])) as ledger:
        for key, of, gpus, gpu, price in (
            ("vm-7f3a", run, 1, "RTX 4090", 0.44),
            ("vm-90c1", "", 2, "H100", 4.78),
        ):
            offer = {"resources": {"gpus": gpus, "gpu": gpu}}
            ledger.ask(
                LeaseRow(
                    key,
                    "loopback",
                    of,
                    str(root),
                    {},
                    "me",
                    "ASKED",
                    offer,
                    until=time.time() + 3 * 3600,
                    price=price,
                )
            )


def keep(tab: Tab, name: str, height: int = 0) -> None:
    """Save what a tab shows, as a small file; `height`: how much of it, in pixels."""
    if height:
        tab.page.set_viewport_size({"width": WIDE, "height": height})
        tab.page.wait_for_timeout(300)
    picture = Image.open(BytesIO(tab.page.screenshot()))
    HERE.mkdir(exist_ok=True)
    picture.save(HERE / f"{name}.webp", quality=QUALITY, method=6)


def take(browser: Any, rest: Rest, where: str) -> None:
    """Take every picture."""
    tab = Tab(browser, WIDE, "light")
    page, origin = tab.page, where.split("#")[0]
    page.goto(where)
    tab.until("window.ready")
    page.click("tr:has-text('baseline') .star")
    page.click("tr:has-text('digits-sweep') button.fold")
    keep(tab, "runs", 760)
    sweep = rest.get("/v1/runs?recipe=digits-sweep@1")["runs"][0]["id"]
    page.goto(f"{origin}#compare={sweep}")
    page.wait_for_selector(".multiple canvas")
    keep(tab, "compare", 900)
    failed = rest.get("/v1/runs?state=FAILED")["runs"][0]["id"]
    page.goto(f"{origin}#run={failed}")
    page.wait_for_selector(".charts canvas, #chart canvas, figure canvas")
    keep(tab, "run", 900)
    page.goto(f"{origin}#new=digits%401")
    page.fill("#input-data", "digits.csv")
    page.click("[data-several=lr]")
    page.fill("#input-lr", "0.003, 0.01, 0.03")
    page.click("[data-several=optimizer]")
    page.click(".ticks label >> nth=2")
    page.wait_for_selector("#tallied-steps:has-text('6 combinations')")
    keep(tab, "new", 860)
    page.goto(f"{origin}#machines")
    page.wait_for_selector("[aria-label='workspace storage']")
    keep(tab, "machines", 980)


def pictures() -> None:
    """Make runs, serve them, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "space"
        os.environ["RECIPE_LEDGER"] = f"{folder}/ledger.db"
        seed(root)
        with Rest(root) as rest:
            worker = subprocess.Popen(
                [*RECIPE, "worker", "-qq", "--label", "gpu=a100", "--driver", "ssh"],
                cwd=root,
                stdin=subprocess.DEVNULL,
            )
            try:
                until(lambda: rest.get("/v1/workers")["workers"])
                runs = [
                    rest.submit("digits", inputs={"data": "digits.csv", "seed": n}, user="ann")
                    for n in (1, 2)
                ]
                rent(root, runs[0])
                with chromium() as browser:
                    take(browser, rest, address(rest))
            finally:
                worker.terminate()
                worker.wait(60)


if __name__ == "__main__":
    pictures()
