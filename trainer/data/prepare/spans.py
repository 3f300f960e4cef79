"""Encodes chats as tokens, and marks those that are trained.

[Note: trained as served] A model is trained on what it must produce when it is served. For the
assistant's message i of a chat, P is the rendering of what precedes it, with the generation prompt;
Q the rendering up to and including it. Trained are the tokens of Q without those that it shares
with P at its beginning. The end of turn is among them. A template may render a message differently
once others follow. If the chat does not begin with the tokens of Q, the message is not stable in
it, and Q becomes a document of its own.

Text from an added token on is encoded independently. So a chat is encoded in pieces that begin with
added tokens, without the places of all tokens, which take a third of the time; and P and Q are not
encoded whole, but compared with the chat from their last common added token on. For most templates
that is a generation prompt of a few tokens, encoded once for all chats.
"""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
    ChatTemplate,
    RenderError,
    Rendering,
    blocks_in,
    without_blocks,
)
from trainer.data.tokenizer import special_tokens

_SPELLED = re.compile(f"({SPELLED_BEGIN}.*?{SPELLED_END})", re.DOTALL)
_WITHOUT_MARKS = dict.fromkeys(map(ord, MARKS))
_KEPT_TAIL = 256
"""Longest piece of text, in characters, whose tokens are cached."""
_KEPT_PIECE = 32
"""Longest piece of a chat, in characters, whose tokens are cached."""
_COMPARED = 32
"""Chats of a unit whose generation blocks are compared with what a model is served."""


class Encoded:
    """Tokens of a text, and the added tokens at which it can be cut."""

    def __init__(
        self,
        ids: list[int],
        cuts: Sequence[tuple[int, int, int]],
        places: Callable[[int], tuple[int, int] | None] | None = None,
    ) -> None:
        """Args:
        ids: of the tokens.
        cuts: of each added token one past its last character, its first character, and its index,
            in this order.
        places: index of a token → its first character, and one past its last; None: not known."""
        self.ids, self.cuts, self._places = ids, cuts, places

    def _place(self, token: int) -> tuple[int, int]:
        assert self._places
        return self._places(token) or (0, 0)

    def begin(self, token: int) -> int:
        """First character of a token."""
        return self._place(token)[0]

    def end(self, token: int) -> int:
        """One past the last character of a token."""
        return self._place(token)[1]

    def token_at(self, place: int) -> int:
        """Index of the first token that ends after a character; the number of tokens if none
        does."""
        return bisect.bisect_right(range(len(self.ids)), place, key=self.end)

    def inside(self, spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
        """Whether each token has a character in one of some non-empty spans."""
        found = np.zeros(len(self.ids), bool)
        for first, last in spans:
            stop = bisect.bisect_left(range(len(self.ids)), last, key=self.begin)
            found[self.token_at(first) : stop] = True
        return found


@dataclass(frozen=True)
class Document:
    """Tokens that are trained together."""

    ids: NDArray
    trained: NDArray[np.bool_]
    """Whether each token is a label. The first never is, as nothing precedes it."""
    place: str = ""
    """Name of the message that it ends in, if it is not the whole chat."""


class ChatEncoder:
    """Encodes text as tokens; letters that spell a special token can stay letters."""

    def __init__(self, tokenizer: Tokenizer, written: str = "") -> None:
        """Takes over `tokenizer` and changes it. `written`: text that spells the added tokens at
        which chats may be cut, such as the source of their template."""
        # A template writes its own begin and end tokens, and offsets must stay whole.
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._borders = frozenset(added)
        self._cuts = _any_of(_uncut(list(added.values()), written))
        names = sorted(special_tokens(tokenizer), key=len, reverse=True)
        self._spelled = _any_of(names)
        self.special = frozenset(map(tokenizer.token_to_id, names))
        # Tails are mostly generation prompts, equal in all chats.
        self._tail = lru_cache(maxsize=4096)(self._ids)

    def spelled_in(self, chat: Chat) -> str:
        """The first special token that a text of a chat spells; "" without any.

        Raises:
            ChatError: a text has characters that no text may have.
        """
        texts = "\n".join(texts_of([chat.messages, chat.tools]))
        try:
            texts.encode()
        except UnicodeEncodeError:
            raise ChatError("half of a surrogate pair") from None
        if any(mark in texts for mark in MARKS):
            raise ChatError("it has one of the characters U+FDD0 to U+FDD3, which no text may have")
        found = self._spelled.search(texts)
        return found[0] if found else ""

    def as_letters(self, chat: Chat) -> Chat:
        """A chat with marks around texts that spell special tokens, so that they stay letters."""

        def change(text: str) -> str:
            return self._spelled.sub(lambda found: f"{SPELLED_BEGIN}{found[0]}{SPELLED_END}", text)

        return with_texts(chat, change)

    def encode(self, texts: Sequence[str], places: bool = False) -> list[Encoded]:
        """Tokens of rendered chats; `places`: with the place of each."""
        plain = [text for text in texts if SPELLED_BEGIN not in text]
        found = iter(self._with_places(plain) if places else self._in_pieces(plain))
        return [
            self._with_letters(text) if SPELLED_BEGIN in text else next(found) for text in texts
        ]

    def _with_places(self, texts: Sequence[str]) -> Iterator[Encoded]:
        for one in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield self._located(one.ids, one.token_to_chars)

    def _located(self, ids: list[int], places: Callable[[int], tuple[int, int] | None]) -> Encoded:
        added = [number for number, one in enumerate(ids) if one in self._borders]
        spans = [places(number) or (0, 0) for number in added]
        cuts = [(end, begin, one) for one, (begin, end) in zip(added, spans, strict=True)]
        return Encoded(ids, cuts, places)

    def _in_pieces(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Yield the tokens of texts, each encoded from every cut on by itself."""
        spans = [[found.span() for found in self._cuts.finditer(text)] for text in texts]
        pieces = [
            [text[first:last] for first, last in pairwise([0, *(one[0] for one in of_text), None])]
            for text, of_text in zip(texts, spans, strict=True)
        ]
        new = [piece for some in pieces for piece in some if len(piece) > _KEPT_PIECE]
        encoded = iter(self._tokenizer.encode_batch_fast(new, add_special_tokens=False))
        for of_text, some in zip(spans, pieces, strict=True):
            ids: list[int] = []
            starts = []
            for piece in some:
                starts.append(len(ids))
                ids += next(encoded).ids if len(piece) > _KEPT_PIECE else self._tail(piece)
            cuts = zip(of_text, starts[1:], strict=True)
            yield Encoded(ids, [(end, begin, start) for (begin, end), start in cuts])

    def _with_letters(self, text: str) -> Encoded:
        """Tokens of a text with marks around letters."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        begin = 0
        for piece in _SPELLED.split(text):
            letters = int(piece.startswith(SPELLED_BEGIN))
            # An unpaired mark, where a template takes a text apart, is dropped.
            bare = piece[1:-1] if letters else piece.translate(_WITHOUT_MARKS)
            self._tokenizer.encode_special_tokens = bool(letters)
            encoding = self._tokenizer.encode(bare, add_special_tokens=False)
            ids += encoding.ids
            shift = begin + letters
            places += [(first + shift, last + shift) for first, last in encoding.offsets]
            begin += len(piece)
        self._tokenizer.encode_special_tokens = False
        return self._located(ids, places.__getitem__)

    def _ids(self, text: str) -> list[int]:
        if SPELLED_BEGIN in text:
            return self._with_letters(text).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def common(self, whole: Encoded, text: str, other: str) -> tuple[int, list[int]]:
        """Number of leading tokens that a text shares with another, and further tokens of the
        other.

        Args:
            whole: tokens of `text`.
            text: the first text.
        """
        same = len(other) if text.startswith(other) else _alike(text, other)
        # From the last common added token on: before it the encodings are the same.
        last = bisect.bisect_right(whole.cuts, same, key=itemgetter(0)) - 1
        _, begin, first = whole.cuts[last] if last >= 0 else (0, 0, 0)
        tail = other[begin:]
        theirs = self._tail(tail) if len(tail) <= _KEPT_TAIL else self._ids(tail)
        count = 0
        for mine, one in zip(whole.ids[first : first + len(theirs)], theirs, strict=False):
            if mine != one:
                break
            count += 1
        return first + count, theirs[count:]

    def text_of(self, ids: Sequence[int]) -> str:
        """Text of some tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _uncut(added: Sequence[AddedToken], written: str) -> list[str]:
    """Texts of the added tokens in `written` that are these tokens wherever a text has them: no
    other added token overlaps with them, and they do not depend on what stands around them."""
    if any(token.single_word for token in added):
        return []
    found = []
    for token in added:
        name = token.content
        # A normalized one is looked for in changed text; lstrip takes spaces before it.
        if not name or name not in written or token.normalized or token.lstrip:
            continue
        others = [one.content for one in added if one is not token]
        if not any(name in one or one in name or _overlap(name, one) for one in others if one):
            found.append(name)
    return found


def _overlap(one: str, other: str) -> bool:
    """Whether one text can begin inside of the other, and go on beyond it."""
    sizes = range(1, min(len(one), len(other)))
    return any(one[-size:] == other[:size] or other[-size:] == one[:size] for size in sizes)


def _alike(one: str, other: str) -> int:
    """Number of leading characters that two texts share."""
    # Bisection: slices are compared in C, single characters would not be.
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


T = TypeVar("T")
Finding: TypeAlias = Generator[str, Encoded, T]
"""A generator that yields texts and is sent their tokens."""


class SpanFinder:
    """Converts chats to documents, and counts what the user should know."""

    def __init__(
        self, template: ChatTemplate, encoder: ChatEncoder, loss: Loss, spelled: Spelled
    ) -> None:
        """Args:
        template: renders the chats.
        encoder: encodes them.
        loss: see PrepareOptions.
        spelled: see PrepareOptions."""
        self._template, self._encoder = template, encoder
        self._loss, self._spelled = loss, spelled
        self._left_to_compare = _COMPARED
        self.counts: Counter[str] = Counter()
        """chats; unstable: chats with a document for each answer, with the characters of these
        (each) and of the chats (whole); led: answers that do not begin as their prompt ends;
        endless: documents without a trained special token; blocks: chats whose generation blocks
        differ from what is served."""
        self.examples: dict[str, str] = {}
        """The first example of led and blocks."""

    def documents(self, chats: Iterable[tuple[Chat, Turns]]) -> list[list[Document] | ChatError]:
        """The documents of each chat, or why it cannot be trained. Their texts are encoded
        together, which is faster.

        Args:
            chats: each with its trained turns, see PrepareOptions.
        """
        working = [self._documents(chat, turns) for chat, turns in chats]
        results: list[list[Document] | ChatError] = [[]] * len(working)
        encoded: dict[int, Encoded | None] = dict.fromkeys(range(len(working)))
        while encoded:
            texts = {}
            for number, one in encoded.items():
                try:
                    texts[number] = working[number].send(one)  # type: ignore[arg-type]
                except StopIteration as end:
                    results[number] = end.value
                except ChatError as error:
                    results[number] = error
            found = self._encoder.encode(list(texts.values()), self._template.has_blocks)
            encoded = dict(zip(texts, found, strict=True))
        return results

    def _documents(self, chat: Chat, turns: Turns) -> Finding[list[Document]]:
        """Documents of a chat.

        Raises:
            ChatError: it cannot be trained.
        """
        if token := self._encoder.spelled_in(chat):
            if self._spelled == "reject":
                raise ChatError(
                    f"a text spells the special token {token}; --spelled letters takes it as "
                    "letters"
                )
            chat = self._encoder.as_letters(chat)
        self.counts["chats"] += 1
        by_turn = turns in ("each", "last")
        count = chat.trained[-1] + 1 if by_turn else len(chat.messages)
        try:
            rendering = self._template.rendering(chat.messages[:count], chat.tools)
            if turns == "last":
                return [(yield from self._of_turn(chat.trained[-1], rendering, alone=True))]
            if turns == "each":
                return (yield from self._each(chat, rendering))
            return (yield from self._whole(chat, rendering, turns))
        except RenderError as error:
            raise ChatError(f"the chat template refuses it: {error}") from error

    def _each(self, chat: Chat, rendering: Rendering) -> Finding[list[Document]]:
        documents = []
        for turn in chat.trained:
            documents.append((yield from self._of_turn(turn, rendering)))
        return documents

    def _whole(self, chat: Chat, rendering: Rendering, turns: Turns) -> Finding[list[Document]]:
        """A chat in one document; in several if it is not stable and `turns` is auto."""
        marked = rendering.upto(len(chat.messages))
        text = without_blocks(marked)
        if self._template.has_blocks:
            whole = yield text
            return [self._document(whole, self._by_blocks(chat, rendering, text, whole))]
        upto = _upto(chat, rendering, text)
        # Most unstable chats differ in their letters already, and need not be encoded whole.
        unstable = next((turn for turn in upto if not text.startswith(upto[turn])), None)
        if unstable is None:
            whole = yield text
            trained, unstable = self._served(chat, rendering, text, whole, upto)
            if unstable is None:
                return [self._document(whole, trained)]
        if turns == "all":
            raise ChatError(
                f"message {unstable} is rendered otherwise once others follow, so it is not "
                "trained as served; --turns each makes a document of each answer"
            )
        self.counts["unstable"] += 1
        self.counts["whole"] += len(text)
        self.counts["each"] += sum(map(len, upto.values()))
        return (yield from self._each(chat, rendering))

    def _by_blocks(
        self, chat: Chat, rendering: Rendering, text: str, whole: Encoded
    ) -> NDArray[np.bool_]:
        """Trained tokens of a whole chat by its generation blocks."""
        trained = whole.inside(blocks_in(rendering.upto(len(chat.messages))))

        def served() -> tuple[NDArray[np.bool_], int | None]:
            return self._served(chat, rendering, text, whole, _upto(chat, rendering, text))

        if len(chat.trained) < sum(one["role"] == ASSISTANT for one in chat.messages):
            # Blocks mark all answers, also those that the record excludes from training.
            return trained & served()[0]
        if self._left_to_compare:
            self._left_to_compare -= 1
            # The comparison only serves a note.
            with suppress(ChatError, RenderError):
                as_served, unstable = served()
                if unstable is None:
                    self._compare(text, whole, as_served, trained)
        return trained

    def _served(
        self,
        chat: Chat,
        rendering: Rendering,
        text: str,
        whole: Encoded,
        upto: Mapping[int, str],
    ) -> tuple[NDArray[np.bool_], int | None]:
        """Trained tokens of a whole chat, and the first answer that is not stable in it.

        Args:
            chat: to be trained.
            rendering: of the chat.
            text: of the whole chat, without marks.
            whole: tokens of `text`.
            upto: from `_upto`.
        """
        trained = np.zeros(len(whole.ids), bool)
        unstable = None
        for turn in chat.trained:
            stop, missing = len(whole.ids), list[int]()
            if upto[turn] is not text:
                stop, missing = self._encoder.common(whole, text, upto[turn])
            if missing:
                unstable = turn if unstable is None else unstable
            else:
                trained[self._begin(turn, rendering, text, whole, stop) : stop] = True
        return trained, unstable

    def _of_turn(self, turn: int, rendering: Rendering, alone: bool = False) -> Finding[Document]:
        """An answer as it is served, in a document of its own.

        Args:
            turn: index of the answer.
            rendering: of its chat.
            alone: whether it is the only document of its chat.
        """
        marked = rendering.upto(turn + 1)
        text = without_blocks(marked)
        whole = yield text
        begin = self._begin(turn, rendering, text, whole, len(whole.ids))
        trained = np.zeros(len(whole.ids), bool)
        trained[begin:] = True
        if self._template.has_blocks:
            # A block belongs to this answer if it ends after the answer's prompt.
            blocks = [one for one in blocks_in(marked) if whole.token_at(one[1] - 1) >= begin]
            served, trained = trained, whole.inside(blocks)
            self._compare(text, whole, served, trained)
        return self._document(whole, trained, "" if alone else f"message {turn}: ")

    def _begin(self, turn: int, rendering: Rendering, text: str, whole: Encoded, stop: int) -> int:
        """First token of an answer that its prompt does not have.

        Args:
            turn: index of the answer.
            rendering: of its chat.
            text: rendering up to the answer, or beyond it.
            whole: tokens of `text`.
            stop: one past the last token of the answer.
        """
        prompt = without_blocks(rendering.upto(turn, prompt=True))
        begin, led = self._encoder.common(whole, text, prompt)
        if begin >= stop:
            raise ChatError(f"message {turn} has no token beyond its prompt")
        if not text.startswith(prompt):
            self.counts["led"] += 1
            self.examples.setdefault("led", self._encoder.text_of(led)[:60])
        return begin

    def _compare(
        self, text: str, whole: Encoded, served: NDArray[np.bool_], blocks: NDArray[np.bool_]
    ) -> None:
        """Count chats whose generation blocks differ from what is served."""
        differ = np.flatnonzero(served != blocks)
        if differ.size:
            first = int(differ[0])
            what = "train" if blocks[first] else "do not train"
            self.counts["blocks"] += 1
            piece = text[whole.begin(first) : whole.end(first)]
            self.examples.setdefault("blocks", f"{what} {piece!r}")

    def _document(self, whole: Encoded, trained: NDArray[np.bool_], place: str = "") -> Document:
        ids = np.asarray(whole.ids)
        if self._loss == "all":
            trained = np.ones(len(ids), bool)
        trained[:1] = False
        if not trained.any():
            raise ChatError(f"{place}nothing is trained in it")
        if self._encoder.special.isdisjoint(ids[trained].tolist()):
            self.counts["endless"] += 1
        return Document(ids, trained, place)


def _upto(chat: Chat, rendering: Rendering, text: str) -> dict[int, str]:
    """Index of each trained answer → rendering up to and including it; `text` is the whole
    chat's."""
    last = len(chat.messages) - 1
    return {
        turn: text if turn == last else without_blocks(rendering.upto(turn + 1))
        for turn in chat.trained
    }


def notes_for_user(counts: Counter[str], examples: dict[str, str]) -> Iterator[str]:
    """Yield notes for the user about chats.

    Args:
        counts: sum of all `SpanFinder.counts`.
    """
    chats = counts["chats"]
    if counts["unstable"]:
        growth = counts["each"] / max(1, counts["whole"])
        yield (
            f"{counts['unstable']:,} of {chats:,} chats are rendered otherwise once other messages "
            "follow: each of their answers is a document of its own, as it is served; these take "
            f"{growth:.1f} times the text (--turns last trains the last answer only)"
        )
    if counts["led"]:
        yield (
            f"the prompt of {counts['led']:,} answers ends in {examples['led']!r}, and they do not "
            "begin so; give reasoning_content, or --template-options that change the prompt"
        )
    if counts["blocks"]:
        yield (
            f"the template's generation blocks {examples['blocks']} in {counts['blocks']:,} of the "
            "chats that were looked at, other than what a model is served; they are followed"
        )
    if counts["endless"]:
        yield (
            f"{counts['endless']:,} documents have no special token that is trained, so the model "
            "does not learn to stop there; `perdure data inspect DIR --sample 3` shows them"
        )


def summed(parts: Sequence[dict[str, Any]]) -> tuple[Counter[str], dict[str, str]]:
    """Counts and first examples over the results of all parts."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for part in parts:
        counts.update(part["counts"])
        examples = {**part["examples"], **examples}
    return counts, examples
