"""Options of data preparation. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["auto", "file", "separator", "form-feed", "blank-line", "line", "window"]
OnBad = Literal["skip", "fail"]
Splits = Literal["by-name", "ignore"]
SpecialTokens = Literal["letters", "tokens"]
Turns = Literal["auto", "all", "each", "last"]
Loss = Literal["assistant", "all"]
TooLong = Literal["drop", "cut"]
Spelled = Literal["reject", "letters"]
Kind = Literal["documents", "chats", "pairs"]
OF_CHATS = (
    *("chat", "pairs", "turns", "template", "template_options", "date", "loss", "max_tokens"),
    *("too_long", "spelled"),
)
"""Options that do not apply to plain text."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Everything besides the inputs that determines the bytes of a prepared data set."""

    tokenizer: str | None = None
    """A tokenizer.json, the directory of one, or "bytes"."""
    train_bpe: int | None = None
    """Size of a byte-level BPE vocabulary to train on the inputs, instead."""
    eos: str | None = None
    """Token that ends a document; found by itself in well-known tokenizers."""
    field: str = "text"
    """Field of json objects, column of csv, parquet and arrow; a.b is field b of field a."""
    split_documents: Split = "auto"
    """What one document is in txt and md files. auto: chosen by a look at each file.
    separator: what <|endoftext|> or <|end_of_text|> ends. window: cut at the ends of paragraphs,
    about evenly."""
    splits: Splits = "by-name"
    """by-name: files and folders named validation, valid, val, dev or eval make the validation
    split, and those named test are left out. ignore: names say nothing."""
    validation_fraction: float | None = None
    """Share of the documents in the validation split, chosen by a hash of their text (default 0.02,
    or 0 where files make the validation split)."""
    shard_tokens: int = 1 << 28
    """Tokens after which a shard ends with the next document."""
    on_bad: OnBad = "skip"
    """Whether a bad record is left out and listed, or ends everything. The same for a link in a
    folder that leads nowhere."""
    special_tokens: SpecialTokens = "letters"
    """What special tokens of the tokenizer are that are spelled out in a text, such as <|im_start|>
    in chats."""
    chat: bool = False
    """The records are chats: messages, ShareGPT's, Alpaca's, or prompt and completion. They are
    rendered by the chat template of the tokenizer."""
    pairs: bool = False
    """The records are pairs of answers: prompt, chosen, rejected."""
    turns: Turns = "auto"
    """What of a chat is trained. all: every answer, in one document. each: every answer, in a
    document of its own, as it is served. last: the last answer. auto: all, or each for the chats
    that the template renders otherwise once others follow."""
    template: str | None = None
    """File with a chat template, instead of the tokenizer's."""
    template_options: str | None = None
    """JSON object of what else the template is given, such as {"enable_thinking": false}."""
    date: str | None = None
    """Day, such as 2026-01-31, for templates that write today's date."""
    loss: Loss = "assistant"
    """Whether the answers are trained, or all of a chat."""
    max_tokens: int | None = None
    """Longest document of a chat, in tokens; data.seq_len of the recipe, for example. Of a pair
    both answers together, each with its prompt."""
    too_long: TooLong = "drop"
    """What becomes of longer ones: they are left out and listed, or their head is kept (of each
    answer of a pair half as many tokens)."""
    spelled: Spelled = "reject"
    """What becomes of a chat whose texts spell a special token: it is left out and listed, or these
    are letters."""

    @property
    def kind(self) -> Kind:
        """What the records are."""
        return "pairs" if self.pairs else "chats" if self.chat else "documents"
