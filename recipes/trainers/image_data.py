"""Step `data` of image training: check a folder of captioned images, bring each to its bucket, hold a part out.  Knows pictures, not models."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

from notices import warn
from rows import Bad, BadData, read

if TYPE_CHECKING:
    from PIL import Image

READ = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".jp2", ".j2k")
# What people put beside their pictures and take for one.  Anything else that is no picture is listed in the report and no more.
UNREAD = (
    ".heic", ".heif", ".avif", ".jxl", ".jpx", ".jpf", ".jxr", ".svg", ".psd", ".xcf", ".ai", ".eps", ".pdf", ".tga", ".ico", ".icns", ".dds",
    ".exr", ".hdr", ".ppm", ".pgm", ".pnm", ".qoi", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2", ".mp4", ".mov",
    ".webm", ".mkv", ".avi",
)  # fmt: skip
TABLES = tuple(f"{name}{suffix}" for name in ("metadata", "captions") for suffix in (".jsonl", ".csv", ".tsv", ".parquet"))
CAPTIONS = (".txt", ".caption")  # in letters of any case; kohya's scripts look for the second
FILE_COLUMNS = ("file_name", "file", "image")
CAPTION_COLUMNS = ("text", "caption")
SHOWN = 40  # complaints, and warnings of one kind, that are printed
MOST_PIXELS = 400_000_000  # of one image: more is a bomb, or a map
MASKED = "-masklabel.png"  # what OneTrainer calls the mask of an image: its name without the suffix, and this
REGULAR = "regularisation"  # where images of the kind in general lie beside the data set
CLEAR = "wholly transparent"
LOST = 0.25  # share of an image that may fall to the crop before it is worth a word
HASH = 16  # rows and columns of the perceptual hash
NEAR_BITS = 14  # of 256 that near duplicates may differ in
NEAR_SHADE = 6.0  # of 255: how much their thumbnails may differ on the mean
BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)  # what decoders make of bad bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides how a picture is prepared."""

    tables: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # resolutions, largest first, each with its buckets
    min_size: int
    alpha_background: tuple[int, int, int]
    masks: str  # none, alpha, files


@dataclass(frozen=True, slots=True)
class Picture:
    """One prepared image: what it became, what was done to it, and how it looks from far away."""

    size: tuple[int, int]  # width, height as shown, before it was prepared
    buckets: tuple[tuple[int, tuple[int, int]], ...]  # by resolution, largest first; of an image that is smaller, those that do not enlarge it
    digest: str  # SHA-256 of the file
    bits: bytes  # perceptual hash
    shades: bytes  # HASH × HASH × RGB
    done: tuple[str, ...]  # names of what was done, as the report counts them

    @property
    def bucket(self) -> tuple[int, int]:
        return self.buckets[0][1]


@dataclass(slots=True)
class Findings:
    """Everything there is to say, in the order in which it was found."""

    bad: dict[str, list[str]] = field(default_factory=dict)  # by image: why it cannot be used
    wrong: list[str] = field(default_factory=list)  # no image's own: the data set is not what it says
    warnings: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def fault(self, image: str, why: str) -> None:
        self.bad.setdefault(image, []).append(why)


def main() -> None:
    options = _options()
    try:
        print(prepare(options))
    except BadData as error:
        sys.exit(f"data: {error}")


def buckets(resolution: int, step: int) -> tuple[tuple[int, int], ...]:
    """The sizes (width, height in pixels) that images are brought to: for every width from half to twice `resolution`, in steps, the greatest height
    with no more than `resolution`² pixels.  So any two buckets cost about the same memory.  The rule is NovelAI's of 2022 ("aspect ratio
    bucketing"), the range of ratios, 1:4 to 4:1, and the common area those of SDXL (arXiv 2307.01952, §2.3 and appendix I)."""
    least, most = -(-resolution // 2 // step) * step or step, 2 * resolution // step * step
    found = {(resolution // step * step,) * 2}
    for side in range(least, most + 1, step):
        if (other := min(resolution**2 // side, most) // step * step) >= least:
            found |= {(side, other), (other, side)}
    return tuple(sorted(found))


def nearest(size: tuple[int, int], table: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The bucket whose ratio of sides is closest to that of `size` (width, height): the crop takes least; of two, the one with more pixels."""
    ratio = log(size[0] / size[1])
    return min(table, key=lambda bucket: (round(abs(log(bucket[0] / bucket[1]) - ratio), 9), -bucket[0] * bucket[1], -bucket[0]))


def corner(size: tuple[int, int], bucket: tuple[int, int]) -> tuple[int, int]:
    """The left and upper pixels that the crop takes from an image of `size` once it is resized to cover `bucket`; all (width, height).

    It takes the same on the right and below.
    """
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    return round((size[0] * scale - bucket[0]) / 2), round((size[1] * scale - bucket[1]) / 2)


def prepare(options: argparse.Namespace) -> str:
    """Write the prepared folder; the summary for people comes back.  BadData names every file that cannot be used, and what to do."""
    with tempfile.TemporaryDirectory() as folder:
        root = _unpacked(options.data, Path(folder) / "data")
        if options.regularisation is None:
            return _prepare(root, options)
        both = Path(folder) / "both"
        both.mkdir()
        for name, each in (("dataset", root), (REGULAR, _unpacked(options.regularisation, Path(folder) / REGULAR))):
            _look(each)
            (both / name).symlink_to(each.resolve())
        return _prepare(both, options)


def _prepare(root: Path, options: argparse.Namespace) -> str:
    sizes = sorted({options.resolution, *options.more_resolutions}, reverse=True)
    tables = tuple((size, buckets(size, options.bucket_step)) for size in sizes)
    settings = Settings(tables, options.min_size, _colour(options.alpha_background), options.masks)
    names, others = _look(root)
    if options.masks == "files":
        names = [name for name in names if not name.endswith(MASKED)]
    findings = Findings()
    times = _times(names, options)
    captions = _captions(root, names, others, options, findings)

    (options.out / "images").mkdir(parents=True, exist_ok=True)

    def key(position: int, digest: str, size: int) -> str:
        return f"{position:06d}-{digest[:8]}" + (f"-{size}" if size != options.resolution else "")

    def one(position: int) -> Picture | str:
        return _prepared(root / names[position], lambda digest, size: options.out / "images" / f"{key(position, digest, size)}.png", settings)

    # Pillow decodes and resizes outside the interpreter's lock.  `map` answers in order, also when a later one is done first.
    with ThreadPoolExecutor(options.workers) as pool:
        looked = list(pool.map(one, range(len(names))))
    pictures = {names[position]: picture for position, picture in enumerate(looked) if isinstance(picture, Picture)}
    for name, picture in zip(names, looked, strict=True):
        if isinstance(picture, str):
            findings.fault(name, picture)

    good = [name for name in names if name in pictures and name in captions and name not in findings.bad]
    groups = _alike(good, pictures)
    good = _without_duplicates(good, groups, pictures, options.duplicates, findings)
    _remarks(good, pictures, findings)
    _judge(findings, options, good, len(names))

    regular = {name for name in good if _is_regular(name, options)}
    held_out = _held_out([name for name in good if name not in regular], groups, pictures, options.eval_fraction, options.seed)
    positions = {name: position for position, name in enumerate(names)}
    rows = []
    for name in good:
        picture = pictures[name]
        # Judged by is the largest: a loss is compared over trainings.
        for size, bucket in picture.buckets[: 1 if name in held_out else None]:
            id = key(positions[name], picture.digest, size)
            rows.append({"id": id, "file": f"images/{id}.png", "caption": captions[name], "width": bucket[0], "height": bucket[1],
                         "original": picture.size, "corner": corner(picture.size, bucket), "source": name, "held_out": name in held_out,
                         "repeats": times.get(name, 1), "regular": name in regular})  # fmt: skip
    kept = {row["id"] for row in rows}
    for stale in (options.out / "images").glob("*.png"):
        if stale.stem not in kept:
            stale.unlink()
    with (options.out / "manifest.jsonl").open("w", encoding="utf-8", newline="\n") as manifest:
        for row in rows:
            manifest.write(json.dumps(row, ensure_ascii=False) + "\n")
    done = Counter(what for name in good for what in pictures[name].done)
    prepared = Counter(f"{row['width']}x{row['height']}" for row in rows)
    report = {
        "images_found": len(names),
        "images": len(good),
        "images_held_out": len(held_out),
        "images_regular": len(regular),
        "images_by_repeats": dict(sorted(Counter(times.get(name, 1) for name in good if name not in regular).items())),
        "resolutions": sizes,
        "bucket_step": options.bucket_step,
        "buckets": dict(sorted(prepared.items())),
        "trigger": options.trigger,
        "done": dict(sorted(done.items())),
        "left_out": dict(sorted(findings.dropped.items())),
        "left_out_for": dict(sorted(findings.bad.items())),
        "warnings": findings.warnings,
        "other_files": [name for name in others if _is_stray(name)][:SHOWN],
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for warning in findings.warnings[:SHOWN]:
        warn(warning)
    return _summary(report, findings)


def _is_regular(name: str, options: argparse.Namespace) -> bool:
    return options.regularisation is not None and name.startswith(f"{REGULAR}/")


def _times(names: list[str], options: argparse.Namespace) -> dict[str, int]:
    """How often an epoch has an image, for those in folders of `repeats`, FOLDER=TIMES: of folders in each other the inner one says so."""
    times: dict[str, int] = {}
    inside = {name: name.removeprefix("dataset/") if options.regularisation is not None else name for name in names if not _is_regular(name, options)}
    given = []
    for text in options.repeats:
        folder, _, count = text.rpartition("=")
        if not folder or not count.isdecimal() or not int(count):
            raise BadData(f'repeats: "{text}" is not FOLDER=TIMES; write it as portraits=10')
        given.append((folder.strip("/"), int(count)))
    for folder, count in sorted(given, key=lambda pair: pair[0].count("/")):
        found = [name for name, below in inside.items() if _spelt(below).startswith(f"{_spelt(folder)}/")]
        if not found:
            folders = sorted({below.rpartition("/")[0] for below in inside.values() if "/" in below})
            there = ", ".join(folders[:SHOWN]) or "none, all images lie side by side"
            raise BadData(f'repeats: no image is in a folder "{folder}"; folders with images: {there}')
        times |= dict.fromkeys(found, count)
    return times


def _unpacked(root: Path, into: Path) -> Path:
    """Where the images are files: `root`, or `into` where they lay in Parquet, as `datasets` writes them and the Hub has many."""
    tables = sorted(root.rglob("*.parquet")) if root.is_dir() else []
    if not tables or any(path.name.lower().endswith(READ) for path in root.rglob("*")):
        return root
    import pyarrow as arrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    found = False
    for table in tables:
        name = table.relative_to(root).as_posix()
        try:
            with parquet.ParquetFile(table) as file:
                fields = {field.name: field.type for field in file.schema_arrow}
                image = next((field for field, kind in fields.items() if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0), None)
                caption = next((column for column in CAPTION_COLUMNS if column in fields), None)
                if image is None:
                    continue
                found = True
                (into / name).mkdir(parents=True, exist_ok=True)
                number = 0
                for batch in file.iter_batches(64, columns=[image, *([caption] if caption else [])]):
                    for row in batch.to_pylist():
                        data = (row[image] or {}).get("bytes") or b""
                        stem = into / name / f"{number:06d}"
                        stem.with_suffix(_suffix_of(data)).write_bytes(data)
                        if caption and isinstance(row[caption], str):
                            stem.with_suffix(".txt").write_text(row[caption], encoding="utf-8", newline="")
                        number += 1
        except arrow.ArrowException as error:
            raise BadData(f"{name}: not Parquet: {str(error).splitlines()[0]}") from error
    return into if found else root


def _suffix_of(data: bytes) -> str:
    starts = {b"\xff\xd8": ".jpg", b"\0\0\0\x0cjP": ".jp2", b"RIFF": ".webp", b"BM": ".bmp", b"GIF8": ".gif", b"II*": ".tif", b"MM\0*": ".tif"}
    return next((suffix for start, suffix in starts.items() if data.startswith(start)), ".png")


def _look(root: Path) -> tuple[list[str], list[str]]:
    """The images below `root`, and the other files there, as relative paths in name order."""
    if not root.exists():
        raise BadData(f"{root}: no such folder")
    if not root.is_dir():
        raise BadData(f"{root.name}: a folder of images is expected, each with a caption; unpack an archive first")
    found: list[str] = []
    for folder, below, inside in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".") and name != "__MACOSX"]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in inside if not name.startswith(".")]
    names = sorted(name.replace(os.sep, "/") for name in found)
    images = [name for name in names if name.lower().endswith((*READ, *UNREAD))]
    if not any(name.lower().endswith(READ) for name in images):
        raise BadData(f"no image in this folder: none of {len(names)} files ends in {' '.join(READ)}")
    return images, [name for name in names if not name.lower().endswith((*READ, *UNREAD))]


def _is_stray(name: str) -> bool:
    base = name.rsplit("/", 1)[-1].lower()
    return base not in TABLES and not base.endswith(CAPTIONS) and not base.startswith(("readme", "license", "licence"))


def _captions(root: Path, names: list[str], others: list[str], options: argparse.Namespace, findings: Findings) -> dict[str, str]:
    """The caption of every image that has one, with the trigger word in it; images without one as `missing_captions` says."""
    given = _tables(root, set(names), [name for name in others if name.rsplit("/", 1)[-1].lower() in TABLES], findings)
    _beside(root, names, set(others), given, findings)
    captions: dict[str, str] = {}
    for name in names:
        if name in findings.bad:
            continue
        text = " ".join(given[name][1].split()) if name in given else ""
        if not text and options.missing_captions == "filename":
            text = " ".join(re.split(r"[\s_\-.]+", Path(name).stem)).strip()
            findings.dropped["captions taken from the file name"] += 1
        trigger = "" if _is_regular(name, options) else options.trigger
        if not text and options.missing_captions == "trigger":
            text = trigger
        if not text and options.missing_captions == "drop":
            findings.dropped["images without a caption"] += 1
        elif not text:
            where = (
                f"its caption in {given[name][0]} is empty" if name in given else f"no caption: no {Path(name).with_suffix('.txt').name} beside it"
            )
            findings.fault(name, f"{where}; write one, or missing_captions=drop, filename or trigger")
        else:
            captions[name] = _triggered(text, trigger)
    return captions


def _spelt(name: str) -> str:
    """A name as others may be compared with it: macOS writes é as two characters where most write one."""
    return unicodedata.normalize("NFC", name)


def _triggered(text: str, trigger: str) -> str:
    there = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE)
    return text if not trigger or there else f"{trigger}, {text}"


def _tables(root: Path, images: set[str], tables: list[str], findings: Findings) -> dict[str, tuple[str, str]]:
    """Captions in tables, as `datasets` reads them (metadata) and others write them: by image, where it stands and the text."""
    given: dict[str, tuple[str, str]] = {}
    spelt = {_spelt(name): name for name in images}
    for table in tables:
        folder = table.rpartition("/")[0]
        for row in read(root / table, table):
            if isinstance(row, Bad):
                findings.wrong.append(f"{row.where}: {row.why}")
                continue
            file = next((column for column in FILE_COLUMNS if column in row.value), None)
            caption = next((column for column in CAPTION_COLUMNS if column in row.value), None)
            if file is None or caption is None:
                wanted = FILE_COLUMNS if file is None else CAPTION_COLUMNS
                has = ", ".join(row.value) or "none"
                findings.wrong.append(
                    f"{row.where}: no column {' or '.join(wanted)}; it has: {has}; captions are read from columns file_name and text"
                )
                break  # the next rows would say the same
            named, text = row.value[file], row.value[caption]
            if not isinstance(named, str) or not isinstance(text, str | None):
                findings.wrong.append(f"{row.where}: {file} and {caption} must be strings")
                continue
            name = os.path.normpath(f"{folder}/{named}" if folder else named).replace(os.sep, "/")
            name = name if name in images else spelt.get(_spelt(name), name)
            if name not in images:
                findings.wrong.append(f"{row.where}: there is no image {named}; correct the name, or remove the row")
            elif name in given:
                findings.wrong.append(f"{row.where}: {named} has a caption already, in {given[name][0]}; keep one")
            else:
                given[name] = (row.where, text or "")
    return given


def _beside(root: Path, names: list[str], others: set[str], given: dict[str, tuple[str, str]], findings: Findings) -> None:
    """Add captions that lie beside their image: same name, with an ending of CAPTIONS."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stems.setdefault(_spelt(name.rpartition(".")[0]), []).append(name)
    texts: dict[str, list[str]] = {}
    for file in sorted(others):
        if file.lower().endswith(CAPTIONS):
            texts.setdefault(_spelt(file.rpartition(".")[0]), []).append(file)
    for stem, mine in stems.items():
        if stem not in texts:
            continue
        file, *more = texts[stem]
        if more:
            findings.fault(mine[0], f"has two captions beside it, {file} and {more[0]}; keep one")
            continue
        if len(mine) > 1 and any(name not in given for name in mine):
            for name in mine:
                twin = next(other for other in mine if other != name)
                findings.fault(name, f"{file} would be the caption of {twin} too; rename one, with a caption of its own")
            continue
        try:
            text = (root / file).read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            findings.fault(mine[0], f"its caption {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; save it as UTF-8")
            continue
        for name in mine:
            if name not in given:
                given[name] = (file, text)
            elif " ".join(given[name][1].split()) != " ".join(text.split()):
                findings.fault(name, f"has two captions, in {given[name][0]} and in {file}; keep one")
    for file in (file for stem, files in texts.items() if stem not in stems for file in files):
        if not file.rsplit("/", 1)[-1].lower().startswith(("readme", "license", "licence")):
            findings.warnings.append(f"{file}: a caption without its image")


def _prepared(file: Path, target: Callable[[str, int], Path], settings: Settings) -> Picture | str:
    """Write the image as its buckets have it, with its mask as alpha channel; or why it cannot be used, and what to do."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # its size is looked at below, before a pixel is
    if file.suffix.lower() in UNREAD:
        return f"{file.suffix.lower()} is not read here; export it as PNG or JPEG"
    try:
        data = file.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not data:
        return "an empty file; remove it, or get it again"
    try:
        with Image.open(file) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return f"{width}×{height} is more than {MOST_PIXELS // 10**6} megapixels; make it smaller"
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # the second of a phone's picture is its thumbnail
            if frames > 1:
                return f"{frames} frames or pages; export the one that is meant as PNG"
            image.load()
            done = [] if file.suffix.lower() in _suffixes(image.format) else ["are not what their suffix says"]
            turned = ImageOps.exif_transpose(image)
            done += ["turned as their EXIF says"] if image.getexif().get(0x0112, 1) != 1 else []
            plain = _plain(turned, settings.alpha_background, done)
            mask = _mask(turned, file, settings.masks)
    except UnidentifiedImageError:
        return f"not an image{_guess(data)}; get it again, or remove it"
    except BROKEN as error:
        what = "is truncated" if "truncated" in str(error) or "Truncated" in str(error) else f"is broken: {error}"
        return f"{what}; get it again, or remove it"
    if plain is None:
        return f"has {turned.mode} pixels, whose range is not known; export it as 8-bit PNG or JPEG"
    size = plain.size
    if min(size) < settings.min_size:
        return f"{size[0]}×{size[1]}: its smaller side is below min_size={settings.min_size}; get a larger one, or lower min_size"
    if isinstance(mask, str):
        return mask
    done += ["with a mask"] if mask is not None else []
    every = [(resolution, nearest(size, table)) for resolution, table in settings.tables]
    fitting = [(resolution, bucket) for resolution, bucket in every if size[0] >= bucket[0] and size[1] >= bucket[1]]
    done += [] if fitting else ["enlarged"]
    digest = hashlib.sha256(data).hexdigest()
    for resolution, bucket in fitting or every[-1:]:
        ready = plain if size == bucket else ImageOps.fit(plain, bucket, Image.Resampling.LANCZOS)
        if mask is not None:
            ready = ready.copy()
            ready.putalpha(ImageOps.fit(mask, bucket, Image.Resampling.BILINEAR))
        ready.save(target(digest, resolution), "PNG", compress_level=1)  # read back a few times and then gone: time counts more than space
    return Picture(size, tuple(fitting or every[-1:]), digest, *_look_alike(plain), tuple(done))


def _mask(image: Image.Image, file: Path, kind: str) -> Image.Image | str | None:
    """What of an image is to be learned, white, in 8 bits: None where that is all of it; or why its mask cannot be used, and what to do."""
    from PIL import Image, ImageOps

    named = [file.with_name(f"{stem}{MASKED}") for stem in (file.stem, *(unicodedata.normalize(form, file.stem) for form in ("NFC", "NFD")))]
    beside = next((path for path in named if path.is_file()), named[0])
    if kind == "alpha" and (image.has_transparency_data):
        found = image.convert("RGBA").getchannel("A")
    elif kind == "files" and beside.is_file():
        try:
            with Image.open(beside) as read:
                found = ImageOps.exif_transpose(read).convert("L")
        except BROKEN as error:
            return f"its mask {beside.name} is broken: {error}; make it again, or remove it"
        if found.size != image.size:
            return f"its mask {beside.name} has {found.width}×{found.height} pixels, the image {image.width}×{image.height}; make them alike"
    else:
        return None
    low, high = found.getextrema()
    if not high:
        return "its mask leaves nothing to learn: white is what is learned, and it is black all over; draw it anew, or remove the image"
    return found if low < 255 else None


def _suffixes(form: str | None) -> tuple[str, ...]:
    jpeg = (".jpg", ".jpeg", ".jpe", ".jfif")
    return {"JPEG": jpeg, "MPO": jpeg, "TIFF": (".tif", ".tiff"), "JPEG2000": (".jp2", ".j2k")}.get(form or "", (f".{form}".lower(),))


def _guess(data: bytes) -> str:
    if data[:200].lstrip()[:1] == b"<":
        return ", but a web page or XML"
    if data.startswith(b"version https://git-lfs"):
        return ", but a Git LFS pointer: run git lfs pull"
    return ""


def _plain(image: Image.Image, background: tuple[int, int, int], done: list[str]) -> Image.Image | None:
    """The image as 8-bit RGB in the sRGB space; None where its numbers have no known range."""
    from PIL import Image

    profile = image.info.get("icc_profile")
    if image.mode.startswith("I;16"):
        import numpy

        # Pillow's own conversion clips 16 bits at 255.
        image = Image.fromarray((numpy.asarray(image, dtype=numpy.uint32) >> 8).astype(numpy.uint8))
        done.append("had 16 bits")
    if image.mode in ("I", "F"):
        return None
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        clear = image.convert("RGBA")
        low, high = clear.getchannel("A").getextrema()
        if low < 255:
            done.append("flattened: had transparency" if high else CLEAR)
        image = Image.alpha_composite(Image.new("RGBA", clear.size, (*background, 255)), clear).convert("RGB")
    elif image.mode == "CMYK":
        done.append("had CMYK colours")
    if profile:
        image = _srgb(image, profile, done)
    return image.convert("RGB")


def _srgb(image: Image.Image, profile: bytes, done: list[str]) -> Image.Image:
    """A camera's or a printer's colours as a screen shows them.  A profile that does not work is as none."""
    import io

    from PIL import ImageCms

    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(own):
            return image
        converted = ImageCms.profileToProfile(image, own, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image
    assert converted is not None
    done.append("had a colour profile")
    return converted


def _look_alike(image: Image.Image) -> tuple[bytes, bytes]:
    """The difference hash (Krawetz, "Kind of Like That", 2013; HASH rows here, and a step counts from 3 levels on, so that the noise of flat areas
    does not), and the thumbnail that tells a red heart from a blue one."""
    import numpy
    from PIL import Image

    grey = numpy.asarray(image.convert("L").resize((HASH + 1, HASH), Image.Resampling.BOX), dtype=numpy.int16)
    bits = numpy.packbits(grey[:, 1:] - grey[:, :-1] > 2).tobytes()
    return bits, image.resize((HASH, HASH), Image.Resampling.BOX).tobytes()


def _alike(names: list[str], pictures: dict[str, Picture]) -> dict[str, str]:
    """The first of those it looks like, for every image: itself when it is alone."""
    import numpy

    if not names:
        return {}
    bits = numpy.frombuffer(b"".join(pictures[name].bits for name in names), dtype=numpy.uint64).reshape(len(names), -1)
    shades = numpy.frombuffer(b"".join(pictures[name].shades for name in names), dtype=numpy.uint8).reshape(len(names), -1)
    first = list(range(len(names)))
    for number in range(1, len(names)):
        apart = numpy.bitwise_count(bits[:number] ^ bits[number]).sum(axis=1, dtype=numpy.int32)
        for other in numpy.flatnonzero(apart <= NEAR_BITS).tolist():
            if first[other] == first[number]:
                continue
            differ = numpy.abs(shades[other].astype(numpy.int16) - shades[number]).mean()
            if differ <= NEAR_SHADE:
                # Groups grow together where one image is like two: no image of a group may be learned while another judges.
                low, high = sorted((first[other], first[number]))
                first = [low if leader == high else leader for leader in first]
    return {name: names[leader] for name, leader in zip(names, first, strict=True)}


def _without_duplicates(good: list[str], groups: dict[str, str], pictures: dict[str, Picture], policy: str, findings: Findings) -> list[str]:
    members: dict[str, list[str]] = {}
    for name in good:
        members.setdefault(groups[name], []).append(name)
    gone: set[str] = set()
    for group in members.values():
        if len(group) < 2:
            continue
        best = max(group, key=lambda name: pictures[name].size[0] * pictures[name].size[1])  # the first of those with most pixels
        for name in group:
            if name == best:
                continue
            what = "the same file as" if pictures[name].digest == pictures[best].digest else "looks the same as"
            if policy == "error":
                findings.fault(name, f"{what} {best}; remove one, or duplicates=drop or warn")
            elif policy == "drop":
                findings.dropped["duplicates"] += 1
                gone.add(name)
            else:
                findings.warnings.append(f"{name}: {what} {best}; it counts twice in training")
    return [name for name in good if name not in gone and name not in findings.bad]


def _remarks(good: list[str], pictures: dict[str, Picture], findings: Findings) -> None:
    for name in good:
        (width, height), bucket = pictures[name].size, pictures[name].bucket
        kept = min(width / height / (bucket[0] / bucket[1]), bucket[0] / bucket[1] / (width / height))
        if 1 - kept > LOST:
            findings.warnings.append(f"{name}: {width}×{height} loses {1 - kept:.0%} to the crop; cut it yourself to what matters")
        if CLEAR in pictures[name].done:
            findings.warnings.append(f"{name}: wholly transparent: it is learned as an empty picture; remove it, or export it anew")
        if "enlarged" in pictures[name].done:
            findings.warnings.append(
                f"{name}: {width}×{height} is enlarged to {bucket[0]}×{bucket[1]}; a larger original, or a lower resolution, is sharper"
            )


def _judge(findings: Findings, options: argparse.Namespace, good: list[str], found: int) -> None:
    bad = [f"{name}: {why}" for name, faults in sorted(findings.bad.items()) for why in faults]
    if findings.wrong or len(findings.bad) > options.max_bad_images:
        complaints = findings.wrong + bad
        more = [f"… and {len(complaints) - SHOWN} more"] if len(complaints) > SHOWN else []
        hint = f"; max_bad_images={len(findings.bad)} would leave out the images" if bad and good else ""
        head = f"{len(complaints)} {'thing' if len(complaints) == 1 else 'things'} to put right in {found} images{hint}"
        raise BadData("\n  ".join([head, *complaints[:SHOWN], *more]))
    if bad:
        findings.dropped["bad images"] = len(findings.bad)
        findings.warnings.append(f"{len(findings.bad)} bad images left out: {'; '.join(bad[:SHOWN])}")
    if not good:
        raise BadData(
            f"none of {found} images is left to learn from: {', '.join(f'{count} {what}' for what, count in findings.dropped.items() if count)}"
        )


def _held_out(good: list[str], groups: dict[str, str], pictures: dict[str, Picture], fraction: float, seed: int) -> set[str]:
    """The images that are kept from training, by the hash of their file: what looks alike is never on both sides, and more data moves none."""
    if not fraction:
        return set()
    members: dict[str, list[str]] = {}
    for name in good:
        members.setdefault(groups[name], []).append(name)
    if len(members) < 2:
        raise BadData("one image cannot be both learned and held out: more images, or eval_fraction=0")
    rank = {group: hashlib.sha256(f"{seed}:{min(pictures[name].digest for name in inside)}".encode()).digest() for group, inside in members.items()}
    limit = int(fraction * 2**64).to_bytes(8, "big")
    chosen = {group for group, digest in rank.items() if digest[:8] < limit} or {min(rank, key=rank.__getitem__)}
    if len(chosen) == len(rank):
        chosen.remove(max(rank, key=rank.__getitem__))
    return {name for group in chosen for name in members[group]}


def _summary(report: dict[str, object], findings: Findings) -> str:
    sizes, done = report["buckets"], report["done"]
    assert isinstance(sizes, dict) and isinstance(done, dict)
    shown = ", ".join(f"{count} of {size.replace('x', '×')}" for size, count in sizes.items())
    regular = f", {report['images_regular']} for regularisation" if report["images_regular"] else ""
    lines = [f"data: {report['images']} images of {report['images_found']}, {report['images_held_out']} held out{regular}; {shown}"]
    lines += [f"data: {count} {'image' if count == 1 else 'images'} {what}" for what, count in done.items()]
    lines += [f"data: {count} {what}" for what, count in sorted(findings.dropped.items()) if count]
    lines += [f"data: … and {len(findings.warnings) - SHOWN} more warnings, in report.json"] if len(findings.warnings) > SHOWN else []
    return "\n".join(lines)


def _colour(text: str) -> tuple[int, int, int]:
    from PIL import ImageColor

    try:
        return ImageColor.getcolor(text, "RGB")[:3]  # type: ignore[index,return-value]
    except ValueError as error:
        raise BadData(f'alpha_background "{text}" is no colour; write a name as white, or #rrggbb') from error


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--regularisation", type=Path, help="a folder of images of the kind in general, with captions")
    parser.add_argument("--repeats", type=json.loads, default=[], help="a JSON list of FOLDER=TIMES")
    parser.add_argument("--resolution", type=int, required=True)
    parser.add_argument("--more-resolutions", type=json.loads, default=[], help="a JSON list of others at which images are learned, too")
    parser.add_argument("--masks", choices=["none", "alpha", "files"], default="none", help="what says which parts of an image are learned")
    parser.add_argument("--bucket-step", type=int, default=64)
    parser.add_argument("--min-size", type=int, default=1)
    parser.add_argument("--trigger", default="")
    parser.add_argument("--missing-captions", choices=["error", "drop", "filename", "trigger"], default="error")
    parser.add_argument("--duplicates", choices=["error", "warn", "drop"], default="warn")
    parser.add_argument("--alpha-background", default="white")
    parser.add_argument("--max-bad-images", type=int, default=0)
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    if options.missing_captions == "trigger" and not options.trigger:
        parser.error("missing_captions=trigger needs a trigger word")
    if (least := min([options.resolution, *options.more_resolutions])) < options.bucket_step:
        parser.error(f"resolution {least} is less than the bucket step {options.bucket_step}")
    return options


if __name__ == "__main__":
    main()
