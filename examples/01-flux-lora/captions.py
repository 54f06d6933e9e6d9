"""Pair each picture with its caption, and write the folder that `datasets` reads: the pictures and a metadata.jsonl."""

import json
import shutil
import sys
from pathlib import Path

MAGIC = {".png": b"\x89PNG", ".jpg": b"\xff\xd8\xff", ".jpeg": b"\xff\xd8\xff", ".webp": b"RIFF"}

source, target = Path(sys.argv[1]), Path(sys.argv[2])
rows, wrong = [], []
for picture in sorted(p for p in source.rglob("*") if p.suffix.lower() in MAGIC):
    name = str(picture.relative_to(source))
    caption = picture.with_suffix(".txt")
    if not picture.read_bytes().startswith(MAGIC[picture.suffix.lower()]):
        wrong.append(f"{name}: not a {picture.suffix} file inside")
    elif not caption.exists():
        wrong.append(f"{name}: no caption; expected {caption.name} beside it")
    else:
        rows.append({"file_name": name, "text": " ".join(caption.read_text().split())})
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, copy)

if wrong or not rows:
    sys.exit("\n".join(wrong) or f"{source}: no pictures")
(target / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
print(f"{len(rows)} pictures with captions")
