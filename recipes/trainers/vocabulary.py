"""What a base model's folder says about text: tokenizer, chat template, and the token at which an answer ends.  Does not know rows or weights."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rows import BadData, kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

ASKED, ANSWERED = "the question", "the answer"
SHOWN = 8  # tokens that a complaint names
FAR = 1 << 30  # what tokenizers say for "no limit" is greater


class End(NamedTuple):
    """The token that a model writes when it has no more to say."""

    text: str
    number: int


class Refused(Exception):
    """A chat template does not take a conversation."""


class Vocabulary:
    """Raises BadData where the folder lacks what text needs, and where `eos_token` is not one token of its vocabulary."""

    def __init__(self, base: Path, chat_template: Path | None = None, eos_token: str | None = None) -> None:
        config = _json(base / "config.json", "a transformers model folder has one")
        self.size = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
        self.positions = int(config.get("max_position_embeddings") or 0)
        theirs = tokenizer_of(base)
        self.saved_with = _saved_with(theirs)
        self.tokenizer = backend_of(theirs, base)
        self.given = eos_token is not None
        own = self._own_end(config, theirs.eos_token)
        self.end = self._given(eos_token) if eos_token is not None else _wanted(own)
        _, behind = _added(self.tokenizer)
        self.ends_texts = own is not None and own.number in behind
        self._closing = {self.end.number, own.number} if own and own.number in behind else {self.end.number}
        self._templates: dict[str, str] = {}
        written = chat_template.read_text(encoding="utf-8") if chat_template else theirs.chat_template
        if written:
            self._templates = dict(written) if isinstance(written, dict) else {"default": written}
        # As transformers gives them to templates, and the end of text also where the folder names it in its numbers alone.
        self.special: dict[str, Any] = dict(theirs.special_tokens_map)
        if eos_token is not None or not self.special.get("eos_token"):
            self.special["eos_token"] = self.end.text

    @property
    def chat_template(self) -> str | None:
        """The chat template for conversations without tools."""
        return self.template_for(tools=False)

    def template_for(self, *, tools: bool) -> str | None:
        """The chat template: of several with names "tool_use" where there are tools, else "default", as transformers has it."""
        return (self._templates.get("tool_use") if tools else None) or self._templates.get("default")

    def ended(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a text with the end token behind it once, wherever it came from: the text, the tokenizer, or neither."""
        return [*self.unended(ids), self.end.number]

    def unended(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a text without the end token behind it."""
        size = len(ids)
        while size and ids[size - 1] in self._closing:
            size -= 1
        return list(ids[:size])

    def end_of(self, *, chat: bool) -> End:
        """The token at which a trained model stops: what was given, in conversations the one that ends an answer there, else the tokenizer's own."""
        return (not self.given and chat and self.turn_end) or self.end

    @cached_property
    def turn_end(self) -> End | None:
        """The first added token that the chat template writes behind an answer; None where it writes none, or takes no such conversation."""
        if not self.chat_template:
            return None
        try:
            text = self.render([{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}])
        except Refused:
            return None
        _, answered, rest = text.rpartition(ANSWERED)
        added = self.tokenizer.get_added_tokens_decoder()
        behind = self.tokenizer.encode(rest, add_special_tokens=False).ids if answered else []
        return next((End(str(self.tokenizer.id_to_token(token)), token) for token in behind if token in added), None)

    def render(self, messages: Sequence[Mapping[str, object]], *, answer: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Messages as the chat template writes them, with the beginning of an `answer` where that is asked, and the tools.

        Raises Refused where the template does not take them, and BadData where there is no template.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.template_for(tools=bool(tools))
        if not template:
            raise BadData("the base model has no chat template, which conversations need: give one with chat_template=FILE")
        special: dict[str, Any] = self.special | ({"tools": list(tools)} if tools else {})
        try:
            rendered: Any = render_jinja_template([list(messages)], chat_template=template, add_generation_prompt=answer, **special)
        except Exception as error:  # it is a program of somebody else: what it raises is its own
            raise Refused(f"the chat template does not take this conversation: {error}") from error
        text = rendered[0] if isinstance(rendered, tuple) else rendered
        return str(text[0] if isinstance(text, list) else text)

    def _given(self, eos_token: str) -> End:
        found = self.tokenizer.token_to_id(eos_token)
        if found is None:
            added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
            has = f"; its tokens of that kind: {', '.join(added[:SHOWN])}{', …' if len(added) > SHOWN else ''}" if added else ""
            raise BadData(f'eos_token "{eos_token}" is not one token of the base model\'s vocabulary{has}')
        return End(eos_token, found)

    def _own_end(self, config: dict[str, Any], named: str | None) -> End | None:
        found = self.tokenizer.token_to_id(named) if named else None
        if named and found is not None and (found < self.size or not self.size):
            return End(named, found)
        ids = config.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        return End(str(self.tokenizer.id_to_token(first)), first) if isinstance(first, int) else None


def _wanted(end: End | None) -> End:
    if end is None:
        raise BadData("the base model names no end-of-text token (eos_token in tokenizer_config.json): it could not learn to stop")
    return end


def without_torch() -> None:
    """Hide torch from transformers in a program that makes tokens and nothing else: to import it takes longer than they do."""
    if not {"torch", "transformers"} & set(sys.modules):
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would say that there is none


def tokenizer_of(base: Path, **settings: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder as transformers reads it.  Raises BadData where there is none."""
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base, local_files_only=True, **settings)
    except Exception as error:  # of many kinds, also such as the tokenizers' own
        raise BadData(f"{base}: no usable tokenizer: {str(error).partition(chr(10))[0]}") from error
    return found


def most_tokens(tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]) -> int | None:
    """How many tokens the base takes: models such as RoBERTa begin to count behind their padding token, and their tokenizer knows."""
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    told = [limit for limit in (positions, tokenizer.model_max_length) if isinstance(limit, int) and limit < FAR]
    return min(told) if told else None


def _saved_with(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What a tokenizer.json was saved with that makes other tokens and is no part of the tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return [f"{name} in the base's tokenizer.json" for name in ("truncation", "padding") if getattr(backend, name, None) is not None]


def backend_of(tokenizer: PreTrainedTokenizerBase, base: Path) -> Tokenizer:
    """What makes tokens in it, for many texts at once.  It cuts nothing off and fills nothing up, whatever it did when it was saved."""
    found: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if found is None:
        raise BadData(f"{base}: no usable tokenizer: {type(tokenizer).__name__} is in Python alone, a tokenizer.json is needed")
    found.no_truncation()
    found.no_padding()
    return found


def leave_open(tokenizer: PreTrainedTokenizerBase, base: Path) -> None:
    """Have a tokenizer that ends every text end none: a prompt goes on.  What it puts in front stays."""
    from tokenizers.processors import TemplateProcessing

    backend = backend_of(tokenizer, base)
    front, behind = _added(backend)
    if tokenizer.eos_token_id not in behind:
        return
    tokens = [str(backend.id_to_token(number)) for number in front]
    backend.post_processor = TemplateProcessing(single=[*tokens, "$A"], special_tokens=list(zip(tokens, front, strict=True)))  # type: ignore[assignment]


def _added(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that are put in front of every text, and behind it."""
    text = "a"
    alone = backend.encode(text, add_special_tokens=False).ids
    whole = backend.encode(text).ids
    begin = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
    return whole[:begin], whole[begin + len(alone) :]


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
