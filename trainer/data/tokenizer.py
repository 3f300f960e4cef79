"""Tokenizers of data sets: from a Hugging Face file, newly trained, or plain bytes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from checkpointing.format.untrusted import read_object
from checkpointing.storage.place import StoragePlace, location
from checkpointing.storage.source import MOST_BYTES
from checkpointing.storage.steps import storage_of
from elastic.node.files import read_bytes
from trainer.data.shards import DataError

CONFIG = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
# End-of-document tokens of well-known tokenizers. Tokens of pre-training precede tokens of chats.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) with `vocab_size` tokens,
    including the end-of-document token. Deterministic."""
    if vocab_size < 257:
        raise DataError(f"--train-bpe {vocab_size}: must be at least 257: 256 bytes and an end")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All bytes, so that any text can be encoded; sorted, so that ids are reproducible.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens 0 to 255 are bytes; token 256 ends a document."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _byte_characters() -> list[str]:
    """Printable character of each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_file(path: str | Path) -> Path:
    """Path of the tokenizer.json at `path`, a file or its directory. Raises DataError if there is
    no such file."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(
            f"--tokenizer {path}: no tokenizer.json there; give the file or its directory"
        )
    return file


def read_tokenizer(file: str | StoragePlace) -> Tokenizer:
    """Read a Hugging Face tokenizer.json. Truncation, padding and BPE dropout, which would make the
    tokens of a text random, are turned off. Raises DataError if the file cannot be read,
    StorageError if the store does not answer or denies access."""
    place = location(file)
    try:
        return parse_tokenizer(storage_of(place).read(place, MOST_BYTES), file)
    except OSError as error:
        raise DataError(f"{file}: not a tokenizer.json: {error.strerror}") from error


def parse_tokenizer(
    content: bytes, file: str | StoragePlace, *, dropout: bool = False
) -> Tokenizer:
    """Create a tokenizer from the contents of a tokenizer.json, as `read_tokenizer` does. `file`:
    its name, for messages. `dropout`: whether to leave BPE dropout (Provilkov et al. 2020) on.
    Raises DataError if the contents are no tokenizer."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataError(f"{file}: not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE) and not dropout:
        tokenizer.model.dropout = None
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Texts of the special tokens, such as <|im_start|>."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and token.content]


def find_eos(
    tokenizer: Tokenizer, wanted: str | None, directory: Path | None, *, chats: bool = False
) -> int:
    """Id of the token that ends a document. Raises DataError if there is no such token.

    Args:
        wanted: text of the token. None: candidates are the tokens of well-known tokenizers, and the
            one in tokenizer_config.json. The first that the tokenizer has is taken.
        directory: directory of the tokenizer.json; None if the tokenizer is not from a file.
        chats: whether the token in tokenizer_config.json is the first candidate, else the last.
    """
    names = [wanted] if wanted else list(_KNOWN_ENDS)
    named = None if wanted else special_variables(directory).get("eos_token")
    if named:
        names.insert(0 if chats else len(names), named)
    for name in names:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    raise DataError(
        f"--eos: the tokenizer has none of {', '.join(names)}; name the token that ends a document"
    )


def read_tokenizer_config(directory: Path | None) -> dict[str, Any]:
    """Read tokenizer_config.json; {} if there is none. Raises DataError if it is no JSON object."""
    file = directory and directory / CONFIG
    if not file or not file.is_file():
        return {}
    try:
        return read_object(read_bytes(file, follow=True))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: cannot be read as a JSON object: {error}; copy the file again"
        ) from error


def special_variables(directory: Path | None) -> dict[str, str]:
    """Return the texts of special tokens by the names that templates use, such as eos_token."""
    variables = {}
    for key, value in read_tokenizer_config(directory).items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            variables[key] = token
    return variables


def start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that the tokenizer's post-processor puts before a text, such as <|begin_of_text|> of
    Llama 3. Tokens after a text are ignored: documents end in the end-of-document token."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=wanted).ids for wanted in (False, True))
    places = range(len(whole) - len(bare) + 1)
    begin = next((n for n in places if whole[n : n + len(bare)] == bare), 0)
    return tuple(whole[:begin])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Largest token id plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
