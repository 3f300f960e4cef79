"""Encodes chats as tokens, and marks the trained tokens.

[Note: trained as served] A model is trained on what it must produce when it is served. For the
assistant's message i of a chat, P is the rendering of the messages before it, with the generation
prompt. Q is the rendering up to and including message i. The trained tokens are those of Q after
its common beginning with P; the end of turn is among them. A template may render a message
differently once others follow. If the chat does not begin with the tokens of Q, the message is
*unstable*, and Q becomes a document of its own.

Text from an added token on is encoded independently of the text before. So a chat is encoded in
pieces that begin with added tokens, without the character offsets of all tokens, which would cost a
third of the time. P and Q are compared with the chat only from their last common added token on.
For most templates that rest is a generation prompt of a few tokens, encoded once for all chats.
"""

import bisect
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, processors

from trainer.data.prepare.chats import ASSISTANT, Chat, ChatError, texts_of, with_texts
from trainer.data.prepare.options import Loss, Spelled, Turns
from trainer.data.prepare.template import (
    MARKS,
    SPELLED_BEGIN,
    SPELLED_END,
    ChatRendering,
    ChatTemplate,
    RenderError,
    blocks_in,
    without_blocks,
)
from trainer.data.tokenizer import special_tokens

_SPELLED = re.compile(f"({SPELLED_BEGIN}.*?{SPELLED_END})", re.DOTALL)
_WITHOUT_MARKS = dict.fromkeys(map(ord, MARKS))
_KEPT_TAIL = 256
"""Longest compared rest of a text, in characters, whose tokens are cached."""
_KEPT_PIECE = 32
"""Longest piece of a chat, in characters, whose tokens are cached."""
_COMPARED = 32
"""Chats of a unit whose generation blocks are compared with what a model produces when served."""


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a text, and added tokens at which the text can be cut."""

    text: str
    ids: list[int]
    cuts: Sequence[tuple[int, int, int]] = ()
    """(one past its last character, its first character, its index) of added tokens."""
    offsets: Sequence[tuple[int, int]] = ()
    """(first character, one past the last) of each token; () if unknown."""

    def token_at(self, place: int) -> int:
        """Index of the first token that ends after a character; the number of tokens if there is
        none."""
        return bisect.bisect_right(self.offsets, place, key=itemgetter(1))

    def inside(self, spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
        """Whether each token has a character in one of several non-empty spans."""
        inside = np.zeros(len(self.ids), bool)
        for first, last in spans:
            stop = bisect.bisect_left(self.offsets, last, key=itemgetter(0))
            inside[self.token_at(first) : stop] = True
        return inside


@dataclass(frozen=True)
class ChatDocument:
    """Tokens that form one training document, and which of them are trained."""

    ids: NDArray
    trained: NDArray[np.bool_]
    """Whether each token is a label. The first token never is, as nothing precedes it."""
    place: str = ""
    """Name of the message in which the document ends; "" if it is the whole chat."""


class ChatEncoder:
    """Encodes texts as tokens; letters that spell a special token can stay letters."""

    def __init__(self, tokenizer: Tokenizer, written: str = "") -> None:
        """Changes `tokenizer`, so it must not be used elsewhere. `written`: a text, such as the
        source of the chat template, with the added tokens at which a chat may be split to be
        encoded in pieces. If it is "", chats are encoded whole."""
        # This post-processor adds no begin and end tokens, which templates write themselves. Its
        # offsets include spaces, so that spans of tokens have no gaps.
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._cuts = _any_of(_uncut(list(added), written))
        names = sorted(special_tokens(tokenizer), key=len, reverse=True)
        self._spelled = _any_of(names)
        self.special = frozenset(map(tokenizer.token_to_id, names))
        # Cached, because most texts that `common` encodes are a generation prompt, equal in all
        # chats.
        self._tail = lru_cache(maxsize=4096)(self._ids)

    def spelled_in(self, chat: Chat) -> str:
        """First special token that a text of a chat spells; "" if there is none. Raises ChatError
        if a text has reserved characters, or is no valid Unicode."""
        texts = "\n".join(texts_of([chat.messages, chat.tools]))
        try:
            texts.encode()
        except UnicodeEncodeError:
            raise ChatError("a text has half of a surrogate pair") from None
        if any(mark in texts for mark in MARKS):
            raise ChatError("it has one of the characters U+FDD0 to U+FDD3, which are reserved")
        found = self._spelled.search(texts)
        return found[0] if found else ""

    def as_letters(self, chat: Chat) -> Chat:
        """Put marks around texts that spell special tokens, so that they stay letters."""

        def change(text: str) -> str:
            return self._spelled.sub(lambda match: f"{SPELLED_BEGIN}{match[0]}{SPELLED_END}", text)

        return with_texts(chat, change)

    def encode(self, texts: Sequence[str], offsets: bool = False) -> list[EncodedText]:
        """Encode rendered chats; `offsets`: with the characters of each token, but without cuts."""
        plain = [text for text in texts if SPELLED_BEGIN not in text]
        encoded = iter(self._with_offsets(plain) if offsets else self._in_pieces(plain))
        return [
            self._with_letters(text) if SPELLED_BEGIN in text else next(encoded) for text in texts
        ]

    def _with_offsets(self, texts: Sequence[str]) -> Iterator[EncodedText]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            yield EncodedText(text, encoding.ids, offsets=encoding.offsets)

    def _in_pieces(self, texts: Sequence[str]) -> Iterator[EncodedText]:
        """Encode each text in pieces, each from one cut to the next, and join their tokens."""
        spans = [[match.span() for match in self._cuts.finditer(text)] for text in texts]
        pieces = [
            [
                text[first:last]
                for first, last in pairwise([0, *(span[0] for span in of_text), None])
            ]
            for text, of_text in zip(texts, spans, strict=True)
        ]
        new = [piece for of_text in pieces for piece in of_text if len(piece) > _KEPT_PIECE]
        encoded = iter(self._tokenizer.encode_batch_fast(new, add_special_tokens=False))
        for text, of_text, some in zip(texts, spans, pieces, strict=True):
            ids: list[int] = []
            starts = []
            for piece in some:
                starts.append(len(ids))
                ids += next(encoded).ids if len(piece) > _KEPT_PIECE else self._tail(piece)
            cuts = zip(of_text, starts[1:], strict=True)
            yield EncodedText(text, ids, [(end, begin, start) for (begin, end), start in cuts])

    def _with_letters(self, text: str) -> EncodedText:
        """Encode a text in which marks enclose letters that must not become special tokens."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        begin = 0
        for piece in _SPELLED.split(text):
            letters = int(piece.startswith(SPELLED_BEGIN))
            # An unpaired mark, left by a template that cuts a text, is dropped.
            bare = piece[1:-1] if letters else piece.translate(_WITHOUT_MARKS)
            self._tokenizer.encode_special_tokens = bool(letters)
            encoding = self._tokenizer.encode(bare, add_special_tokens=False)
            ids += encoding.ids
            shift = begin + letters
            offsets += [(first + shift, last + shift) for first, last in encoding.offsets]
            begin += len(piece)
        self._tokenizer.encode_special_tokens = False
        return EncodedText(text, ids, offsets=offsets)

    def _ids(self, text: str) -> list[int]:
        if SPELLED_BEGIN in text:
            return self._with_letters(text).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def common(self, whole: EncodedText, other: str) -> tuple[int, list[int]]:
        """Return (number of leading tokens that a text and another share, further tokens of the
        other)."""
        if other == whole.text:
            return len(whole.ids), []
        same = len(other) if whole.text.startswith(other) else _alike(whole.text, other)
        # Up to the last common added token, the encodings are equal.
        last = bisect.bisect_right(whole.cuts, same, key=itemgetter(0)) - 1
        _, begin, first = whole.cuts[last] if last >= 0 else (0, 0, 0)
        tail = other[begin:]
        theirs = self._tail(tail) if len(tail) <= _KEPT_TAIL else self._ids(tail)
        count = 0
        for mine, their in zip(whole.ids[first : first + len(theirs)], theirs, strict=False):
            if mine != their:
                break
            count += 1
        return first + count, theirs[count:]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode tokens, including special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _uncut(added: Sequence[AddedToken], written: str) -> list[str]:
    """Texts of the added tokens in `written` that become these tokens in any context: no other
    added token overlaps with them."""
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
        if not any(name in text or text in name or _overlap(name, text) for text in others):
            names.append(name)
    return names


def _overlap(one: str, other: str) -> bool:
    """Whether either text can begin inside the other and extend beyond its end."""
    sizes = range(1, min(len(one), len(other)))
    return any(one[-size:] == other[:size] or other[-size:] == one[:size] for size in sizes)


def _alike(one: str, other: str) -> int:
    """Number of leading characters that two texts share."""
    # by bisection: slices are compared in C, single characters are not
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


T = TypeVar("T")
Finding: TypeAlias = Generator[str, EncodedText, T]
"""A generator that yields texts, receives their tokens, and returns T."""


class _UnstableError(ChatError):
    """An answer is rendered differently once messages follow."""

    def __init__(self, turn: int) -> None:
        super().__init__(
            f"message {turn} is rendered differently once messages follow, so it would not be "
            "trained as served; --turns each makes one document of each answer"
        )


class SpanFinder:
    """Converts chats to training documents, and counts peculiarities that the user should know."""

    def __init__(
        self, template: ChatTemplate, encoder: ChatEncoder, loss: Loss, spelled: Spelled
    ) -> None:
        """`loss` and `spelled`: see PrepareOptions."""
        self._template, self._encoder = template, encoder
        self._loss, self._spelled = loss, spelled
        self._left_to_compare = _COMPARED
        self.counts: Counter[str] = Counter()
        """chats: number of chats. unstable: chats with a document for each answer, because an
        answer is rendered differently once messages follow; each and whole: characters of these
        documents, and of these chats. led: answers whose rendering does not begin with that of
        their prompt. endless: documents without a trained special token. blocks: chats whose
        generation blocks differ from what a model produces when served."""
        self.examples: dict[str, str] = {}
        """First example for "led" and for "blocks"."""

    def documents(
        self, chats: Iterable[tuple[Chat, Turns]]
    ) -> list[list[ChatDocument] | ChatError]:
        """Convert each chat, given with the turns to train, to documents, or to the error for which
        it cannot be trained. All texts are encoded together, for speed."""
        working = [self._documents(chat, turns) for chat, turns in chats]
        results: list[list[ChatDocument] | ChatError] = [[]] * len(working)
        encoded: dict[int, EncodedText | None] = dict.fromkeys(range(len(working)))
        while encoded:
            texts = {}
            for number, tokens in encoded.items():
                try:
                    texts[number] = working[number].send(tokens)  # type: ignore[arg-type]
                except StopIteration as end:
                    results[number] = end.value
                except ChatError as error:
                    results[number] = error
            answers = self._encoder.encode(list(texts.values()), self._template.has_blocks)
            encoded = dict(zip(texts, answers, strict=True))
        return results

    def _documents(self, chat: Chat, turns: Turns) -> Finding[list[ChatDocument]]:
        """Convert one chat to documents. Raises ChatError if it cannot be trained."""
        if token := self._encoder.spelled_in(chat):
            if self._spelled == "reject":
                raise ChatError(
                    f"a text spells the special token {token}; --spelled letters keeps it as "
                    "letters"
                )
            chat = self._encoder.as_letters(chat)
        self.counts["chats"] += 1
        by_turn = turns in ("each", "last")
        count = chat.trained[-1] + 1 if by_turn else len(chat.messages)
        try:
            rendering = ChatRendering(self._template, chat.messages[:count], chat.tools)
            if not by_turn:
                try:
                    return [(yield from self._whole(chat, rendering))]
                except _UnstableError:
                    if turns == "all":
                        raise
                    self.counts["unstable"] += 1
                    self.counts["whole"] += len(rendering.upto(count))
                    self.counts["each"] += sum(len(rendering.upto(n + 1)) for n in chat.trained)
            if turns == "last":
                return [(yield from self._answer(chat.trained[-1], rendering))]
            documents = []
            for turn in chat.trained:
                place = f"message {turn}: "
                documents.append((yield from self._answer(turn, rendering, place)))
            return documents
        except RenderError as error:
            raise ChatError(f"the chat template rejects it: {error}") from error

    def _whole(self, chat: Chat, rendering: ChatRendering) -> Finding[ChatDocument]:
        """Convert a chat to one document. Raises _UnstableError if an answer is rendered
        differently once messages follow."""
        marked = rendering.upto(len(chat.messages))
        text = without_blocks(marked)
        if not self._template.has_blocks:
            # Most unstable chats differ in their letters already, and need not be encoded.
            for turn in chat.trained:
                if not text.startswith(rendering.upto(turn + 1)):
                    raise _UnstableError(turn)
            whole = yield text
            return self._document(whole, self._served(chat.trained, rendering, whole))
        whole = yield text
        trained = whole.inside(blocks_in(marked))
        if len(chat.trained) < sum(message["role"] == ASSISTANT for message in chat.messages):
            # Blocks mark all answers, including those that the record excludes.
            trained &= self._served(chat.trained, rendering, whole)
        elif self._left_to_compare:
            self._left_to_compare -= 1
            # the result is only for a note
            with suppress(ChatError, RenderError):
                self._compare(whole, self._served(chat.trained, rendering, whole), trained)
        return self._document(whole, trained)

    def _answer(
        self, turn: int, rendering: ChatRendering, place: str = ""
    ) -> Finding[ChatDocument]:
        """Convert the answer with index `turn`, and the messages before it, to a document, as it is
        served."""
        marked = rendering.upto(turn + 1)
        whole = yield without_blocks(marked)
        trained = self._served([turn], rendering, whole)
        if self._template.has_blocks:
            # A block belongs to this answer if it ends after the answer's prompt.
            begin = int(trained.argmax())
            blocks = [block for block in blocks_in(marked) if whole.token_at(block[1] - 1) >= begin]
            served, trained = trained, whole.inside(blocks)
            self._compare(whole, served, trained)
        return self._document(whole, trained, place)

    def _served(
        self, turns: Iterable[int], rendering: ChatRendering, whole: EncodedText
    ) -> NDArray[np.bool_]:
        """Whether each token of a document is in one of the answers `turns`, and not in its prompt.
        Raises _UnstableError if the document does not begin with the tokens of an answer."""
        trained = np.zeros(len(whole.ids), bool)
        for turn in turns:
            upto = without_blocks(rendering.upto(turn + 1))
            prompt = without_blocks(rendering.upto(turn, prompt=True))
            stop, missing = self._encoder.common(whole, upto)
            if missing:
                raise _UnstableError(turn)
            begin, led = self._encoder.common(whole, prompt)
            if begin >= stop:
                raise ChatError(
                    f"message {turn}: the answer adds no token to its prompt, so there is nothing "
                    "to train"
                )
            if not whole.text.startswith(prompt):
                self.counts["led"] += 1
                self.examples.setdefault("led", self._encoder.text_of(led)[:60])
            trained[begin:stop] = True
        return trained

    def _compare(
        self, whole: EncodedText, served: NDArray[np.bool_], blocks: NDArray[np.bool_]
    ) -> None:
        """Count a chat, and keep the first example, if its generation blocks differ from what a
        model produces when served. `served` and `blocks`: which tokens each of them trains."""
        differ = np.flatnonzero(served != blocks)
        if differ.size:
            first = int(differ[0])
            what = "train" if blocks[first] else "do not train"
            self.counts["blocks"] += 1
            piece = whole.text[slice(*whole.offsets[first])]
            self.examples.setdefault("blocks", f"{what} {piece!r}")

    def _document(
        self, whole: EncodedText, trained: NDArray[np.bool_], place: str = ""
    ) -> ChatDocument:
        ids = np.asarray(whole.ids)
        if self._loss == "all":
            trained = np.ones(len(ids), bool)
        trained[:1] = False
        if not trained.any():
            raise ChatError(f"{place}it has no trained token")
        if self._encoder.special.isdisjoint(ids[trained].tolist()):
            self.counts["endless"] += 1
        return ChatDocument(ids, trained, place)


def notes_for_user(counts: Counter[str], examples: dict[str, str]) -> Iterator[str]:
    """Yield notes for the user about chats.

    Args:
        counts: sum of all `SpanFinder.counts`.
        examples: first examples, as in `SpanFinder.examples`.
    """
    chats = counts["chats"]
    if counts["unstable"]:
        growth = counts["each"] / max(1, counts["whole"])
        yield (
            f"{counts['unstable']:,} of {chats:,} chats are rendered differently once messages "
            "follow: each of their answers becomes a document of its own, as served; these have "
            f"{growth:.1f} times the text (--turns last trains the last answer only)"
        )
    if counts["led"]:
        yield (
            f"the prompt of {counts['led']:,} answers ends in {examples['led']!r}, but the "
            "template writes these answers without that text; add reasoning_content, or "
            "--template-options that change the prompt"
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


def summed(parts: Sequence[dict[str, Any]]) -> tuple[Counter[str], dict[str, str]]:
    """Sum of the counts, and first examples, over the results of all units."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for part in parts:
        counts.update(part["counts"])
        examples = {**part["examples"], **examples}
    return counts, examples
