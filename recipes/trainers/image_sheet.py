"""Draw the prepared images of a data set on one sheet, each with its caption, as they will be learned.  Knows the manifest, no model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 8
CELL = 160  # pixels a side of the place for a picture
LINES = 3  # of caption
HEIGHT = 14  # pixels of a line
MARGIN = 8
INK, PAPER, HELD_OUT = "#222222", "#ffffff", "#c0504d"
LEGEND = "held out: judged by, not learned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=96, help="images shown; of a larger data set, evenly many from all of it")
    options = parser.parse_args()

    rows = [json.loads(line) for line in (options.data / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = [rows[len(rows) * number // min(options.most, len(rows))] for number in range(min(options.most, len(rows)))]
    columns = min(COLUMNS, len(shown))
    step = CELL + MARGIN, CELL + LINES * HEIGHT + MARGIN
    font = ImageFont.load_default(11)
    bottom = -(-len(shown) // columns) * step[1] + MARGIN
    some = any(row["held_out"] for row in shown)
    sheet = Image.new("RGB", (columns * step[0] + MARGIN, bottom + (HEIGHT + MARGIN if some else 0)), PAPER)
    pen = ImageDraw.Draw(sheet)
    if some:
        pen.rectangle((MARGIN, bottom, MARGIN + HEIGHT, bottom + HEIGHT), outline=HELD_OUT)
        pen.text((2 * MARGIN + HEIGHT, bottom + 1), LEGEND, fill=HELD_OUT, font=font)
    for number, row in enumerate(shown):
        left, top = MARGIN + number % columns * step[0], MARGIN + number // columns * step[1]
        with Image.open(options.data / row["file"]) as prepared:
            image = _faded(prepared)
            # Small pictures grow by whole pixels: how coarse they are is what one wants to see.
            enlarge = min(CELL // image.width, CELL // image.height)
            small = image.resize((image.width * enlarge, image.height * enlarge), Image.Resampling.NEAREST) if enlarge > 1 else image.copy()
        small.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
        sheet.paste(small, (left + (CELL - small.width) // 2, top + CELL - small.height))
        colour = HELD_OUT if row["held_out"] else INK
        for line, text in enumerate(_lines(row["caption"], font)):
            pen.text((left, top + CELL + 2 + line * HEIGHT), text, fill=colour, font=font)
        if row["held_out"]:
            pen.rectangle((left - 2, top - 2, left + CELL + 1, top + CELL + 1), outline=HELD_OUT)
    sheet.save(options.out, optimize=True)
    print(f"sheet: {options.out}, {len(shown)} of {len(rows)} images; those held out are framed in red")


def _faded(image: Image.Image) -> Image.Image:
    """The image, pale where its mask says that it is not learned."""
    plain = image.convert("RGB")
    if image.mode != "RGBA":
        return plain
    return Image.composite(plain, Image.blend(plain, Image.new("RGB", plain.size, PAPER), 0.75), image.getchannel("A"))


def _lines(caption: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """The caption broken at words, the last line cut."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= CELL or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < LINES:
            lines.append(word)
        else:
            lines[-1] += " …"
            break
    return [_cut(line, font) for line in lines]


def _cut(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    while line and font.getlength(line) > CELL:
        line = line.removesuffix("…")[:-1].rstrip() + "…" if len(line) > 2 else ""
    return line


if __name__ == "__main__":
    main()
