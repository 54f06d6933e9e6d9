"""Pictures beside each other: those of one model in a row, those of several on a sheet with their prompts.  Knows no model."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

MARGIN = 8
LABEL = 18  # pixels of a line
INK, PAPER, NOTE = "#222222", "#ffffff", "#c0504d"
RANDOM = "random weights: the base was never trained, so all it draws is noise; this shows only that drawing works"
CELL = 256  # the most pixels that an image has on the sheet


def row(images: list[Image.Image]) -> Image.Image:
    """The images of all prompts, beside each other, as they are."""
    width, height = images[0].size
    made = Image.new("RGB", (width * len(images), height))
    for place, image in enumerate(images):
        made.paste(image, (place * width, 0))
    return made


def sheet(texts: list[str], columns: dict[str, list[Image.Image]], note: str) -> Image.Image:
    """A line for each prompt, a column for each model, and a note below."""
    font = ImageFont.load_default(12)
    first = next(iter(columns.values()))[0]
    # Small images are shown whole pixels large.
    cell = min(CELL, first.width) if first.width >= CELL // 2 else first.width * (CELL // 2 // first.width)
    line = cell + LABEL + MARGIN
    width, height = MARGIN + len(columns) * (cell + MARGIN), LABEL + MARGIN + len(texts) * line
    words = _wrapped(note, font, width - 2 * MARGIN)
    page = Image.new("RGB", (width, height + len(words) * LABEL), PAPER)
    pen = ImageDraw.Draw(page)
    for number, text in enumerate(words):
        pen.text((MARGIN, height + number * LABEL), text, NOTE, font)
    for column, (name, images) in enumerate(columns.items()):
        left = MARGIN + column * (cell + MARGIN)
        pen.text((left, MARGIN // 2), name, INK, font)
        for place, image in enumerate(images):
            page.paste(image.resize((cell, cell), Image.Resampling.NEAREST if cell > image.width else Image.Resampling.LANCZOS),
                        (left, LABEL + MARGIN + place * line + LABEL))  # fmt: skip
    for place, text in enumerate(texts):
        pen.text((MARGIN, LABEL + MARGIN + place * line), text, INK, font)
    return page


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """A text in lines of no more than so many pixels."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
