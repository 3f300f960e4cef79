"""Options of data preparation. Imports nothing slow."""

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
"""Options for chats and pairs only."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """All options that determine the bytes of a prepared data set from its inputs."""

    tokenizer: str | None = None
    """tokenizer.json, its directory, or "bytes"."""
    train_bpe: int | None = None
    """Size of a byte-level BPE vocabulary to train on the inputs; replaces `tokenizer`."""
    eos: str | None = None
    """Token that ends a document; default: the one of well-known tokenizers that the tokenizer has,
    or that of tokenizer_config.json."""
    field: str = "text"
    """Field of json objects, column of csv, parquet and arrow; a.b is field b of field a."""
    split_documents: Split = "auto"
    """Extent of one document in txt and md files. auto: chosen from the beginning of each file.
    separator: a document ends in <|endoftext|> or <|end_of_text|>. window: cut at ends of
    paragraphs, into about equal parts."""
    splits: Splits = "by-name"
    """by-name: files and folders named validation, valid, val, dev or eval form the validation
    split, and those named test are left out. ignore: names do not matter."""
    validation_fraction: float | None = None
    """Share of the documents in the validation split, chosen by a hash of their text (default 0.02,
    or 0 if files form the validation split)."""
    shard_tokens: int = 1 << 28
    """Minimum tokens of a shard; it ends with the document that reaches this number."""
    on_bad: OnBad = "skip"
    """Whether a bad record, or a link in a folder that cannot be followed, is skipped and listed,
    or is an error."""
    special_tokens: SpecialTokens = "letters"
    """Whether a text that spells a special token, such as <|im_start|>, is encoded as ordinary
    letters, or as the special token."""
    chat: bool = False
    """Records are chats: messages, ShareGPT's, Alpaca's, or prompt and completion. The tokenizer's
    chat template renders them."""
    pairs: bool = False
    """Records are pairs of answers: prompt, chosen, rejected."""
    turns: Turns = "auto"
    """Trained answers of a chat. all: every answer, in one document. each: every answer, in its own
    document, as it is served. last: the last answer. auto: all, but each for chats whose answers
    the template renders differently once further messages follow."""
    template: str | None = None
    """File with a chat template; replaces the tokenizer's."""
    template_options: str | None = None
    """JSON object of further template variables, such as {"enable_thinking": false}."""
    date: str | None = None
    """Day, such as 2026-01-31, for templates that write today's date."""
    loss: Loss = "assistant"
    """Whether only the assistant's answers are trained, or all tokens of a chat."""
    max_tokens: int | None = None
    """Longest document of a chat, in tokens, such as data.seq_len of the recipe. For a pair: of
    both answers together, each with its prompt."""
    too_long: TooLong = "drop"
    """Whether longer documents are dropped and listed, or cut at the limit (each answer of a pair
    at half of it)."""
    spelled: Spelled = "reject"
    """Whether a chat whose texts spell a special token is rejected and listed, or is encoded with
    ordinary letters in its place."""

    @property
    def kind(self) -> Kind:
        """Kind of the records, by the options `chat` and `pairs`."""
        return "pairs" if self.pairs else "chats" if self.chat else "documents"
