"""Files that accompany the weights in a run's checkpoints.

[Note: beside the weights] Chat template, stop tokens and sampling settings are files beside a
model's weights. Checkpoints of a run from `model.init_from` have them byte for byte
(`checkpointing.storage.source.beside_weights` finds them). Three may differ: config.json has the
dtype of the run's weights, the tokenizer is the data's if the data has other tokens, and
generation_config.json gets a stop token if the model has none.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from checkpointing.format.untrusted import read_object
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.source import beside_weights
from trainer.data.tokenizer import parse_tokenizer, start_ids
from trainer.models.family import Family
from trainer.models.hf import ModelConfigError, config_json, generation_config_json, tokenizer_files
from trainer.recipe.architecture import Architecture

CONFIG, GENERATION_CONFIG, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
ABOUT_TOKENS = (
    *("tokenizer", "tokenization", "special_tokens_map", "added_tokens", "vocab.", "merges."),
    *("chat_template", "additional_chat_templates/", "tekken", "spiece", "sentencepiece"),
)
"""Prefixes of the names of files that belong to a tokenizer and do not fit another one."""


def files_beside(
    init_from: StoragePlace | None,
    data: StoragePlace,
    index: Mapping[str, Any],
    architecture: Architecture | None = None,
    family: Family | None = None,
) -> tuple[dict[str, bytes], list[str]]:
    """Return (file name → contents, notes for the user) for the checkpoints of a run. Raises
    ModelConfigError or DataError if a file cannot be used.

    Args:
        init_from: checkpoint from which the run begins, if any.
        data: prepared data set, with the tokenizer.
        index: index.json of the data set.
        architecture: needed without `init_from`.
        family: family of the model; None: a bundled family.
    """
    eos = index["eos_id"]
    prepared = tokenizer_files(data / TOKENIZER, eos)
    notes: list[str] = []
    if init_from is None:
        assert architecture is not None
        files = {
            **prepared,
            CONFIG: _json(config_json(architecture, family, eos_id=eos)),
            GENERATION_CONFIG: _json(generation_config_json(eos_id=eos)),
        }
    else:
        files = _with_tokenizer(_carried(init_from, notes), prepared, init_from, data, notes)
        stops = stop_ids(files, init_from)
        if not stops:
            known = _object(files, GENERATION_CONFIG, init_from)
            # without a stop token, generation would run to its length limit
            files[GENERATION_CONFIG] = _json({**known, "eos_token_id": eos})
        elif eos not in stops and "kind" not in index:  # in chats the template ends answers
            notes.append(
                f"{data}: its documents end in token {eos}, but the model of {init_from} stops at "
                f"{', '.join(map(str, stops))}, so the model learns to end differently; to avoid "
                "this, prepare the data again with --eos"
            )
    if files[TOKENIZER] == prepared[TOKENIZER] and "start_ids" in index:
        return files, notes
    begin = list(start_ids(parse_tokenizer(files[TOKENIZER], TOKENIZER)))
    prepared_begin = index.get("start_ids", [])
    if begin != prepared_begin:
        notes.append(
            f"{data}: its documents begin with {_tokens(prepared_begin)}, but the tokenizer of the "
            f"checkpoints begins a text with {_tokens(begin)}; prepare the data again"
        )
    return files, notes


def files_without_tokenizer(
    init_from: StoragePlace | None,
    architecture: Architecture | None = None,
    family: Family | None = None,
) -> tuple[dict[str, bytes], list[str]]:
    """Return `files_beside` for data that has no tokenizer. Raises ModelConfigError."""
    if init_from is None:
        assert architecture is not None
        return {CONFIG: _json(config_json(architecture, family))}, []
    notes: list[str] = []
    return _carried(init_from, notes), notes


def stop_ids(files: Mapping[str, bytes], where: StoragePlace) -> list[int]:
    """Stop tokens of a model, from generation_config.json, else from config.json, as in
    transformers. Raises ModelConfigError if one of these files is no JSON object."""
    for name in (GENERATION_CONFIG, CONFIG):
        stop = _object(files, name, where).get("eos_token_id")
        if stop is not None:
            ids = stop if isinstance(stop, list) else [stop]
            return [token for token in ids if isinstance(token, int)]
    return []


def of_bf16(files: dict[str, bytes]) -> dict[str, bytes]:
    config = json.loads(files[CONFIG])
    return {**files, CONFIG: _json({**config, "dtype": "bfloat16"})}


def _carried(directory: StoragePlace, notes: list[str]) -> dict[str, bytes]:
    """Return the files beside the weights in `directory`, with dtype float32 in config.json. Adds a
    note on files that are not copied."""
    files, left = beside_weights(directory)
    if left:
        notes.append(f"{directory}: not copied into checkpoints: {left}")
    if CONFIG not in files:
        raise ModelConfigError(f"{directory / CONFIG}: cannot be copied; put a regular file there")
    config = _object(files, CONFIG, directory)
    others = {key for key in ("dtype", "torch_dtype") if config.get(key, "float32") != "float32"}
    if others:  # a run's checkpoints are float32, except by `of_bf16`
        files[CONFIG] = _json(config | dict.fromkeys(others, "float32"))
    return files


def _with_tokenizer(
    files: dict[str, bytes],
    prepared: Mapping[str, bytes],
    directory: StoragePlace,
    data: StoragePlace,
    notes: list[str],
) -> dict[str, bytes]:
    """Return `files` with the prepared tokenizer if they have none or the data has other tokens."""
    if TOKENIZER not in files:
        return {**prepared, **files}
    if files[TOKENIZER] == prepared[TOKENIZER]:
        return files
    theirs = parse_tokenizer(files[TOKENIZER], directory / TOKENIZER)
    if theirs.get_vocab() == parse_tokenizer(prepared[TOKENIZER], data / TOKENIZER).get_vocab():
        return files
    notes.append(
        f"{data}: was prepared with other tokens than those of {directory}; checkpoints get the "
        "tokenizer of the data, and no chat template"
    )
    # a chat template writes tokens that the other tokenizer lacks
    kept = {name: content for name, content in files.items() if not name.startswith(ABOUT_TOKENS)}
    return {**kept, **prepared}


def _tokens(ids: Sequence[int]) -> str:
    return f"token {', '.join(map(str, ids))}" if ids else "no token of its own"


def _object(files: Mapping[str, bytes], name: str, where: StoragePlace) -> dict[str, Any]:
    try:
        return read_object(files.get(name, b"{}"))
    except ValueError as error:
        raise ModelConfigError(
            f"{where / name}: not a JSON object: {error}; copy it again"
        ) from error


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
