"""What a base model's folder says about text: tokenizer, chat template, and the token at which an answer ends.  Does not know rows or weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rows import BadData, kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASKED, ANSWERED = "the question", "the answer"
SHOWN = 8  # tokens that a complaint names


class End(NamedTuple):
    """The token that a model writes when it has no more to say."""

    text: str
    number: int


class Vocabulary:
    """Raises BadData where the folder lacks what text needs, and where `eos_token` is not one token of its vocabulary."""

    def __init__(self, base: Path, chat_template: Path | None = None, eos_token: str | None = None) -> None:
        config = _json(base / "config.json", "a transformers model folder has one")
        settings = _json(base / "tokenizer_config.json") if (base / "tokenizer_config.json").exists() else {}
        self.size = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
        self.positions = int(config.get("max_position_embeddings") or 0)
        self.tokenizer = _tokenizer(base)
        self.given = eos_token is not None
        self.end = self._given(eos_token) if eos_token is not None else self._own_end(config, settings)
        beside = base / "chat_template.jinja"
        written = chat_template or (beside if beside.exists() else None)
        self.chat_template: str | None = written.read_text() if written else settings.get("chat_template")
        self.special = {name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _token_text(settings.get(name)))}
        if eos_token is not None:
            self.special["eos_token"] = eos_token

    def end_of(self, *, chat: bool) -> End:
        """The token at which a trained model stops: what was given, in conversations the one that ends an answer there, else the tokenizer's own."""
        return (not self.given and chat and self.turn_end) or self.end

    @cached_property
    def turn_end(self) -> End | None:
        """The first added token that the chat template writes behind an answer; None where it writes none, or takes no such conversation."""
        if not self.chat_template:
            return None
        try:
            text = self.render([{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}], "a question and its answer")
        except BadData:
            return None
        _, answered, rest = text.rpartition(ANSWERED)
        added = self.tokenizer.get_added_tokens_decoder()
        behind = self.tokenizer.encode(rest, add_special_tokens=False).ids if answered else []
        return next((End(str(self.tokenizer.id_to_token(token)), token) for token in behind if token in added), None)

    def render(self, messages: Sequence[Mapping[str, object]], where: str, *, answer: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Messages as the chat template writes them, with the beginning of an `answer` where that is asked, and the tools.  Raises BadData."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self.chat_template:
            raise BadData("the base model has no chat template, which conversations need: give one with chat_template=FILE")
        special: dict[str, Any] = self.special | ({"tools": list(tools)} if tools else {})
        try:
            rendered: Any = render_jinja_template([list(messages)], chat_template=self.chat_template, add_generation_prompt=answer, **special)
        except (jinja2.TemplateError, ValueError) as error:
            raise BadData(f"{where}: the chat template does not take this conversation: {error}") from error
        text = rendered[0] if isinstance(rendered, tuple) else rendered
        return str(text[0] if isinstance(text, list) else text)

    def _given(self, eos_token: str) -> End:
        found = self.tokenizer.token_to_id(eos_token)
        if found is None:
            added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
            has = f"; its tokens of that kind: {', '.join(added[:SHOWN])}{', …' if len(added) > SHOWN else ''}" if added else ""
            raise BadData(f'eos_token "{eos_token}" is not one token of the base model\'s vocabulary{has}')
        return End(eos_token, found)

    def _own_end(self, config: dict[str, Any], settings: dict[str, Any]) -> End:
        named = _token_text(settings.get("eos_token"))
        if named and (found := self.tokenizer.token_to_id(named)) is not None:
            return End(named, found)
        ids = config.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int):
            return End(str(self.tokenizer.id_to_token(first)), first)
        raise BadData("the base model names no end-of-text token (eos_token in tokenizer_config.json): it could not learn to stop")


def _tokenizer(base: Path) -> Tokenizer:
    if (base / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(base / "tokenizer.json"))
    # An older model folder: transformers knows how to read the others, at the price of two seconds of imports.
    from transformers import AutoTokenizer

    try:
        slow: Any = AutoTokenizer.from_pretrained(base, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadData(f"{base}: no usable tokenizer: {error}") from error
    found: Tokenizer = slow.backend_tokenizer
    return found


def _token_text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _json(file: Path, hint: str = "") -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise BadData(f"{file}: no such file; {hint}") from error
    except (ValueError, OSError) as error:
        raise BadData(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise BadData(f"{file}: {kind(value)} where an object is expected")
    return value
