"""Spans of the templates of others against what transformers and trl say of them, where trl is
installed (`pip install --no-deps trl`): its package has the templates of about thirty families,
each once as it is published, and once with generation blocks."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.jobs import soak
from tests.trainer.data.chat_families import SPECIAL, VARIABLES, tokenizer
from trainer.data.prepare.chats import ChatError, read_chat
from trainer.data.prepare.spans import ChatEncoder, SpanFinder
from trainer.data.prepare.template import ChatTemplate, RenderError, blocks_in, without_blocks

FOUND = importlib.util.find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND and FOUND.origin else Path()
pytestmark = [soak, pytest.mark.skipif(FOUND is None, reason="trl is not installed")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def says(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one turn": [says("user", "Capital of France?"), says("assistant", "Paris.")],
    "two turns": [
        says("user", "2+2?"), says("assistant", "4"),
        says("user", "3+3?"), says("assistant", "It is 6."),
    ],
    "system": [
        says("system", "Be brief."), says("user", "Hi"), says("assistant", "Hello."),
        says("user", "Bye"), says("assistant", "Bye!"),
    ],
    "reasoning": [
        says("user", "2+2?"), says("assistant", "4", reasoning_content="Two and two."),
        says("user", "3+3?"), says("assistant", "6", reasoning_content="Three."),
    ],
    "tags": [
        says("user", "2+2?"), says("assistant", "<think>\nTwo.\n</think>\n\n4"),
        says("user", "3+3?"), says("assistant", "<think>\nThree.\n</think>\n\n6"),
    ],
    "tool": [
        says("user", "1+2?"), says("assistant", "", tool_calls=[CALL]),
        says("tool", "3", name="add"), says("assistant", "3."),
    ],
    "spaces": [
        says("user", "  x "), says("assistant", "  leading and trailing  "),
        says("user", "y"), says("assistant", "\n\nz 😀\n"),
    ],
}  # fmt: skip


def published():
    for training in sorted(FOLDER.glob("*_training.jinja")):
        original = training.with_name(training.name.replace("_training", ""))
        yield original.stem, original.read_text(), training.read_text()


def compiled(source):
    return ChatTemplate({"default": source}, VARIABLES, "2026-01-31")


def joined(spans):
    """Spans that are not empty, neighbours as one."""
    found = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif begin < end:
            found.append((begin, end))
    return found


def test_blocks_and_masks_are_those_of_transformers(monkeypatch):
    from datetime import date, datetime

    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 31)

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)
    assert Fixed.now().date() == date(2026, 1, 31)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **VARIABLES)
    encoder = ChatEncoder(tokenizer(), str(SPECIAL))
    counts, differ = Counter(), []
    for name, _, training in published():
        for kind, messages in CHATS.items():
            try:
                theirs, spans = chat_template_utils.render_jinja_template(
                    [messages],
                    chat_template=training,
                    return_assistant_tokens_mask=True,
                    **VARIABLES,
                )
            except Exception:
                with pytest.raises(RenderError):
                    compiled(training).marked(messages, None)
                counts["refused by both"] += 1
                continue
            of = read_chat({"messages": messages})
            marked = compiled(training).marked(of.messages, None)
            text = without_blocks(marked)
            same = text == theirs[0] and joined(blocks_in(marked)) == joined(map(tuple, spans[0]))
            counts[same] += 1
            if not same:
                differ.append((name, kind))
                continue
            oracle = fast.apply_chat_template(
                messages,
                chat_template=training,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            (whole,) = encoder.encode([text], places=True)
            mask = whole.inside(blocks_in(marked)).astype(int).tolist()
            assert whole.ids == oracle["input_ids"], (name, kind)
            if mask != oracle["assistant_masks"]:
                differ.append((name, kind, sum(mask), sum(oracle["assistant_masks"])))
    print(counts, differ)
    assert counts[True] > 180
    assert not differ


def test_beginnings_are_as_they_are_rendered_by_themselves():
    """Of about half of the families one rendering of a chat gives nearly all of them."""

    def text(render, *arguments):
        try:
            return render(*arguments)
        except RenderError as error:
            return error

    saved = Counter()
    for name, original, _ in published():
        template = compiled(original)
        for messages in CHATS.values():
            of = read_chat({"messages": messages}).messages
            one = text(template.rendering, of, None)
            if isinstance(one, RenderError):
                assert str(text(template.marked, of, None)) == str(one)
                continue
            for key in [(n, ask) for n in range(1, len(of) + 1) for ask in (False, True)]:
                expected = text(template.marked, of[: key[0]], None, key[1])
                assert str(text(one.upto, *key)) == str(expected), (name, key)
                saved[name] += key[0] in one._places
    print(saved)
    assert sum(count > 30 for count in saved.values()) >= 12


def test_by_turns_each_document_is_the_chat_until_there():
    """What is served: the rendering of all messages up to an answer, whatever later ones change."""
    encoder, counts = ChatEncoder(tokenizer(), str(SPECIAL)), Counter()
    for name, original, _ in published():
        template = compiled(original)
        for messages in CHATS.values():
            of = read_chat({"messages": messages})
            (found,) = SpanFinder(template, encoder, "assistant", "reject").documents(
                [(of, "each")]
            )
            if isinstance(found, ChatError):
                continue
            texts = [template.text(of.messages[: turn + 1], of.tools) for turn in of.trained]
            assert [one.ids.tolist() for one in found] == [one.ids for one in encoder.encode(texts)]
            whole = template.text(of.messages, of.tools)
            counts[name] += not all(whole.startswith(text) for text in texts)
    print(counts)
    assert sum(count > 0 for count in counts.values()) >= 4, "of which later messages change"


def test_the_law_is_what_trl_trains_where_it_follows_it():
    """Without blocks: of twelve families in every chat, but for white space after an answer."""
    encoder = ChatEncoder(tokenizer(), str(SPECIAL))
    verdicts = {}
    for name, original, training in published():
        verdicts[name] = Counter()
        for messages in CHATS.values():
            of = read_chat({"messages": messages})
            try:
                ours = SpanFinder(compiled(original), encoder, "assistant", "reject")
                (found,) = ours.documents([(of, "auto")])
                if isinstance(found, ChatError):
                    raise found
                document, *more = found
                marked = compiled(training).marked(of.messages, None)
            except (ChatError, RenderError):
                verdicts[name]["refused"] += 1
                continue
            (whole,) = encoder.encode([without_blocks(marked)], places=True)
            theirs = whole.inside(blocks_in(marked))
            if more:
                verdicts[name]["each"] += 1
            elif document.ids.tolist() != whole.ids:
                verdicts[name]["text"] += 1
            else:
                extra = theirs & ~document.trained
                missing = document.trained & ~theirs
                blank = encoder._tokenizer.decode(document.ids[missing].tolist()).strip() == ""
                verdicts[name]["equal" if not extra.any() and blank else "other"] += 1
    for name, verdict in verdicts.items():
        print(f"{name:28}", dict(verdict))
    same = [
        name
        for name, verdict in verdicts.items()
        if verdict["equal"] and not verdict.keys() - {"equal", "refused"}
    ]
    print(len(same), same)
    assert len(same) >= 12
