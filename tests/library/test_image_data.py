"""Claims about step `data` of image training: what it takes, what it says of bad files, what it makes of good ones."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

ROOT = Path(__file__).resolve().parents[2]
EMOJI = ROOT / "fixtures" / "datasets" / "emoji"
PHOTOS = ROOT / "fixtures" / "datasets" / "photos"

Rows = dict[str, dict[str, Any]]
Prepare = Callable[..., Rows]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepare]:
    """Run the step's program in this process; its manifest by source comes back."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "trainers"))

    def call(
        data: Path, *more: object, resolution: int = 64, step: int = 16, out: str = "out"
    ) -> Rows:
        import image_data  # type: ignore[import-not-found]

        words = [
            "image_data.py",
            "--data",
            data,
            "--out",
            tmp_path / out,
            "--resolution",
            resolution,
            "--bucket-step",
            step,
            *more,
        ]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        image_data.main()
        rows = [
            json.loads(line)
            for line in (tmp_path / out / "manifest.jsonl").read_text().splitlines()
        ]
        return {row["source"]: row for row in rows}

    yield call
    for name in ("image_data", "rows", "notices"):
        sys.modules.pop(name, None)


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A data set of three."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, name in enumerate(("ant", "bee", "cow")):
        picture(number).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a picture of the {name}\n")
    return folder


def picture(seed: int, size: tuple[int, int] = (96, 96)) -> Image.Image:
    """Coarse noise: no two of them look the same, and each looks like itself when it is made smaller."""
    rough = numpy.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=numpy.uint8)
    return Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def prepared(tmp_path: Path, row: dict[str, Any], out: str = "out") -> Image.Image:
    return Image.open(tmp_path / out / row["file"])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


PNG = encoded(picture(7), "PNG")
BAD = {
    "truncated": (
        "x.jpg",
        encoded(picture(7), "JPEG")[:900],
        "x.jpg: is truncated; get it again, or remove it",
    ),
    "truncated png": (
        "x.png",
        PNG[: len(PNG) // 2],
        "x.png: is truncated; get it again, or remove it",
    ),
    "a web page": (
        "x.jpg",
        b"<!DOCTYPE html><title>404</title>",
        "x.jpg: not an image, but a web page or XML; get it again",
    ),
    "git lfs": (
        "x.png",
        b"version https://git-lfs.github.com/spec/v1\n",
        "x.png: not an image, but a Git LFS pointer: run git lfs pull",
    ),
    "noise": ("x.png", b"\0\1\2\3" * 99, "x.png: not an image; get it again, or remove it"),
    "broken inside": ("x.png", PNG[:60] + b"\xff" * 40 + PNG[100:], "x.png: is broken: "),
    "empty": ("x.png", b"", "x.png: an empty file; remove it, or get it again"),
    "heic": (
        "x.HEIC",
        b"\0\0\0\x18ftypheic",
        "x.HEIC: .heic is not read here; export it as PNG or JPEG",
    ),
    "video": ("x.mp4", b"\0\0\0\x18ftypisom", "x.mp4: .mp4 is not read here"),
    "small": (
        "x.png",
        encoded(picture(7, (80, 30)), "PNG"),
        "x.png: 80×30: its smaller side is below min_size=32; get a larger one, or lower min_size",
    ),
    "animated": (
        "x.gif",
        encoded(picture(7), "GIF", save_all=True, append_images=[picture(8), picture(9)]),
        "x.gif: 3 frames or pages; export the one that is meant as PNG",
    ),
    "float": (
        "x.tif",
        encoded(Image.new("F", (64, 64), 0.5), "TIFF"),
        "x.tif: has F pixels, whose range is not known; export it as 8-bit PNG or JPEG",
    ),
    "bomb": (
        "x.png",
        encoded(Image.new("1", (30_000, 20_000)), "PNG"),
        "x.png: 30000×20000 is more than 400 megapixels; make it smaller",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_with_what_to_do(prepare: Prepare, images: Path, name: str) -> None:
    file, data, message = BAD[name]
    (images / file).write_bytes(data)
    (images / "x.txt").write_text("something")
    with pytest.raises(SystemExit) as stopped:
        prepare(images, "--min-size", 32)
    assert message in str(stopped.value)
    assert "1 thing to put right in 4 images; max_bad_images=1 would leave out the images" in str(
        stopped.value
    )


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_left_out_when_so_many_may_be(
    prepare: Prepare, report: Callable[[], dict[str, Any]], images: Path, name: str
) -> None:
    file, data, _ = BAD[name]
    (images / file).write_bytes(data)
    (images / "x.txt").write_text("something")
    assert set(prepare(images, "--min-size", 32, "--max-bad-images", 1)) == {
        "ant.png",
        "bee.png",
        "cow.png",
    }
    assert list(report()["left_out_for"]) == [file]


def test_every_fault_is_reported_at_once(prepare: Prepare, images: Path) -> None:
    for number, (file, data, _) in enumerate(BAD.values()):
        (images / f"{number}{file}").write_bytes(data)
        (images / f"{number}{file}").with_suffix(".txt").write_text("something")
    with pytest.raises(SystemExit) as stopped:
        prepare(images, "--min-size", 32)
    said = str(stopped.value)
    assert f"{len(BAD)} things to put right" in said
    for number, (_, _, message) in enumerate(BAD.values()):
        assert f"{number}{message}" in said


def test_an_image_with_two_faults_has_both_reported(prepare: Prepare, images: Path) -> None:
    (images / "x.png").write_bytes(PNG[:900])
    with pytest.raises(SystemExit) as stopped:
        prepare(images)
    assert "2 things to put right in 4 images; max_bad_images=1 would" in str(stopped.value)
    assert "x.png: no caption" in str(stopped.value) and "x.png: is truncated" in str(stopped.value)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


ROW = b'{"file_name": "x.png", "text": "a thing"}\n'
CAPTIONS = {
    "none": (
        {},
        "x.png: no caption: no x.txt beside it; write one, or missing_captions=drop, filename or trigger",
    ),
    "blank": ({"x.txt": b" \n\n"}, "x.png: its caption in x.txt is empty; write one"),
    "blank in a table": (
        {"metadata.jsonl": b'{"file_name": "x.png", "text": null}'},
        "x.png: its caption in metadata.jsonl:1 is empty",
    ),
    "not utf-8": (
        {"x.txt": b"caf\xe9"},
        "x.png: its caption x.txt is not UTF-8: byte 0xe9 at 3; save it as UTF-8",
    ),
    "one for two": (
        {"x.txt": b"a thing", "x.jpg": b""},
        "x.jpg: x.txt would be the caption of x.png too; rename one, with a caption of its own",
    ),
    "two for one": (
        {"x.txt": b"a thing", "captions.csv": b"file,caption\nx.png,another\n"},
        "x.png: has two captions, in captions.csv:2 and in x.txt; keep one",
    ),
    "twice": (
        {"metadata.jsonl": ROW + ROW},
        "metadata.jsonl:2: x.png has a caption already, in metadata.jsonl:1; keep one",
    ),
    "no such image": (
        {"metadata.jsonl": ROW + ROW.replace(b"x.", b"y.")},
        "metadata.jsonl:2: there is no image y.png; correct the name, or remove the row",
    ),
    "outside": (
        {"metadata.jsonl": ROW + ROW.replace(b"x.", b"../x.")},
        "metadata.jsonl:2: there is no image ../x.png",
    ),
    "no column": (
        {"metadata.csv": b"file_name,label\nx.png,3\n"},
        "metadata.csv:2: no column text or caption; it has: file_name, label",
    ),
    "number": (
        {"metadata.jsonl": b'{"file_name": "x.png", "text": 3}'},
        "metadata.jsonl:1: file_name and text must be strings",
    ),
    "not json": ({"metadata.jsonl": ROW + b"{"}, "metadata.jsonl:2: not JSON"),
}


@pytest.mark.parametrize("name", CAPTIONS)
def test_a_bad_caption_is_named_with_what_to_do(prepare: Prepare, images: Path, name: str) -> None:
    files, message = CAPTIONS[name]
    write(images, {"x.png": PNG, **files})
    with pytest.raises(SystemExit) as stopped:
        prepare(images)
    assert message in str(stopped.value)


@pytest.mark.parametrize(
    ("policy", "caption"), [("drop", None), ("filename", "a red kite"), ("trigger", "zwx")]
)
def test_an_image_without_a_caption_is_treated_as_asked(
    prepare: Prepare, images: Path, policy: str, caption: str | None
) -> None:
    (images / "a_red-kite.png").write_bytes(PNG)
    rows = prepare(
        images, "--missing-captions", policy, *(["--trigger", "zwx"] if policy == "trigger" else [])
    )
    assert rows.get("a_red-kite.png", {}).get("caption") == caption
    assert len(rows) == 4 - (caption is None)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("metadata.jsonl", '{"file_name": "x.png", "text": "a thing"}\n'),
        ("captions.jsonl", '\ufeff{"image": "x.png", "caption": "a  thing\\n"}\n'),
        ("metadata.csv", "text,file_name\na thing,x.png\n"),
        ("captions.tsv", "file\tcaption\nx.png\ta thing\n"),
        ("x.txt", "a\r\nthing"),
        ("x.txt", "\ufeffa thing"),
    ],
)
@pytest.mark.parametrize("folder", ["", "below/it/"])
def test_a_caption_is_read_wherever_it_may_stand(
    prepare: Prepare, tmp_path: Path, table: str, text: str, folder: str
) -> None:
    write(tmp_path / "data", {f"{folder}x.png": PNG, f"{folder}{table}": text.encode()})
    assert prepare(tmp_path / "data")[f"{folder}x.png"]["caption"] == "a thing"


def test_images_inside_parquet_are_read_as_if_they_were_files(
    prepare: Prepare, tmp_path: Path
) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = [
        {"image": {"bytes": encoded(picture(number), form), "path": None}, "text": f"row {number}"}
        for number, form in enumerate(("PNG", "JPEG"))
    ]
    (tmp_path / "data" / "data").mkdir(parents=True)
    parquet.write_table(
        arrow.Table.from_pylist(rows), tmp_path / "data" / "data" / "train-0.parquet"
    )
    made = prepare(tmp_path / "data")
    assert {name: row["caption"] for name, row in made.items()} == {
        "data/train-0.parquet/000000.png": "row 0",
        "data/train-0.parquet/000001.jpg": "row 1",
    }
    broken = arrow.Table.from_pylist(
        [
            *rows,
            {"image": {"bytes": PNG[:900], "path": None}, "text": None},
            {"image": None, "text": "x"},
        ]
    )
    parquet.write_table(broken, tmp_path / "data" / "data" / "train-0.parquet")
    with pytest.raises(SystemExit) as stopped:
        prepare(tmp_path / "data")
    assert "data/train-0.parquet/000002.png: no caption" in str(
        stopped.value
    ) or "000002.png: is truncated" in str(stopped.value)
    assert "data/train-0.parquet/000003.png: an empty file" in str(stopped.value)


def test_the_data_sets_that_ship_are_clean(
    prepare: Prepare, report: Callable[[], dict[str, Any]]
) -> None:
    photos = prepare(PHOTOS, "--duplicates", "error", "--min-size", 144, resolution=128)
    assert (
        len(photos) == 10 and photos["chelsea.jpg"]["caption"] == "the face of a tabby cat, close"
    )
    assert (photos["chelsea.jpg"]["width"], photos["chelsea.jpg"]["height"]) == (160, 96)
    assert report()["warnings"] == [] and report()["other_files"] == []
    emoji = prepare(EMOJI, "--duplicates", "error", "--min-size", 64)
    assert len(emoji) == 48 and emoji["cat-face.png"]["caption"] == "cat face"
    assert report()["done"] == {"flattened: had transparency": 48} and report()["warnings"] == []


def test_the_same_data_gives_the_same_bytes_however_it_is_listed(
    prepare: Prepare, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for number, file in enumerate(sorted(PHOTOS.iterdir(), reverse=True)):
        shutil.copyfile(file, again / file.name)
        os.utime(again / file.name, (number, number))
    prepare(PHOTOS, "--workers", 1, "--eval-fraction", 0.2, resolution=128)
    prepare(again, "--workers", 5, "--eval-fraction", 0.2, resolution=128, out="other")
    assert tree(tmp_path / "out") == tree(tmp_path / "other")


def test_transparency_is_laid_on_the_colour_that_was_asked_for(
    prepare: Prepare, tmp_path: Path
) -> None:
    clear = Image.new("RGBA", (64, 64), (200, 0, 0, 255))
    clear.paste((0, 0, 0, 0), (0, 0, 32, 64))
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 255, 0, 255, 0] + [0] * 762)
    palette.paste(0, (32, 0, 64, 64))
    write(
        tmp_path / "data",
        {
            "x.png": encoded(clear, "PNG"),
            "p.png": encoded(palette, "PNG", transparency=1),
            "x.txt": b"x",
            "p.txt": b"p",
        },
    )
    rows = prepare(tmp_path / "data", "--alpha-background", "#0a141e")
    for name, right in (("x.png", (200, 0, 0)), ("p.png", (0, 0, 255))):
        image = prepared(tmp_path, rows[name])
        assert image.mode == "RGB"
        assert (image.getpixel((4, 4)), image.getpixel((60, 60))) == ((10, 20, 30), right)
    with pytest.raises(
        SystemExit,
        match='alpha_background "whitish" is no colour; write a name as white, or #rrggbb',
    ):
        prepare(tmp_path / "data", "--alpha-background", "whitish")


@pytest.mark.parametrize("ending", ["TXT", "Txt", "caption"])
def test_captions_with_other_endings_are_read(
    ending: str, prepare: Prepare, tmp_path: Path
) -> None:
    image = Image.new("RGB", (64, 64), (1, 2, 3))
    write(tmp_path / "data", {"x.png": encoded(image, "PNG"), f"x.{ending}": b"a teapot"})
    assert (
        prepare(tmp_path / "data", "--missing-captions", "filename")["x.png"]["caption"]
        == "a teapot"
    )
    write(tmp_path / "data", {"x.txt": b"a kettle"})
    with pytest.raises(SystemExit, match=r"x\.png: has two captions beside it"):
        prepare(tmp_path / "data")


def test_what_is_left_out_and_what_shows_nothing_are_named(
    prepare: Prepare, report: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    clear = Image.new("RGBA", (64, 64), (1, 2, 3, 0))
    write(
        tmp_path / "data",
        {"x.png": encoded(clear, "PNG"), "x.txt": b"x", "e.png": b"", "e.txt": b"e"},
    )
    prepare(tmp_path / "data", "--max-bad-images", 1)
    one, other = report()["warnings"]
    assert one.startswith("x.png: wholly transparent")
    assert other == "1 bad images left out: e.png: an empty file; remove it, or get it again"


def test_a_picture_is_turned_as_its_camera_was(
    prepare: Prepare, report: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    lying = Image.new("RGB", (120, 60), "white")
    lying.paste((0, 0, 0), (0, 0, 60, 60))
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the scene is at the right
    write(tmp_path / "data", {"x.jpg": encoded(lying, "JPEG", exif=exif), "x.txt": b"x"})
    row = prepare(tmp_path / "data")["x.jpg"]
    assert row["height"] > row["width"]
    image = prepared(tmp_path, row)
    assert numpy.asarray(image)[:20].mean() < 20 and numpy.asarray(image)[-20:].mean() > 235
    assert report()["done"]["turned as their EXIF says"] == 1


def test_sixteen_bits_and_other_colours_come_out_as_they_look(
    prepare: Prepare, tmp_path: Path
) -> None:
    deep = Image.fromarray(numpy.full((64, 64), 40_000, dtype=numpy.uint16))
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = Image.new("RGB", (64, 64), (10, 200, 30))
    write(tmp_path / "data", {
        "deep.png": encoded(deep, "PNG"), "deep.txt": b"deep",
        "profile.png": encoded(plain, "PNG", icc_profile=lab), "profile.txt": b"profile",
        "garbage.png": encoded(plain.rotate(90), "PNG", icc_profile=b"no profile"), "garbage.txt": b"garbage",
        "print.jpg": encoded(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "JPEG", quality=95), "print.txt": b"print",
    })  # fmt: skip
    rows = prepare(tmp_path / "data")
    assert prepared(tmp_path, rows["deep.png"]).getpixel((9, 9)) == (156, 156, 156)
    assert prepared(tmp_path, rows["profile.png"]).getpixel((9, 9)) == (10, 200, 30)
    assert prepared(tmp_path, rows["garbage.png"]).getpixel((9, 9)) == (10, 200, 30)
    red, green, blue = prepared(tmp_path, rows["print.jpg"]).getpixel((9, 9))  # type: ignore[misc]
    assert red > 200 > 60 > max(green, blue)


def test_duplicates_are_found_whatever_was_done_to_them(
    prepare: Prepare, images: Path, report: Callable[[], dict[str, Any]]
) -> None:
    shutil.copyfile(images / "ant.png", images / "copy.png")
    (images / "saved.jpg").write_bytes(encoded(picture(1), "JPEG", quality=70))
    (images / "large.png").write_bytes(encoded(picture(2, (240, 240)), "PNG"))
    for name in ("copy", "saved", "large"):
        (images / f"{name}.txt").write_text(name)
    with pytest.raises(SystemExit) as stopped:
        prepare(images, "--duplicates", "error")
    assert "copy.png: the same file as ant.png; remove one, or duplicates=drop or warn" in str(
        stopped.value
    )
    assert "saved.jpg: looks the same as bee.png" in str(stopped.value)
    assert "cow.png: looks the same as large.png" in str(stopped.value), (
        "the one with more pixels is the one to keep"
    )
    assert set(prepare(images, "--duplicates", "drop")) == {"ant.png", "bee.png", "large.png"}
    assert report()["left_out"] == {"duplicates": 3}
    assert len(prepare(images, "--duplicates", "warn")) == 6
    assert "copy.png: the same file as ant.png; it counts twice in training" in report()["warnings"]


def test_what_differs_in_colour_or_shape_is_no_duplicate(prepare: Prepare, tmp_path: Path) -> None:
    heart = numpy.asarray(picture(3).convert("L"))
    red, blue = numpy.zeros((2, 96, 96, 3), dtype=numpy.uint8)
    red[..., 0] = blue[..., 2] = heart
    write(tmp_path / "data", {
        "red.png": encoded(Image.fromarray(red), "PNG"), "blue.png": encoded(Image.fromarray(blue), "PNG"),
        "black.png": encoded(Image.new("RGB", (96, 96), "black"), "PNG"), "white.png": encoded(Image.new("RGB", (96, 96), "white"), "PNG"),
        "mirror.png": encoded(Image.fromarray(red[:, ::-1].copy()), "PNG"),
        **{f"{name}.txt": name.encode() for name in ("red", "blue", "black", "white", "mirror")},
    })  # fmt: skip
    assert len(prepare(tmp_path / "data", "--duplicates", "error")) == 5


@pytest.mark.parametrize("seed", range(6))
def test_what_looks_alike_is_never_on_both_sides(
    prepare: Prepare, tmp_path: Path, seed: int
) -> None:
    files: dict[str, bytes] = {}
    for number in range(8):
        for copy, quality in enumerate((95, 60)):
            files |= {
                f"{number}-{copy}.jpg": encoded(picture(number), "JPEG", quality=quality),
                f"{number}-{copy}.txt": b"x",
            }
    write(tmp_path / "data", files)
    rows = prepare(tmp_path / "data", "--eval-fraction", 0.3, "--seed", seed)
    sides = [{rows[f"{number}-{copy}.jpg"]["held_out"] for copy in (0, 1)} for number in range(8)]
    assert all(len(side) == 1 for side in sides)
    assert {True, False} == set().union(*sides)


def test_more_images_move_none_across(prepare: Prepare, tmp_path: Path) -> None:
    files = {
        f"{number:02}.{kind}": encoded(picture(number), "PNG") if kind == "png" else b"x"
        for number in range(24)
        for kind in ("png", "txt")
    }
    write(tmp_path / "data", dict(list(files.items())[:24]))
    before = prepare(tmp_path / "data", "--eval-fraction", 0.3)
    write(tmp_path / "data", files)
    after = prepare(tmp_path / "data", "--eval-fraction", 0.3)
    assert any(row["held_out"] for row in before.values()) and len(after) == 24
    assert all(after[name]["held_out"] == row["held_out"] for name, row in before.items())


def test_the_trigger_is_put_in_front_unless_it_is_there(prepare: Prepare, images: Path) -> None:
    (images / "ant.txt").write_text("Zwx the ant")
    (images / "bee.txt").write_text("zwxes are no trigger")
    captions = [row["caption"] for row in prepare(images, "--trigger", "zwx").values()]
    assert captions == ["Zwx the ant", "zwx, zwxes are no trigger", "zwx, a picture of the cow"]


def test_what_is_no_image_is_reported_and_harmless(
    prepare: Prepare, images: Path, report: Callable[[], dict[str, Any]]
) -> None:
    write(
        images,
        {
            "notes.doc": b"x",
            ".DS_Store": b"x",
            "._ant.png": b"x",
            "__MACOSX/ant.png": b"x",
            "dog.txt": b"a dog",
            "README.txt": b"x",
        },
    )
    (images / "wide.png").write_bytes(encoded(picture(9, (600, 60)), "PNG"))
    (images / "wide.txt").write_text("a wide thing")
    assert len(prepare(images)) == 4
    assert report()["other_files"] == ["notes.doc"]
    assert report()["warnings"] == [
        "dog.txt: a caption without its image",
        "wide.png: 600×60 loses 60% to the crop; cut it yourself to what matters",
    ]


@pytest.mark.parametrize(
    ("suffix", "form"), [("jfif", "JPEG"), ("jpe", "JPEG"), ("jp2", "JPEG2000")]
)
def test_an_image_is_read_by_every_name_that_its_form_has(
    suffix: str, form: str, prepare: Prepare, images: Path, report: Callable[[], dict[str, Any]]
) -> None:
    write(images, {f"x.{suffix}": encoded(picture(7), form), "x.txt": b"x"})
    assert len(prepare(images)) == 4
    assert report()["done"] == {} and report()["warnings"] == []


@pytest.mark.parametrize("table", [False, True])
def test_names_that_differ_in_how_unicode_writes_them_are_one_name(
    table: bool, prepare: Prepare, tmp_path: Path
) -> None:
    """macOS writes é as e and an accent; a table, or a text written elsewhere, as one character."""
    composed, apart = "caf\u00e9", "cafe\u0301"
    caption = (
        {"metadata.csv": f"file_name,text\n{composed}.png,a cup\n".encode()}
        if table
        else {f"{composed}.txt": b"a cup"}
    )
    files = {f"{apart}.png": encoded(picture(1), "PNG")}
    mask = {f"{composed}-masklabel.png": encoded(Image.new("L", (96, 96), 255), "PNG")}
    write(tmp_path / "data", files | mask | caption)
    ((source, row),) = prepare(tmp_path / "data", "--masks", "files").items()
    assert row["caption"] == "a cup" and source == f"{apart}.png"


def test_what_a_step_warns_of_reaches_the_runner(
    prepare: Prepare, images: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RECIPE_METRICS", str(tmp_path / "metrics"))
    write(images, {"dog.txt": b"a dog"})
    prepare(images)
    told = json.loads((tmp_path / "metrics").read_text())
    assert told == {"warning": "dog.txt: a caption without its image"}


def test_a_small_image_is_enlarged_and_said_so(
    prepare: Prepare, images: Path, report: Callable[[], dict[str, Any]]
) -> None:
    prepare(images, resolution=128)
    assert report()["done"] == {"enlarged": 3}
    assert (
        "ant.png: 96×96 is enlarged to 128×128; a larger original, or a lower resolution, is sharper"
        in report()["warnings"]
    )


def test_the_manifest_has_the_size_before_and_where_the_crop_begins(
    prepare: Prepare, tmp_path: Path
) -> None:
    """As `original_size` and `crop_top_left` are in diffusers' training of SDXL: the corner is counted in pixels of the resized image."""
    folder = tmp_path / "images"
    folder.mkdir()
    wide = picture(1, (240, 128))
    for name, image in {
        "small": picture(0, (40, 40)),
        "wide": wide,
        "tall": picture(2, (128, 240)),
        "exact": picture(3, (64, 64)),
    }.items():
        image.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(name)
    rows = prepare(folder)
    found = {
        name.removesuffix(".png"): (row["original"], row["corner"], row["width"], row["height"])
        for name, row in rows.items()
    }
    assert found == {
        "small": ([40, 40], [0, 0], 64, 64),
        "wide": ([240, 128], [5, 0], 80, 48),
        "tall": ([128, 240], [0, 5], 48, 80),
        "exact": ([64, 64], [0, 0], 64, 64),
    }
    learned = numpy.asarray(prepared(tmp_path, rows["wide.png"]), dtype=int)
    same = numpy.asarray(
        wide.resize((90, 48), Image.Resampling.LANCZOS).crop((5, 0, 85, 48)), dtype=int
    )
    assert numpy.abs(learned - same).mean() < 1  # a corner that is off by one pixel differs by 10


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no image in this folder: none of 0 files"),
        ({"x.txt": b"x"}, "none of 1 files ends in .png .jpg"),
        (None, "no such folder"),
    ],
)
def test_a_folder_without_images_is_no_data_set(
    prepare: Prepare, tmp_path: Path, files: dict[str, bytes] | None, message: str
) -> None:
    if files is not None:
        (tmp_path / "data").mkdir()
        write(tmp_path / "data", files)
    with pytest.raises(SystemExit, match=message):
        prepare(tmp_path / "data")


def test_what_is_left_of_an_earlier_try_is_taken_away(
    prepare: Prepare, images: Path, tmp_path: Path
) -> None:
    prepare(images)
    (images / "ant.png").unlink()
    rows = prepare(images)
    assert {path.name for path in (tmp_path / "out" / "images").iterdir()} == {
        Path(row["file"]).name for row in rows.values()
    }


@given(
    width=st.integers(32, 8000),
    height=st.integers(32, 8000),
    resolution=st.sampled_from([256, 512, 768, 1024]),
    step=st.sampled_from([16, 32, 64]),
)
def test_a_bucket_keeps_the_shape_and_the_size(
    width: int, height: int, resolution: int, step: int
) -> None:
    sys.path.insert(0, str(ROOT / "recipes" / "trainers"))
    try:
        from image_data import buckets, nearest
    finally:
        sys.path.remove(str(ROOT / "recipes" / "trainers"))
    table = buckets(resolution, step)
    bucket = nearest((width, height), table)
    assert bucket in table and all(side % step == 0 for side in bucket)
    assert bucket[0] * bucket[1] <= resolution**2
    assert nearest((height, width), table) == bucket[::-1]
    wanted, got = width / height, bucket[0] / bucket[1]
    kept = min(wanted / got, got / wanted)
    assert all(
        kept >= min(wanted / other, other / wanted) - 1e-9
        for other in (side[0] / side[1] for side in table)
    )
    # Two neighbours differ by a step on one side; half of that, and the rounding of the other side, is what a crop may take.
    if 1 / 4 <= wanted <= 4:
        assert kept >= 1 - 1.25 * step / (resolution / 2)


def test_the_sheet_shows_every_image(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(EMOJI, "--eval-fraction", 0.1)
    import image_sheet  # type: ignore[import-not-found]

    monkeypatch.setattr(
        sys,
        "argv",
        ["image_sheet.py", "--data", str(tmp_path / "out"), "--out", str(tmp_path / "sheet.png")],
    )
    image_sheet.main()
    sheet = numpy.asarray(Image.open(tmp_path / "sheet.png"))
    held_out = sum(
        json.loads(line)["held_out"]
        for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()
    )
    framed = (sheet == (0xC0, 0x50, 0x4D)).all(axis=2)
    drawn = sum(
        bool((sheet[top + 8 : top + 168, left + 8 : left + 168] < 250).any())
        for top in range(0, 6 * 210, 210)
        for left in range(0, 8 * 168, 168)
    )
    frames = sum(
        framed[top + 6, left + 6 : left + 170].all()
        for top in range(0, 6 * 210, 210)
        for left in range(0, 8 * 168, 168)
    )
    assert (drawn, frames) == (48, held_out) and held_out >= 1
    assert framed[6 * 210 + 8 :, 8:300].any()  # what a frame means
