"""Encodes chats as tokens, and marks the trained tokens.

[Note: trained as served] A model is trained on what it must produce when it is served. For the
assistant's message i of a chat, P is the rendering of the messages before it, with the generation
prompt. Q is the rendering up to and including message i. The trained tokens are those of Q after
its common beginning with P; the end of turn is among them. A template may render a message
differently once others follow. If the chat does not begin with the tokens of Q, the message is
*unstable*, and Q becomes a document of its own.

Text from an added token on is encoded independently of the text before. So texts are cut at added
tokens, and each piece is encoded once: P and Q have nearly all pieces in common with the chat.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, processors

from trainer.data.prepare.chats import ASSISTANT, Chat, ChatError, with_texts
from trainer.data.prepare.options import Loss, Spelled, Turns
from trainer.data.prepare.template import (
    MARKS,
    SPELLED_BEGIN,
    SPELLED_END,
    ChatTemplate,
    ChatTemplateError,
    split_blocks,
)
from trainer.data.tokenizer import special_tokens

_SPELLED = re.compile(f"({SPELLED_BEGIN}[^{SPELLED_BEGIN}{SPELLED_END}]*{SPELLED_END})")
_TOGETHER = 1 << 18  # characters for one call of the tokenizer, which needs 150 bytes per token
_COMPARED = 32
"""Chats of a unit whose generation blocks are compared with what is served."""

Ids: TypeAlias = NDArray[np.uint32]
Flags: TypeAlias = NDArray[np.bool_]
_Piece: TypeAlias = tuple[Ids, NDArray[np.int64]]
"""(ids (N,), begin and end of each token in characters: (N, 2), or (0, 2) if unknown)"""
_UNKNOWN = np.empty((0, 2), np.int64)


class _EncodedText(NamedTuple):
    """Tokens of a rendered chat."""

    text: str
    ids: Ids
    blocks: NDArray[np.int64]
    """Number of each token's generation block, from 1; 0 outside of blocks."""
    borders: list[tuple[int, int]]
    """(characters, tokens) before each piece of the text; [(0, 0)] if it has marked letters."""


class _ChatDocument(NamedTuple):
    """Tokens of one training document."""

    ids: Ids
    trained: Flags
    """Whether each token is a label. The first token never is, as nothing precedes it."""
    place: str = ""
    """Name of the message in which the document ends; "" if it is the whole chat."""


class ChatEncoder:
    """Encodes rendered chats; letters that spell a special token can stay letters."""

    def __init__(self, tokenizer: Tokenizer, written: str = "", offsets: bool = True) -> None:
        """Changes `tokenizer`. `written`: text with the added tokens at which chats may be cut.
        `offsets`: whether to find the tokens of generation blocks."""
        # no begin and end tokens, which templates write; offsets without gaps at spaces
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._cuts = _any_of(_uncut(list(added), written))
        names = sorted(special_tokens(tokenizer), key=len, reverse=True)
        self._spelled = _any_of(names)
        self.special = frozenset(map(tokenizer.token_to_id, names))
        self._offsets = offsets
        self._cut: dict[str, list[str]] = {}
        self._kept: dict[str, _Piece] = {}

    def as_letters(self, chat: Chat) -> tuple[Chat, str]:
        """Mark texts that spell special tokens. Returns also the first of these tokens, or ""."""
        found: list[str] = []

        def mark(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"{SPELLED_BEGIN}{match[0]}{SPELLED_END}"

        def change(text: str) -> str:
            if text.isascii():  # for speed
                return self._spelled.sub(mark, text)
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ChatError("a text has half of a surrogate pair") from None
            if any(character in text for character in MARKS):
                raise ChatError("it has one of the characters U+FDD0 to U+FDD3, which are reserved")
            return self._spelled.sub(mark, text)

        chat = with_texts(chat, change)
        return chat, found[0] if found else ""

    def learn(self, marked: Iterable[str]) -> None:
        """Encode texts for later calls of `encode`, together, which is faster. Forgets others."""
        self._cut, self._kept = {}, {}
        self._encoded([piece for one in marked for piece in self._pieces(split_blocks(one)[0])])

    def encode(self, marked: str) -> _EncodedText:
        text, blocks = split_blocks(marked)
        pieces = self._pieces(text)
        parts = self._encoded(pieces)
        ids = np.concatenate([part[0] for part in parts])
        numbers = np.zeros(len(ids), np.int64)
        if blocks:
            begins = np.cumsum([0, *map(len, pieces[:-1])])
            spans = np.concatenate([part[1] + n for part, n in zip(parts, begins, strict=True)])
        for number, (first, last) in enumerate(blocks, 1):
            # a token that is partly inside belongs to the block
            start = np.searchsorted(spans[:, 1], first, "right")
            numbers[start : np.searchsorted(spans[:, 0], last)] = number
        borders = [(0, 0)]
        if SPELLED_BEGIN not in text:
            sizes = map(len, pieces), (len(part[0]) for part in parts)
            borders = list(zip(*(accumulate(one, initial=0) for one in sizes), strict=True))
        return _EncodedText(text, ids, numbers, borders)

    def shared(self, whole: _EncodedText, text: str) -> tuple[int, Ids]:
        """Return (number of leading tokens that a text without block marks shares with `whole`,
        further tokens of the text)."""
        if text == whole.text:
            return len(whole.ids), whole.ids[:0]
        count = bisect_left(
            whole.borders, True, key=lambda border: not text.startswith(whole.text[: border[0]])
        )
        # Compared from the last piece on that both have, as it may be longer in `text`.
        begin, first = whole.borders[max(0, count - 2)]
        ids = np.concatenate([part[0] for part in self._encoded(self._pieces(text[begin:]))])
        size = min(len(whole.ids) - first, len(ids))
        differ = np.flatnonzero(whole.ids[first : first + size] != ids[:size])
        same = int(differ[0]) if differ.size else size
        return first + same, ids[same:]

    def _pieces(self, text: str) -> list[str]:
        if text in self._cut:
            return self._cut[text]
        pieces = self._cut[text] = list[str]()
        for part in _SPELLED.split(text) if SPELLED_BEGIN in text else [text]:
            cuts = () if _is_letters(part) else self._cuts.finditer(part)
            borders = [0, *(cut.start() for cut in cuts), len(part)]
            pieces += [part[first:last] for first, last in pairwise(borders)]
        return pieces

    def _encoded(self, pieces: Sequence[str]) -> list[_Piece]:
        # in the order of the texts, as their memory is then read in order, which is faster
        new = dict.fromkeys(piece for piece in pieces if piece not in self._kept)
        for letters in (True, False) if new else ():
            some = [piece for piece in new if _is_letters(piece) == letters]
            self.tokenizer.encode_special_tokens = letters
            # An unpaired mark, left by a template that cuts a text, is dropped.
            bare = [one.replace(SPELLED_BEGIN, "").replace(SPELLED_END, "") for one in some]
            tokenizer = self.tokenizer
            encode = tokenizer.encode_batch if self._offsets else tokenizer.encode_batch_fast
            encodings = encode(bare, add_special_tokens=False) if bare else []
            for piece, encoding in zip(some, encodings, strict=True):
                spans = np.array(encoding.offsets, np.int64) if self._offsets else _UNKNOWN
                spans = spans.reshape(-1, 2) + letters
                self._kept[piece] = np.array(encoding.ids, np.uint32), spans
        return [self._kept[piece] for piece in pieces]


def _is_letters(piece: str) -> bool:
    return piece.startswith(SPELLED_BEGIN) and piece.endswith(SPELLED_END)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _uncut(added: Sequence[AddedToken], written: str) -> list[str]:
    """Added tokens in `written` that are recognised whatever is beside them."""
    if any(token.single_word for token in added):
        return []
    names = []
    for token in added:
        name = token.content
        # No cut at these tokens: normalized tokens are matched in changed text, and tokens with
        # lstrip consume spaces before them.
        if not name or name not in written or token.normalized or token.lstrip:
            continue
        others = [other.content for other in added if other is not token and other.content]
        if not any(_overlap(name, other) for other in others):
            names.append(name)
    return names


def _overlap(one: str, other: str) -> bool:
    if one in other or other in one:
        return True
    sizes = range(1, min(len(one), len(other)))
    return any(one[-size:] == other[:size] or other[-size:] == one[:size] for size in sizes)


class _UnstableError(ChatError):
    """An answer is rendered differently once messages follow."""


class RenderedChat:
    """A chat in which letters that spell special tokens are marked."""

    def __init__(self, given: Chat, encoder: ChatEncoder, template: ChatTemplate) -> None:
        chat, self.spelled = encoder.as_letters(given)
        self.trained, self.messages = chat.trained, chat.messages
        self.upto: Callable[..., str] = cache(
            lambda count, prompt=False: template.marked(chat.messages[:count], chat.tools, prompt)
        )
        """(number of messages, whether to add the generation prompt) → rendering with marks."""


class ChatSpanFinder:
    """Converts chats to training documents, and counts peculiarities for `notes_for_user`."""

    def __init__(
        self, template: ChatTemplate, encoder: ChatEncoder, loss: Loss, spelled: Spelled
    ) -> None:
        self._template, self._encoder = template, encoder
        self._loss, self._spelled = loss, spelled
        self._left_to_compare = _COMPARED
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def noted(self) -> dict[str, Any]:
        noted = {"counts": dict(self._counts), "examples": self._examples}
        self._counts, self._examples = Counter(), {}
        return noted

    def rendered(self, chat: Chat) -> RenderedChat:
        return RenderedChat(chat, self._encoder, self._template)

    def encode(self, chats: Iterable[RenderedChat]) -> None:
        """Encode chats for later calls of `documents`, together, which is faster."""
        texts = []
        for chat in chats:
            with suppress(ChatTemplateError):
                texts.append(chat.upto(len(chat.messages)))
            if sum(map(len, texts)) > _TOGETHER:
                break  # `documents` encodes the other chats
        self._encoder.learn(texts)

    def documents(self, chat: RenderedChat, turns: Turns) -> list[_ChatDocument]:
        """Convert a chat to documents. Raises ChatError if it cannot be trained."""
        if chat.spelled and self._spelled == "reject":
            raise ChatError(
                f"a text spells the special token {chat.spelled}; --spelled letters keeps it as "
                "letters"
            )
        self._counts["chats"] += 1
        try:
            if turns in ("auto", "all"):
                try:
                    return [self._whole(chat)]
                except _UnstableError:
                    if turns == "all":
                        raise
                self._counts["unstable"] += 1
                self._counts["whole"] += len(chat.upto(len(chat.messages)))
                self._counts["each"] += sum(len(chat.upto(turn + 1)) for turn in chat.trained)
            if turns == "last":
                return [self._answer(chat.trained[-1], chat)]
            return [self._answer(turn, chat, f"message {turn}: ") for turn in chat.trained]
        except ChatTemplateError as error:
            raise ChatError(f"the chat template rejects it: {error}") from error

    def _whole(self, chat: RenderedChat) -> _ChatDocument:
        whole = self._encoder.encode(chat.upto(len(chat.messages)))
        if not self._template.has_blocks:
            return self._document(whole, self._served(chat.trained, chat, whole))
        trained = whole.blocks > 0
        if len(chat.trained) < sum(message["role"] == ASSISTANT for message in chat.messages):
            trained &= self._served(chat.trained, chat, whole)
        elif self._left_to_compare:
            self._left_to_compare -= 1
            with suppress(ChatError, ChatTemplateError):
                self._compare(whole, self._served(chat.trained, chat, whole), trained)
        return self._document(whole, trained)

    def _answer(self, turn: int, chat: RenderedChat, place: str = "") -> _ChatDocument:
        whole = self._encoder.encode(chat.upto(turn + 1))
        trained = self._served([turn], chat, whole)
        if self._template.has_blocks:
            # A block belongs to this answer if it ends after the answer's prompt.
            own = np.unique(whole.blocks[trained])
            served, trained = trained, np.isin(whole.blocks, own[own > 0])
            self._compare(whole, served, trained)
        return self._document(whole, trained, place)

    def _served(self, turns: Iterable[int], chat: RenderedChat, whole: _EncodedText) -> Flags:
        """Returns whether each token of `whole` is trained, (N,), where `turns` are the trained
        messages; see [Note: trained as served]. Raises _UnstableError if a message is unstable, and
        ChatError if it adds no token to its prompt."""
        trained, led = np.zeros(len(whole.ids), bool), []
        for turn in turns:
            answered = split_blocks(chat.upto(turn + 1))[0]
            stop, missing = self._encoder.shared(whole, answered)
            prompt = split_blocks(chat.upto(turn, True))[0]
            called = map(_name_of_call, chat.messages[turn].get("tool_calls") or ())
            # without the prompt, which may list all tools
            self._counts["uncalled"] += any(
                name not in answered.removeprefix(prompt) for name in called
            )
            begin, lead = self._encoder.shared(whole, prompt)
            if missing.size:
                raise _UnstableError(
                    f"message {turn} is rendered differently once messages follow, so it would not "
                    "be trained as served; --turns each makes one document of each answer"
                )
            if begin >= stop:
                raise ChatError(
                    f"message {turn}: the answer adds no token to its prompt, so there is nothing "
                    "to train"
                )
            if not whole.text.startswith(prompt):
                led.append(lead)
            trained[begin:stop] = True
        if led:
            self._counts["led"] += len(led)
            self._examples.setdefault("led", self._text_of(led[0])[:60])
        return trained

    def _compare(self, whole: _EncodedText, served: Flags, blocks: Flags) -> None:
        differ = np.flatnonzero(served != blocks)
        if differ.size:
            first = differ[0]
            what = "train" if blocks[first] else "do not train"
            self._counts["blocks"] += 1
            self._examples.setdefault("blocks", f"{what} {self._text_of(whole.ids[[first]])!r}")

    def _text_of(self, ids: Ids) -> str:
        return self._encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _document(self, whole: _EncodedText, trained: Flags, place: str = "") -> _ChatDocument:
        if self._loss == "all":
            trained = np.ones(len(whole.ids), bool)
        trained[:1] = False
        if not trained.any():
            raise ChatError(f"{place}it has no trained token")
        # from the end, where it usually is
        if self._encoder.special.isdisjoint(whole.ids[trained][::-1].tolist()):
            self._counts["endless"] += 1
        return _ChatDocument(whole.ids, trained, place)


def _name_of_call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def notes_for_user(noted: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield notes for the user, from the results of `ChatSpanFinder.noted`."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for part in noted:
        counts.update(part["counts"])
        examples = {**part["examples"], **examples}
    if counts["unstable"]:
        growth = counts["each"] / max(1, counts["whole"])
        yield (
            f"{counts['unstable']:,} of {counts['chats']:,} chats are rendered differently once "
            "messages follow: each of their answers becomes a document of its own, as served; "
            f"these have {growth:.1f} times the text (--turns last trains the last answer only)"
        )
    if counts["led"]:
        yield (
            f"the prompt of {counts['led']:,} answers ends in {examples['led']!r}, but the "
            "template writes these answers without that text; add reasoning_content, or "
            "--template-options that change the prompt"
        )
    if counts["uncalled"]:
        yield (
            f"the template leaves out the tool calls of {counts['uncalled']:,} answers, so they "
            "are not trained; give a template that writes them (--template)"
        )
    if counts["blocks"]:
        yield (
            f"the template's generation blocks {examples['blocks']} in {counts['blocks']:,} of the "
            "compared chats, unlike what a model produces when served; the blocks decide"
        )
    if counts["endless"]:
        yield (
            f"{counts['endless']:,} documents have no trained special token, so the model "
            "does not learn to stop there; `perdure data inspect DIR --sample 3` shows them"
        )
