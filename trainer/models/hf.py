"""Reads and writes the files that accompany the weights in a Hugging Face checkpoint.

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
from checkpointing.storage.place import StoragePlace, location
from checkpointing.storage.source import MOST_BYTES, beside_weights
from checkpointing.storage.steps import storage_of
from trainer.data.tokenizer import parse_tokenizer, start_ids
from trainer.models.family import Family, UnsupportedModelError, family_of
from trainer.recipe import RecipeError
from trainer.recipe.architecture import ROPE_KEYS, Architecture, RopeScalingSection

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}


_BY_THEIRS = "transformers trains such a model itself (model.implementation: auto)"
_WITHOUT_SCALING = (
    "if the weights were trained without it, and it only serves longer texts, remove it "
    f"from the file; else {_BY_THEIRS}"
)
_CURES = {
    "attention_bias": f"its weights have biases: {_BY_THEIRS}",
    **dict.fromkeys(
        ("attention_dropout", "resid_pdrop", "embd_pdrop"), "write 0.0 to train without it"
    ),
    "quantization_config": "use the checkpoint that is not quantised",
    "transformers_weights": "rename the file to model.safetensors, and remove the key",
    "use_sliding_window": "write false if no sequence is longer than the window",
    "layer_types": "write full_attention if no sequence is longer than the sliding window",
    "rope_type": _WITHOUT_SCALING,
}
"""Key → remedy for an unsupported value."""

_LOCAL_THETA, _SLIDING, _FULL = "rope_local_base_freq", "sliding_attention", "full_attention"
"""Keys of Gemma 3. _LOCAL_THETA: the rotary base of layers with a window. _SLIDING and _FULL: in
files of transformers 5, the objects with rotary parameters of layers with and without a window."""

_ORIGINAL = "original_max_position_embeddings"
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor")


class ModelConfigError(ValueError):
    """A file of a checkpoint cannot be used; the message has the file and the key."""


class UnsupportedConfigError(ModelConfigError, UnsupportedModelError):
    """A config.json describes a model that no family of Perdure supports, or one of another family
    than the caller requires."""


MOST_LAYERS = 10_000
_CONFIG_BYTES = 16 << 20


def read_config(path: str | StoragePlace, family: Family | None = None) -> Architecture:
    """Read the architecture in a config.json, in the format of transformers 4 or 5.

    Args:
        path: checkpoint directory, or the file itself.
        family: required family; None: the bundled family of its `model_type`.

    Raises:
        ModelConfigError: the file or a key is missing or malformed.
        UnsupportedConfigError: the family does not support the model.
    """
    file, config = _file_of(path), read_json(path)
    try:
        architecture = _architecture(config, family)
        # refused here, because the caller would build so many layers
        if architecture.num_hidden_layers > MOST_LAYERS:
            layers = architecture.num_hidden_layers
            raise ValueError(
                f"num_hidden_layers must be at most {MOST_LAYERS:,}, but it is {layers:,}; "
                "correct the file"
            )
        return architecture
    except UnsupportedModelError as error:
        raise UnsupportedConfigError(f"{file}: {error}", error.reason) from error
    except ValueError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def read_json(path: str | StoragePlace) -> dict[str, Any]:
    """Read a config.json. `path`: checkpoint directory, or the file itself. Raises ModelConfigError
    if the file cannot be read, is no JSON object, or names an unsupported format of weights."""
    file = _file_of(path)
    try:
        config = read_object(storage_of(file).read(file, _CONFIG_BYTES))
    except OSError as error:
        raise ModelConfigError(
            f"{file}: cannot be read ({error.strerror}); use the directory of a Hugging Face "
            "checkpoint"
        ) from error
    except ValueError as error:
        raise ModelConfigError(
            f"{file}: not a JSON object: {error}; copy the file again"
        ) from error
    problem = None
    if config.get("quantization_config"):
        problem = _unsupported("quantization_config", "{…}", "unquantized weights")
    elif name := config.get("transformers_weights"):
        problem = _unsupported("transformers_weights", name, "model.safetensors or its index")
    if problem:
        raise ModelConfigError(f"{file}: {problem}")
    return config


def _file_of(path: str | StoragePlace) -> StoragePlace:
    path = location(path)
    return path / "config.json" if storage_of(path).is_directory(path) else path


def _architecture(config: dict[str, Any], family: Family | None) -> Architecture:
    model_type = config.get("model_type")
    family = family or family_of(model_type)
    if model_type != family.model_type:
        raise _unsupported("model_type", model_type, repr(family.model_type))
    for other, key in family.other_names.items():
        if other in config:
            config.setdefault(key, config[other])
    for key, value in family.fixed.items():
        if config.get(key, value) != value:
            raise _unsupported(key, config[key], repr(value))
    kinds = [] if "layer_types" in family.options else config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise _unsupported("layer_types", config["layer_types"], "'full_attention' throughout")

    # config.json may leave out values that equal transformers' defaults.
    config = {**_COMMON_DEFAULTS, **family.defaults, **config}
    heads = _positive(config, "num_attention_heads", int)
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    if config["head_dim"] is None:
        config["head_dim"] = _positive(config, "hidden_size", int) // heads
    if not isinstance(config["tie_word_embeddings"], bool):
        raise _malformed("tie_word_embeddings", config["tie_word_embeddings"], "true or false")
    theta, scaling = _rope(config, family)
    architecture = Architecture(
        model_type=family.model_type,
        **{key: _positive(config, key, int) for key in _SIZES},
        rms_norm_eps=_positive(config, "rms_norm_eps", float),
        initializer_range=_positive(config, "initializer_range", float),
        tie_word_embeddings=config["tie_word_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        options={key: config[key] for key in family.options if key in config},
    )
    try:
        return family.complete(architecture)
    except RecipeError as error:
        raise ValueError(str(error).replace("model.architecture.options.", "", 1)) from error


def _rope(config: dict[str, Any], family: Family) -> tuple[float, RopeScalingSection | None]:
    # transformers prefers this key if a file has both
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key) or family.defaults.get(key) or {}
    if _LOCAL_THETA in family.options and isinstance(parameters, dict) and _SLIDING in parameters:
        parameters = _full_attention_rope(config, key, parameters)
    if not isinstance(parameters, dict) or any(
        isinstance(value, dict) for value in parameters.values()
    ):
        raise _unsupported(key, parameters, "one flat object for all layers")
    rope = {
        "rope_theta": config["rope_theta"],
        "partial_rotary_factor": config["partial_rotary_factor"],
        "original_max_position_embeddings": config["max_position_embeddings"],
        **parameters,
    }
    if "partial_rotary_factor" in family.options:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    elif rope["partial_rotary_factor"] != 1:
        raise _unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    theta = _positive(rope, "rope_theta", float)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    rope_type = family.rope_types.get(str(rope_type), rope_type)
    if str(rope_type) not in ROPE_KEYS:
        known = ", ".join(map(repr, ("default", *ROPE_KEYS)))
        raise _unsupported(f"{key}.rope_type", rope_type, known)
    if rope_type != "llama3" and config.get(_ORIGINAL) is not None:
        rope[_ORIGINAL] = config[_ORIGINAL]  # transformers prefers this value
    values = {name: _rope_value(rope, rope_type, name) for name in ROPE_KEYS[rope_type]}
    if rope_type == "longrope" and values["factor"] is None:
        values["factor"] = config["max_position_embeddings"] / values[_ORIGINAL]
    return theta, RopeScalingSection(
        rope_type=rope_type, **{name: value for name, value in values.items() if value is not None}
    )


def _full_attention_rope(
    config: dict[str, Any], key: str, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the rotary parameters of layers without a window. Stores the rotary base of layers
    with a window in `config`."""
    local, full = given[_SLIDING] or {}, given.get(_FULL) or {}
    if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
        raise _unsupported(f"{key}.{_SLIDING}", local, "the rope_type 'default'")
    if not isinstance(full, dict):
        raise _unsupported(f"{key}.{_FULL}", full, "an object")
    config[_LOCAL_THETA] = local.get("rope_theta", config[_LOCAL_THETA])
    return full


def _rope_value(rope: Mapping[str, Any], rope_type: str, key: str) -> Any:
    """Return a rotary parameter: a number, a flag, a tuple of numbers, or None for its default.
    Raises ValueError if the value is malformed, or missing and needed."""
    value = rope.get(key)
    if key == _ORIGINAL:
        return _positive(rope, key, int)
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise _malformed(key, value, "a list of numbers above 0")
        return tuple(_positive({key: item}, key, float) for item in value)
    if key == "truncate":
        if value is not None and not isinstance(value, bool):
            raise _malformed(key, value, "true or false")
        return value
    optional = key not in _NEEDED or rope_type == "longrope"
    # transformers treats 0 as absent
    return None if optional and not value else _positive(rope, key, float)


def config_json(
    architecture: Architecture,
    family: Family | None = None,
    *,
    eos_id: int | list[int] | None = None,
) -> dict[str, Any]:
    """Return a config.json with which transformers 4.57 and 5 open a causal language model. Rotary
    parameters are in it twice, in the formats of transformers 4 and 5.

    Args:
        architecture: sizes of the model, including all `options` of its family.
        family: family of the model; None: a bundled family.
        eos_id: token or tokens that end a document.

    Raises:
        ModelConfigError: transformers cannot open a model of these sizes.
    """
    family = family or family_of(architecture.model_type)
    hidden, heads = architecture.hidden_size, architecture.num_attention_heads
    if family.heads_divide_hidden and hidden % heads:
        raise ModelConfigError(
            f"model.architecture.hidden_size: {hidden} is not a multiple of "
            f"num_attention_heads={heads}, as transformers requires for {architecture.model_type}; "
            "change one of them"
        )
    scaling_json: dict[str, Any] | None = None
    if scaling := architecture.rope_scaling:
        values = {name: getattr(scaling, name) for name in ROPE_KEYS[scaling.rope_type]}
        kept = {name: value for name, value in values.items() if value is not None}
        scaling_json = {"rope_type": scaling.rope_type, **kept}
    options = architecture.options or {}
    rope = {
        "rope_theta": architecture.rope_theta,
        **{key: value for key, value in options.items() if key == "partial_rotary_factor"},
        **(scaling_json or {"rope_type": "default"}),
    }
    local_theta = options.get(_LOCAL_THETA) or architecture.rope_theta
    local = {"rope_theta": local_theta, "rope_type": "default"}
    return {
        "architectures": [family.model_class],
        "model_type": architecture.model_type,
        **{key: getattr(architecture, key) for key in _SIZES},
        "rms_norm_eps": architecture.rms_norm_eps,
        "initializer_range": architecture.initializer_range,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        **family.fixed,
        **family.unread,
        **options,
        "rope_theta": architecture.rope_theta,
        "rope_scaling": scaling_json,
        "rope_parameters": {_FULL: rope, _SLIDING: local} if _LOCAL_THETA in options else rope,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": "float32",
    }


def generation_config_json(*, eos_id: int | list[int] | None = None) -> dict[str, Any]:
    """Return a generation_config.json. `eos_id`: token or tokens that end a document."""
    return {} if eos_id is None else {"eos_token_id": eos_id}


def tokenizer_files(tokenizer_json: str | StoragePlace, eos_id: int) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer.from_pretrained` needs: name → contents. Raises
    ModelConfigError if the tokenizer.json, which is copied byte for byte, is missing or malformed,
    or lacks the token `eos_id`, which ends a document."""
    from tokenizers import Tokenizer

    path = location(tokenizer_json)
    try:
        content = storage_of(path).read(path, MOST_BYTES)
    except OSError as error:
        raise ModelConfigError(
            f"{path}: cannot be read ({error.strerror}); prepare the data again"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ModelConfigError(
            f"{path}: not a tokenizer: {error}; prepare the data again"
        ) from error
    eos_token = tokenizer.id_to_token(eos_id)
    if eos_token is None:
        raise ModelConfigError(
            f"{path}: has no token {eos_id} to end documents; prepare the data again"
        )
    config = {
        # explicit, or transformers would rebuild the tokenizer in the family's style
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _positive(config: Mapping[str, Any], key: str, kind: type) -> Any:
    value = config.get(key)
    accepted = (int, float) if kind is float else (int,)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, accepted) or value <= 0:
        words = "a number above 0" if kind is float else "a whole number above 0"
        raise _malformed(key, value, words)
    return kind(value)


def _malformed(key: str, value: Any, wanted: str) -> ValueError:
    shown = "missing" if value is None else f"{value!r}"
    return ValueError(f"{key} is {shown}, but must be {wanted}; correct the file")


def _unsupported(key: str, value: Any, supported: str) -> UnsupportedModelError:
    cure = _CURES.get(key.rpartition(".")[2], _BY_THEIRS)
    message = f"{key}={value!r} is not supported, only {supported}; {cure}"
    return UnsupportedModelError(message, f"Perdure does not support {key}={value!r}")


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
