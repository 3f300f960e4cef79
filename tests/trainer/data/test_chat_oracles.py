"""Spans of the templates of others against what transformers and trl say of them, where trl is
installed (`make oracles`): its package has the templates of about thirty families, each once as it
is published, and once with generation blocks."""

import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.distributed.jobs import soak
from tests.trainer.data.chat_families import SPECIAL, VARIABLES, law, tokenizer
from trainer.data.prepare.chats import ChatError, read_chat
from trainer.data.prepare.spans import ChatEncoder, ChatSpanFinder
from trainer.data.prepare.template import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateSource,
    split_blocks,
)
from trainer.data.tokenizer import read_tokenizer, special_variables

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


def compiled(source, variables=VARIABLES):
    return ChatTemplate(ChatTemplateSource({"default": source}, variables), "2026-01-31")


def joined(spans):
    """Spans that are not empty, neighbours as one."""
    found = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif begin < end:
            found.append((begin, end))
    return found


@pytest.fixture
def january(monkeypatch):
    """Templates that write today's date write the last of January 2026, by transformers too."""
    from datetime import datetime

    from transformers.utils import chat_template_utils

    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 31)

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


def compared(training, tokens, variables, chats):
    """How many chats both refuse, and how many have the text, the blocks, the tokens and the mask
    of transformers, by a template with blocks; and those that have not."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokens.to_str()), **variables
    )
    template = compiled(training, variables)
    encoder = ChatEncoder(tokens, training)
    counts, differ = Counter(), []
    for kind, messages in chats.items():
        try:
            theirs, spans = render_jinja_template(
                [messages],
                chat_template=training,
                return_assistant_tokens_mask=True,
                **variables,
            )
        except Exception:
            with pytest.raises(ChatTemplateError):
                template.marked(messages, None)
            counts["refused by both"] += 1
            continue
        marked = template.marked(read_chat({"messages": messages}).messages, None)
        whole, blocks = encoder.encode(marked), split_blocks(marked)[1]
        oracle = fast.apply_chat_template(
            messages, chat_template=training, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = (whole.blocks > 0).astype(int).tolist()
        same = {
            "text": whole.text == theirs[0],
            "blocks": joined(blocks) == joined(map(tuple, spans[0])),
            "tokens": whole.ids.tolist() == oracle["input_ids"],
            "mask": mask == oracle["assistant_masks"],
        }
        counts[all(same.values())] += 1
        if not all(same.values()):
            differ.append((kind, same, sum(mask), sum(oracle["assistant_masks"])))
    return counts, differ


def test_blocks_and_masks_are_those_of_transformers(january):
    counts, differ = Counter(), {}
    for name, _, training in published():
        some, others = compared(training, tokenizer(), VARIABLES, CHATS)
        counts += some
        differ |= {name: others} if others else {}
    print(counts)
    assert counts[True] > 180
    assert not differ


REAL = {
    "qwen3": "qwen3", "qwen2_5": "qwen3", "llama3": "llama3_1", "deepseekv3": "deepseek_v3",
    "gptoss": "gptoss", "gemma3": "gemma3",
}  # fmt: skip
"""Family of trl → tokenizer of a package of npm."""


def real(package):
    """(tokenizer, variables of templates) of a published model."""
    home = Path(os.environ["REAL_TOKENIZERS"], f"tokenizer-{package}", "models")
    return read_tokenizer(home / "tokenizer.json"), special_variables(home)


@pytest.mark.skipif("REAL_TOKENIZERS" not in os.environ, reason="in `make oracles`")
@pytest.mark.parametrize("family", REAL)
def test_by_real_tokenizers_tokens_and_masks_are_those_of_transformers(january, family):
    """So are those of the law what the law says, with every text encoded whole."""
    (original, training), *_ = [texts for name, *texts in published() if name == family]
    emoji = [says("user", "흠 😀?"), says("assistant", "네 👩‍🚀, ok.")]
    chats = {**CHATS, "emoji": emoji}
    tokens, variables = real(REAL[family])
    counts, differ = compared(training, tokens, variables, chats)
    print(family, dict(counts))
    assert counts[True] > 5
    assert not differ
    template, encoder = compiled(original, variables), ChatEncoder(tokens, original)
    served = 0
    for kind, messages in chats.items():
        of = read_chat({"messages": messages})
        try:
            finder = ChatSpanFinder(template, encoder, "assistant", "letters")
            found = finder.documents(finder.rendered(of), "auto")
        except ChatError as error:
            print(kind, error)
            continue
        served += 1
        expected = law(template, encoder, of)
        assert [one.ids.tolist() for one in found] == [ids for ids, _ in expected], kind
        for one, (_, trained) in zip(found, expected, strict=True):
            assert one.trained.tolist() == [False, *trained[1:]], kind
    assert served > 5


def test_by_turns_each_document_is_the_chat_until_there():
    """What is served: the rendering of all messages up to an answer, whatever later ones change."""
    encoder, counts = ChatEncoder(tokenizer(), str(SPECIAL)), Counter()
    for name, original, _ in published():
        template = compiled(original)
        for messages in CHATS.values():
            of = read_chat({"messages": messages})
            try:
                finder = ChatSpanFinder(template, encoder, "assistant", "reject")
                found = finder.documents(finder.rendered(of), "each")
            except ChatError:
                continue
            each = [
                encoder.encode(template.marked(of.messages[: turn + 1], of.tools))
                for turn in of.trained
            ]
            assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in each]
            whole = encoder.encode(template.marked(of.messages, of.tools)).text
            counts[name] += not all(whole.startswith(one.text) for one in each)
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
                ours = ChatSpanFinder(compiled(original), encoder, "assistant", "reject")
                document, *more = ours.documents(ours.rendered(of), "auto")
                marked = compiled(training).marked(of.messages, None)
            except (ChatError, ChatTemplateError):
                verdicts[name]["refused"] += 1
                continue
            whole = encoder.encode(marked)
            theirs = whole.blocks > 0
            if more:
                verdicts[name]["each"] += 1
            elif document.ids.tolist() != whole.ids.tolist():
                verdicts[name]["text"] += 1
            else:
                extra = theirs & ~document.trained
                missing = document.trained & ~theirs
                blank = encoder.tokenizer.decode(document.ids[missing].tolist()).strip() == ""
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
