"""Chat templates of several families, in words of our own, and a tokenizer for all of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from trainer.data.prepare import tokenise
from trainer.data.prepare.chats import Chat, read_chat
from trainer.data.tokenizer import train_bpe

PLAIN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{{- call.function.name ~ ' ' ~ (call.function.arguments | tojson) }}</tool_call>{% endfor %}
{{- (m.content or '') + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""ChatML: every turn alike, nothing changes later."""

THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
"""What was thought is forgotten once the user speaks again."""

INST = """\
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must take turns') }}{% endif %}
{%- if m.role == 'user' %}{{ bos_token if loop.first else '' }}
{{- '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content.strip() + eos_token }}{% endif %}{% endfor %}"""
"""Without a generation prompt: what the user says ends in one."""

LED = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"""
"""The prompt begins to think, and answers of data sets do not."""

BLOCKS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""It says itself what is an answer."""

BARE = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""No special token at all."""

FAMILIES = {"plain": PLAIN, "thinking": THINKING, "inst": INST, "led": LED, "bare": BARE}
# Qwen's: line ends stay together, whatever follows.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|user|>"]
SPECIAL += ["<|assistant|>"]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer() -> Tokenizer:
    """Byte-level BPE whose merges cross what templates put side by side."""
    texts = ["assistant user Two and two is four. \n\n: \n\n\nassistant: ", "\n\n", " \n", ". \n\n"]
    made = train_bpe(texts * 8, 340)
    words = Split(Regex(_WORDS), "isolated")
    made.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(name) for name in ("<think>", "</think>", "<tool_call>")])
    return made


def chat(*turns: str, **more: object) -> Chat:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return read_chat({"messages": messages, **more})


def law(template, encoder, of):
    """The law, with everything encoded whole: documents as (ids, trained)."""
    tokens = encoder.tokenizer

    def encode(text):
        return tokens.encode(text, add_special_tokens=False).ids

    whole = encode(template.marked(of.messages, of.tools))
    one, each = (whole, [False] * len(whole)), []
    stable = True
    for turn in of.trained:
        prompt = encode(template.marked(of.messages[:turn], of.tools, prompt=True))
        upto = encode(template.marked(of.messages[: turn + 1], of.tools))
        pairs = zip(prompt, upto, strict=False)
        same = next((n for n, (p, q) in enumerate(pairs) if p != q), min(len(prompt), len(upto)))
        each.append((upto, [n >= same for n in range(len(upto))]))
        stable = stable and whole[: len(upto)] == upto
        one[1][same : len(upto)] = [True] * (len(upto) - same)
    return [one] if stable else each


@contextmanager
def without_workers() -> Iterator[None]:
    """Chats are rendered in this process: workers import for a second."""

    def run(jobs, workers):
        return ((job.number, tokenise._tokenise_unit(job)) for job in jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise, "_run", run)
        yield
