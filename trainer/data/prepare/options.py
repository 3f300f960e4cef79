"""What a person may choose when data is prepared. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["auto", "file", "separator", "form-feed", "blank-line", "line", "window"]
OnBad = Literal["skip", "fail"]
Splits = Literal["by-name", "ignore"]
SpecialTokens = Literal["letters", "tokens"]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What decides the bytes of a prepared data set, besides its inputs."""

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
