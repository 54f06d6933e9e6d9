"""A workspace of runs that made what people look at: samples by step, weights, rows, checkpoints; and one whose files are hostile."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.interface.cli.main import main
from tests.servers.rest import Rest

EVIL = "<img src=x onerror=window.__xss=1>\u202e"
DRAW = """
import json, math, os, struct, sys, time, zlib
from pathlib import Path

hue, out, state, best = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

def png(side, red):
    rows = b"".join(b"\\0" + bytes(v for x in range(side) for v in (red, x * 255 // side, y * 255 // side)) for y in range(side))
    return b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")

def wav(hertz):
    data = b"".join(struct.pack("<h", int(9000 * math.sin(n * hertz / 8000 * 6.28))) for n in range(4000))
    return b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16) + b"data" + struct.pack("<I", len(data)) + data

samples = out / "samples"
samples.mkdir(parents=True, exist_ok=True)
(samples / "base.png").write_bytes(png(160, 0))
said = open(os.environ["RECIPE_METRICS"], "a")
for step in (0, 20, 40, 60):
    red = int(hue * step) % 256
    for what in ("cat", "dog"):
        (samples / f"step-{step:06d}-{what}.png").write_bytes(png(160, red if what == "cat" else 255 - red))
    (samples / f"step-{step:06d}.txt").write_text(f"At step {step} the cat says {'miau ' * (step // 20)}\\n")
    (samples / f"step-{step:06d}.wav").write_bytes(wav(300 + step * 10))
    print(json.dumps({"step": step, "loss": 3 / (step + 10) * hue}), file=said, flush=True)
header = json.dumps({"__metadata__": {"format": "pt"}, **{f"layer.{n}.weight": {"dtype": "F32", "shape": [64, 32], "data_offsets": [n * 8192, (n + 1) * 8192]} for n in range(8)}}).encode()
best.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 * 8192))
(out / "rows.csv").write_text("prompt,score\\n" + "".join(f"a cat {n},{n / 7:.3f}\\n" for n in range(90)))
(out / "rows.jsonl").write_text("".join(json.dumps({"n": n, "text": "word " * n}) + "\\n" for n in range(9)))
(out / "config.json").write_text(json.dumps({"hue": hue, "layers": [1, 2, 3]}))
try:
    import pyarrow, pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(70)), "b": ["x"] * 70}), out / "rows.parquet")
except ModuleNotFoundError:
    pass
for n in (20, 40, 60):
    (state / f"step-{n}").mkdir(exist_ok=True)
    (state / f"step-{n}" / "weights.bin").write_bytes(bytes(n * 1000))
(state / "step-80").mkdir(exist_ok=True)
(state / "step-80" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "step-40"}))
if hue == 2:
    sys.exit("out of paint")
"""
PAINT = """\
recipe: paint@1
summary: Paint a cat, as well as its hue allows.
inputs:
  hue: {type: number, default: 1.0, doc: "How much red a step adds"}
  count: {type: integer, default: 60}
  word: {type: string, default: miau}
steps:
  train:
    run: [python3, draw.py, "{{ inputs.hue }}", "{{ outputs.made }}", "{{ state.points }}", "{{ outputs.adapter }}"]
    code: [draw.py]
    state: {points: {checkpoint: "step-*"}}
    metrics: true
    outputs: {made: "made/", adapter: adapter.safetensors}
  plot:
    run: 'cp "{{ steps.train.made }}/samples/base.png" {{ outputs.plot }}; : {{ inputs.count }} {{ inputs.word }}'
    outputs: {plot: plot.png}
"""
HOSTILE_PROGRAM = """
import json, os, struct, sys, zlib
from pathlib import Path

out, evil = Path(sys.argv[1]), sys.argv[2]
out.mkdir(parents=True, exist_ok=True)

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
(out / "bomb.png").write_bytes(b"\\x89PNG\\r\\n\\x1a\\n" + head + chunk(b"IDAT", zlib.compress(bytes(1 << 24))) + chunk(b"IEND", b""))
(out / "script.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' onload='window.__xss=2'><script>window.__xss=3</script></svg>")
(out / "step-1.png").write_text("<svg onload=window.__xss=4>")
(out / "page.html").write_text("<!doctype html><script>window.__xss=5</script>")
(out / "cut.safetensors").write_bytes(struct.pack("<Q", 10**18) + b"{}")
(out / "deep.json").write_text("[" * 500_000)
(out / "deep.jsonl").write_text("[" * 900_000)
(out / "half.parquet").write_bytes(b"PAR1" + b"\\xff" * 200 + b"PAR1")
with open(out / "large.bin", "wb") as file:
    file.truncate(1 << 30)
with open(out / "large.txt", "wb") as file:
    file.write(b"words " * 400_000)
os.symlink("page.html", out / "passwd.txt")
(out / f"{evil}.txt").write_text(evil)
(out / f"{evil}.csv").write_text(f"{evil},=1+1\\n{evil},2\\n")
"""
HOSTILE = f"""\
recipe: hostile@1
inputs:
  word: {{type: string, default: "{EVIL}"}}
steps:
  make:
    run: [python3, hostile.py, "{{{{ outputs.out }}}}", "{{{{ inputs.word }}}}"]
    code: [hostile.py]
    outputs: {{out: "out/"}}
"""


def _git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def seeded(root: Path) -> None:
    """Make the workspace, which is a repository, and its runs: two of `paint`, one that failed, and one of `hostile`."""
    root.mkdir()
    for name, text in (
        ("draw.py", DRAW),
        ("paint.yaml", PAINT),
        ("hostile.py", HOSTILE_PROGRAM),
        ("hostile.yaml", HOSTILE),
    ):
        (root / name).write_text(text)
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./paint.yaml", "./hostile.yaml"]\n')
    _git(root, "init", "-q", "-b", "main")
    _git(root, "add", "draw.py", "paint.yaml")
    _git(root, "commit", "-q", "-m", "begin")
    (root / "draw.py").write_text(f"# brighter than {EVIL}\n{DRAW}")
    here = ["-C", str(root)]
    assert main(["run", *here, "./paint.yaml"]) == 0
    assert main(["run", *here, "./paint.yaml", "hue=3", "--name", "red"]) == 0
    assert main(["run", *here, "./paint.yaml", "hue=2", "--name", "out of paint"]) == 1
    assert main(["run", *here, "./hostile.yaml"]) == 0


@contextmanager
def served(folder: Path) -> Iterator[Rest]:
    """A server of the seeded workspace, below an empty folder."""
    root = folder / "space"
    seeded(root)
    with Rest(root) as server:
        yield server


def run_ids(rest: Rest) -> dict[str, str]:
    """The ids of its runs, by name or recipe."""
    found = rest.get("/v1/runs?metrics=false")["runs"]
    return {each["name"] or each["recipe"]: each["id"] for each in found}
