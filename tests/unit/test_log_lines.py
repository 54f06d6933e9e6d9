"""Lines of a log by number: parts of it, what contains a text, and lines that a progress bar wrote over."""

from __future__ import annotations

from runner.api.log_lines import HELD, LONGEST, page_of


def texts(*pieces: bytes, find: str = "", first: int = 0, limit: int = 100) -> list[str]:
    return [line.text for line in page_of(pieces, find=find, first=first, limit=limit).lines]


def test_the_last_lines_come_by_default_and_others_by_number() -> None:
    log = b"".join(b"%d\n" % n for n in range(1, 11))
    page = page_of([log[:7], log[7:]], limit=3)
    assert [(line.number, line.text) for line in page.lines] == [(8, "8"), (9, "9"), (10, "10")]
    assert (page.total, page.matches, page.size, page.is_open) == (10, 10, len(log), False)
    assert texts(log, first=4, limit=2) == ["4", "5"]
    assert texts(log, first=11) == [] == texts(b"")


def test_a_text_is_found_in_any_case_between_colours_in_the_whole_log() -> None:
    log = b"one\nan \x1b[31mErr\x1b[0mor\ntwo\nERROR\n"
    page = page_of([log], find="error", first=1, limit=1)
    assert [line.number for line in page.lines] == [2] and (page.matches, page.total) == (2, 4)
    assert texts(log, find="error", first=3) == ["ERROR"]
    assert texts("STRASSE\nstraße\n".encode(), find="straße", first=1) == ["STRASSE", "straße"]


def test_what_was_written_over_is_not_in_a_line() -> None:
    assert texts(b"10%\r100%\r\nend") == ["100%", "end"]
    assert texts(b"10%\r100%\n", find="10%") == []


def test_a_line_without_an_end_is_open_and_read_again() -> None:
    page = page_of([b"one\ntw", b"o"], limit=5)
    assert page.is_open and page.size == 4 and page.total == 2


def test_a_line_of_megabytes_is_cut_and_a_bar_of_megabytes_shows_its_end() -> None:
    (long,) = page_of([b"x" * HELD * 3, b"y\n"], limit=5).lines
    assert long.cut and len(long.text) == LONGEST
    bar = [b"\r%d%% done" % (n % 100) for n in range(40_000)]
    assert texts(*bar, b"\r100%\n", b"next\n") == ["100%", "next"]
