"""Step `data` of ai-toolkit@1: check a folder of captioned clips and images file by file, and list what is learned.  Decodes nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

VIDEOS = (".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi")
IMAGES = (".jpg", ".jpeg", ".png", ".webp")
CAPTION = ".txt"
# Where a file of this kind has which bytes: ISO 14496-12 (ftyp), RFC 8794 (EBML), RIFF.
SIGNS = {
    ".mp4": (4, (b"ftyp",)), ".m4v": (4, (b"ftyp",)), ".mov": (4, (b"ftyp", b"moov", b"mdat", b"wide", b"free")),
    ".webm": (0, (b"\x1a\x45\xdf\xa3",)), ".mkv": (0, (b"\x1a\x45\xdf\xa3",)), ".avi": (0, (b"RIFF",)),
    ".jpg": (0, (b"\xff\xd8",)), ".jpeg": (0, (b"\xff\xd8",)), ".png": (0, (b"\x89PNG",)), ".webp": (0, (b"RIFF",)),
}  # fmt: skip
SHOWN = 40  # complaints that are printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trigger", default="")
    parser.add_argument("--num-frames", type=int, required=True, help="of a clip; 1: images")
    parser.add_argument("--max-bad-clips", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not options.data.is_dir():
        sys.exit(f"data: {options.data.name}: a folder of clips or images is expected, each with a caption; unpack an archive first")
    files = sorted(
        path for path in options.data.rglob("*") if path.is_file() and not any(part.startswith(".") for part in path.relative_to(options.data).parts)
    )
    kinds = VIDEOS + IMAGES if options.num_frames > 1 else IMAGES
    media = [path for path in files if path.suffix.lower() in kinds]
    clips = [path for path in media if path.suffix.lower() in VIDEOS]
    if not media:
        sys.exit(f"data: nothing to learn from: none of {len(files)} files ends in {' '.join(kinds)}")
    if options.num_frames > 1 and not clips:
        sys.exit(f"data: {len(media)} images and no clip; num_frames=1 learns from images, {options.num_frames} frames are of clips")
    good, bad = [], []
    for path in media:
        name = path.relative_to(options.data).as_posix()
        found = looked(path)
        if found is None:
            text = path.with_suffix(CAPTION).read_text(encoding="utf-8-sig").strip()
            named = options.trigger and options.trigger.lower() not in text.lower()
            good.append({"file": name, "caption": f"{options.trigger}, {text}" if named else text, "video": path in clips})
        else:
            bad.append(f"{name}: {found}")
    if len(bad) > options.max_bad_clips or not good:
        hint = f"; max_bad_clips={len(bad)} would leave them out" if good else ""
        more = [f"… and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        sys.exit("\n  ".join([f"data: {len(bad)} of {len(media)} files cannot be used{hint}", *bad[:SHOWN], *more]))
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in good), encoding="utf-8")
    videos = sum(row["video"] is True for row in good)
    print(f"data: {videos} clips and {len(good) - videos} images" + "".join(f"\ndata: left out: {line}" for line in bad))


def looked(path: Path) -> str | None:
    """Why a file cannot be learned from; None where it can, as far as its first bytes and its caption say."""
    place, signs = SIGNS[path.suffix.lower()]
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        return "is empty"
    if not any(head[place:].startswith(sign) for sign in signs):
        return f"is no {path.suffix.lower()[1:]} file, by its first bytes"
    caption = path.with_suffix(CAPTION)
    if not caption.is_file():
        return f"has no caption: {caption.name} is not there"
    try:
        text = caption.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return f"{caption.name} is not UTF-8"
    return None if text.strip() else f"{caption.name} is empty"


if __name__ == "__main__":
    main()
