"""Secrets, and masking of their encoded forms in text.

A text is searched without its line ends, so that wrapped secrets are found, such as base64 in 76
columns or multi-line keys. Each match, including its line ends, becomes `***`.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, quote_plus

SHORTEST: Final = 6
"""Minimum characters of a secret. Masking shorter values would damage ordinary text."""

STARS: Final = b"***"
_NAMES: Final = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS")
_TOKENS: Final = (
    "hf_",
    "sk-",
    "ghp_",
    "gho_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "AKIA",
    "eyJ",
    "-----BEGIN ",
)
"""Prefixes of well-known tokens. Tokens have at least 16 characters."""
_LINE_END: Final = re.compile(rb"[\r\n]")


class Secret:
    """A value that is never shown in text forms.

    Invalid UTF-8 is represented as in `os.environ`.
    """

    __slots__ = ("name", "reveal")

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self.reveal = value

    def __repr__(self) -> str:
        return f"Secret({self.name}=***)"

    __str__ = __repr__


def describe_unusable(variable: str, value: str | None, *, required: bool) -> str:
    """Describe the problem of a secret's environment variable, to follow the secret's name; empty
    if it is valid.
    """
    if value and len(value) < SHORTEST:
        return f"is too short: {variable} has {len(value)} characters, but masking in logs requires at least {SHORTEST}"
    if value or not required:
        return ""
    return "is not set" if value is None else f"is empty: {variable} is set, but to an empty text"


def is_tokenlike(name: str, value: str) -> bool:
    """Return True if a variable looks like a secret, by its name or by a well-known token prefix."""
    named = len(value) >= SHORTEST and any(
        part.endswith(_NAMES) for part in name.upper().split("_")
    )
    return named or (len(value) >= 16 and value.startswith(_TOKENS))


def find_passwords(variables: Mapping[str, str]) -> list[Secret]:
    """Return the passwords in URLs such as `http://user:password@proxy`."""
    passwords = []
    for name, value in variables.items():
        user = value.partition("://")[2].partition("/")[0].rpartition("@")[0]
        password = user.partition(":")[2]
        if len(password) >= SHORTEST:
            passwords.append(Secret(name, password))
    return passwords


class Masker:
    """Masks secrets in bytes and values: `mask` for a whole text, `stream` for a text in pieces.

    False without secrets.
    """

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        self._known: set[tuple[bytes, bytes]] = set()
        self.learn(secrets)

    def learn(self, secrets: Iterable[Secret]) -> None:
        """Add secrets to mask from now on."""
        for secret in secrets:
            self._known.update(_forms(secret.reveal))
        self._forms: dict[bytes, list[bytes]] = {}  # by prefix, the longest first
        # Prefixes, by a word that a text must contain for any of them.
        self._heads: dict[bytes, dict[bytes, None]] = {}
        for word, form in sorted(self._known, key=lambda pair: (-len(pair[1]), pair)):
            self._forms.setdefault(form[:SHORTEST], []).append(form)
            self._heads.setdefault(word, {})[form[:SHORTEST]] = None
        begun: set[bytes] = set()
        for head in self._forms:
            begun.update(head[:length] for length in range(1, SHORTEST))
        self._begun = begun
        self._longest = max((len(forms[0]) for forms in self._forms.values()), default=0)
        self.margin = 2 * self._longest
        """Extra bytes to inspect before a cut, so that no part of a divided secret is shown: a form
        and its line ends.
        """

    def __bool__(self) -> bool:
        return bool(self._forms)

    def stream(self) -> StreamMasker:
        """Return a masking stream for one text in pieces."""
        return StreamMasker(self)

    def mask(self, data: bytes) -> bytes:
        """Mask a whole text."""
        stream = self.stream()
        return stream.feed(data) + stream.end()

    def text(self, text: str) -> str:
        """Mask a text."""
        if not self._forms:
            return text
        try:
            return self.mask(text.encode("utf-8", "surrogateescape")).decode(
                "utf-8", "surrogateescape"
            )
        except UnicodeError:  # a lone surrogate, as allowed in JSON
            return self.mask(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def value(self, value: Any) -> Any:
        """Mask all texts in a JSON value, including names.

        A number that shows a secret becomes text.
        """
        if not self._forms or value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (int, float)):
            return self._mask_number(value)
        if isinstance(value, Mapping):
            return {self.value(name): self.value(inner) for name, inner in value.items()}
        return [self.value(inner) for inner in value]

    def _mask_number(self, value: float) -> float | str:
        text = str(value)
        masked = self.text(text)
        return value if masked == text else masked

    def find_spans(self, flat: bytes) -> list[tuple[int, int]]:
        """Return the spans of secrets in a text without line ends, with overlaps merged."""
        heads: set[bytes] = set()
        for word, heads_with_word in self._heads.items():
            if word in flat:
                heads.update(heads_with_word)
        spans = []
        for head in heads:
            at = flat.find(head)
            while at >= 0:
                form = next((form for form in self._forms[head] if flat.startswith(form, at)), b"")
                if form:
                    spans.append((at, at + len(form)))
                at = flat.find(head, at + 1)
        return _merge_spans(spans)

    def find_begun(self, flat: bytes) -> int:
        """Return the position from which the last part of a text may be the start of a secret."""
        first = len(flat)
        for at in range(max(0, len(flat) - SHORTEST + 1), len(flat)):
            if flat[at:] in self._begun:
                first = at
                break
        for head, forms in self._forms.items():
            at = flat.find(head, max(0, len(flat) - self._longest + 1))
            while -1 < at < first:
                if any(len(form) > len(flat) - at and form.startswith(flat[at:]) for form in forms):
                    first = at
                at = flat.find(head, at + 1)
        return first


class StreamMasker:
    """Masks one text piece by piece, holding back a possible start of a secret until the next
    piece.
    """

    __slots__ = ("_covered", "_masker", "held")

    def __init__(self, masker: Masker) -> None:
        self._masker = masker
        self.held = b""
        # Bytes of the held text (without line ends) that belong to a secret already shown as stars.
        self._covered = 0

    def feed(self, piece: bytes) -> bytes:
        """Return the next text that is safe to show."""
        return self._next(piece, last=False) if self._masker else piece

    def end(self) -> bytes:
        """Return the rest of the text."""
        return self._next(b"", last=True) if self.held else b""

    def _next(self, piece: bytes, *, last: bool) -> bytes:
        data = self.held + piece
        flat = _remove_line_ends(data)
        to_position = _map_positions(data, flat)
        spans = self._masker.find_spans(flat)
        if self._covered:
            spans = _merge_spans([(0, self._covered), *spans])
        cut = len(flat) if last else self._masker.find_begun(flat)
        shown, done = [], 0
        for start, end in spans:
            if start >= cut:
                break
            shown.append(data[done : to_position(start)])
            if start or not self._covered:
                shown.append(STARS)
            done = to_position(end - 1) + 1
        stop = len(data) if cut == len(flat) else to_position(cut)
        shown.append(data[done:stop])
        last_end = max((end for start, end in spans if start < cut), default=self._covered)
        self._covered = max(0, last_end - cut)
        self.held = data[stop:]
        return b"".join(shown)


def _remove_line_ends(data: bytes) -> bytes:
    return data.replace(b"\n", b"").replace(b"\r", b"")


def _merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _map_positions(data: bytes, flat: bytes) -> Callable[[int], int]:
    """Return a function that maps positions in the text without line ends to positions in the text."""
    before: list[int] = []

    def to_position(at: int) -> int:
        if not before:  # computed only if needed
            before.extend(end.start() - n for n, end in enumerate(_LINE_END.finditer(data)))
        return at + bisect.bisect_right(before, at)

    return int if len(data) == len(flat) else to_position


# -- the forms of a secret


def _forms(value: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield all forms of a value and of its lines, without line ends, each with a word that it
    contains.
    """
    raw = _encode(value)
    texts = {value: 2, raw.decode("utf-8", "replace"): 2}
    for line in value.splitlines():
        if line.strip() != value:
            texts[line.strip()] = 1
    for text, times in texts.items():
        # All escaped forms of a text contain its longest word. Without that word, none needs to be
        # searched.
        word = max(re.findall(r"[A-Za-z0-9]+", text), key=len, default="").encode()
        for escaped in escaped_forms(text, times):
            form = _remove_line_ends(_encode(escaped))
            if len(form) >= SHORTEST:
                yield word, form
    for encoded in encoded_forms(raw):
        if len(encoded) >= SHORTEST:
            yield encoded, encoded


def escaped_forms(text: str, times: int) -> set[str]:
    """Return a text and all its escaped forms, with up to `times` nested escapes."""
    found = newest = {text}
    for _ in range(times):
        escaped: set[str] = set()
        for form in newest:
            for escape in ESCAPES.values():
                escaped.update(escape(form))
        newest = escaped - found
        found = found | newest
    return found


def encoded_forms(raw: bytes) -> set[bytes]:
    """Return the encoded forms of bytes that hide the original bytes."""
    forms: set[bytes] = set()
    for encode in ENCODINGS.values():
        forms.update(encode(raw))
    return forms


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _url(text: str) -> Iterator[str]:
    # For a value, for a path, for parts and whole URLs in JavaScript, and for a form.
    for safe in ("", "/", "!*'()", "!*'();/?:@&=+$,#"):
        yield from _both_cases(quote(text, safe=safe, errors="surrogateescape"), r"%[0-9A-F]{2}")
    yield from _both_cases(quote_plus(text, errors="surrogateescape"), r"%[0-9A-F]{2}")


def _json(text: str) -> Iterator[str]:
    for ascii_only in (True, False):
        for form in _both_cases(
            json.dumps(text, ensure_ascii=ascii_only)[1:-1], r"(?<=\\u)[0-9a-f]{4}"
        ):
            yield form
            yield form.replace("/", "\\/")
            yield form.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})


def _python(text: str) -> Iterator[str]:
    for form in (repr(text)[1:-1], ascii(text)[1:-1], repr(_encode(text))[2:-1]):
        plain = form.replace("\\'", "'")  # the surrounding text decides which quotes are escaped
        yield from (form, plain, plain.replace("'", "\\'"))


def _shell(text: str) -> Iterator[str]:
    yield text.replace("'", "'\\''")
    yield text.replace("'", "'\"'\"'")
    yield re.sub(r"([^\w@%+=:,./-])", r"\\\1", text)
    yield re.sub(r"([^\w@%+=:,./-])", r"\\\1", text, flags=re.ASCII)
    yield re.sub(r'(["$`\\])', r"\\\1", text)
    quoted = text.translate(_ANSI_C)
    yield quoted
    yield "".join(map(_octal, quoted))


_ANSI_C: Final = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"})
"""Escapes of the shell inside $'…'."""


def _octal(char: str) -> str:
    if char.isascii():
        return char
    return "".join(f"\\{byte:03o}" for byte in _encode(char))


def _html(text: str) -> Iterator[str]:
    form = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for double, single in (
        ('"', "'"),
        ("&quot;", "'"),
        ("&quot;", "&#x27;"),
        ("&quot;", "&#39;"),
        ("&#34;", "&#39;"),
        ("&quot;", "&apos;"),
    ):
        quoted = form.replace('"', double).replace("'", single)
        yield quoted
        yield quoted.encode("ascii", "xmlcharrefreplace").decode()


def _hex(raw: bytes) -> Iterator[bytes]:
    yield raw.hex().encode()
    yield raw.hex().upper().encode()


def _base64(raw: bytes) -> Iterator[bytes]:
    """Inside a longer base64 text, a value starts at one of three offsets.

    Only characters that depend on the value alone are searched.
    """
    import base64

    for pad in range(3):
        text = base64.b64encode(bytes(pad) + raw).rstrip(b"=")
        middle = text[(pad * 8 + 5) // 6 : len(text) - (1 if (pad + len(raw)) % 3 else 0)]
        for plus, slash in (
            (b"+", b"/"),
            (b"-", b"_"),
            (b"%2B", b"%2F"),
            (b"%2b", b"%2f"),
            (b"+", b"\\/"),
        ):
            yield middle.replace(b"+", plus).replace(b"/", slash)


def _both_cases(text: str, digits: str) -> tuple[str, str, str]:
    """Return a text, and the text with all matches of `digits` in lower and in upper case."""
    lower = re.sub(digits, lambda found: found[0].lower(), text)
    upper = re.sub(digits, lambda found: found[0].upper(), text)
    return text, lower, upper


ESCAPES: Final[Mapping[str, Callable[[str], Iterator[str]]]] = {
    "url": _url,
    "json": _json,
    "python": _python,
    "shell": _shell,
    "html": _html,
}
"""Escaping rules. ASCII letters and digits stay unchanged in all of them."""
ENCODINGS: Final[Mapping[str, Callable[[bytes], Iterator[bytes]]]] = {
    "hex": _hex,
    "base64": _base64,
}
"""Encodings of bytes."""
