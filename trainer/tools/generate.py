"""Samples text from a checkpoint of Perdure, or from any Hugging Face directory of a known
family."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from checkpointing import load_model
from checkpointing.errors import CheckpointError, StorageError, WrongModel
from checkpointing.format.peft import CONFIG as ADAPTER_CONFIG
from checkpointing.format.untrusted import printable
from checkpointing.storage.source import open_source
from checkpointing.tools.convert import ExportedAdapter, open_adapter
from elastic.node.files import read_bytes
from trainer.data.shards import DataError
from trainer.data.tokenizer import read_tokenizer, start_ids
from trainer.models import Decoder, Family, read_config
from trainer.models.family import find_family
from trainer.models.hf import CONFIG, GENERATION_CONFIG, UnsupportedConfigError, stop_ids
from trainer.models.parameter_names import apart, tie_again, ties_of
from trainer.models.transformers_model import TextModel, build_theirs
from trainer.run.identity import weights_digest
from trainer.tasks.model_blocks import repeated_blocks


class GenerateError(ValueError):
    """Sampling is impossible: there is no model, or a prompt does not fit; the message has the
    remedy."""


@dataclass(frozen=True)
class GenerationSampling:
    """How tokens are drawn. `generate` describes the fields. Raises GenerateError if a number is
    out of range."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.max_new_tokens, 1 if self.top_k is None else self.top_k)
        if self.temperature < 0 or least < 1:
            raise GenerateError(
                f"temperature={self.temperature}, max_new_tokens={self.max_new_tokens}, "
                f"top_k={self.top_k}: temperature must be at least 0, the other numbers at least 1"
            )


def generate(
    checkpoint_dir: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = GenerationSampling.max_new_tokens,
    temperature: float = GenerationSampling.temperature,
    top_k: int | None = GenerationSampling.top_k,
    seed: int = GenerationSampling.seed,
    device: str | torch.device = "cpu",
    family: str | None = None,
) -> Iterator[str]:
    """Load a model, and return an iterator over the text with which it continues `prompt`.

    Args:
        checkpoint_dir: directory with config.json, tokenizer.json and safetensors; or an adapter,
            whose adapter_config.json has the directory of the base model.
        prompt: text, which may contain special tokens such as <|im_start|>. An empty prompt means
            the tokens that the tokenizer puts before a text, else an end-of-document token.
        max_new_tokens: upper limit; sampling ends earlier at an end-of-document token or at the
            model's max_position_embeddings.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: number of likeliest tokens to draw from; None: all.
        seed: seed of the draws, which happen on the CPU for every device.
        device: device of the model.
        family: `model.family` of the recipe that trained the model.

    Raises:
        GenerateError: no checkpoint, no tokenizer, no such device, an argument out of range, or a
            prompt longer than the model's context.
        ModelConfigError: config.json or generation_config.json cannot be used.
        RecipeError: the family does not exist, or transformers is needed and missing.
        CheckpointError: the weights are damaged, or belong to another model.
    """
    sampling = GenerationSampling(max_new_tokens, temperature, top_k, seed)
    (pieces,) = continuations(checkpoint_dir, [prompt], sampling, device=device, family=family)
    return pieces


def continuations(
    checkpoint_dir: str | Path,
    prompts: Sequence[str],
    sampling: GenerationSampling,
    *,
    device: str | torch.device = "cpu",
    family: str | None = None,
) -> list[Iterator[str]]:
    """Like `generate`, for several prompts: the model is loaded once."""
    opened = open_model(checkpoint_dir, device=device, family=family)
    encoded = [_encode(prompt, opened) for prompt in prompts]
    return [_decode_pieces(opened.tokenizer, ids, opened.new_ids(ids, sampling)) for ids in encoded]


@dataclass(frozen=True)
class GenerationModel:
    """A model in memory, with its tokenizer."""

    directory: Path
    model: TextModel
    tokenizer: Tokenizer
    eos_ids: list[int]
    """Token ids that end a text."""
    limit: int
    """The model's context length in tokens."""

    def new_ids(self, prompt_ids: list[int], sampling: GenerationSampling) -> Iterator[int]:
        """Yield the token ids that continue a prompt, up to an end-of-text token."""
        device = next(self.model.parameters()).device
        # on the CPU, so that all devices draw the same tokens
        generator = torch.Generator().manual_seed(sampling.seed)
        ids = torch.tensor([prompt_ids], device=device)
        for _ in range(min(sampling.max_new_tokens, self.limit - len(prompt_ids))):
            with torch.inference_mode():
                # Only the last position determines the next token; logits of all would be (T, V).
                logits = self.model.head(self.model.hidden(ids)[0, -1]).float().cpu()
            logits = logits[: self.tokenizer.get_vocab_size()]  # further rows are padding
            if sampling.temperature == 0:
                token = int(logits.argmax())
            else:
                values, known = logits.topk(min(sampling.top_k or len(logits), len(logits)))
                likely = (values / sampling.temperature).softmax(dim=0)
                token = int(known[torch.multinomial(likely, 1, generator=generator)])
            if token in self.eos_ids:
                return
            yield token
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)


def open_model(
    checkpoint_dir: str | Path, *, device: str | torch.device = "cpu", family: str | None = None
) -> GenerationModel:
    """Load the model of a directory, with its adapter merged; arguments and errors as for
    `generate`."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise GenerateError(f"device={device}: torch finds no GPU here; use device=cpu")
    directory = Path(checkpoint_dir)
    base = base_of(directory) if (directory / ADAPTER_CONFIG).is_file() else directory
    _check_directory(base)
    model = empty_model(base, find_family(family) if family else None)
    tokenizer = _read_tokenizer(directory, model.vocab_size)
    beside = [base / CONFIG, directory / GENERATION_CONFIG]
    eos_ids = stop_ids(
        {file.name: read_bytes(file, follow=True) for file in beside if file.is_file()}, directory
    )
    load_weights(model, base, device)
    if base is not directory:
        with open_source(directory) as source, open_adapter(source) as adapter:
            _merge(model, adapter)
    return GenerationModel(
        directory, model, tokenizer, eos_ids, model.most_positions or sys.maxsize
    )


def _encode(prompt: str, opened: GenerationModel) -> list[int]:
    """Tokenize a prompt as `perdure data prepare` tokenizes the beginning of a document."""
    tokenizer, where, limit = opened.tokenizer, opened.directory, opened.limit
    prompt_ids = [*start_ids(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False).ids]
    prompt_ids = prompt_ids or opened.eos_ids[:1]
    if not prompt_ids:
        raise GenerateError(f"{where}: has no eos_token_id to start from; give a prompt")
    if len(prompt_ids) >= limit:
        raise GenerateError(
            f"the prompt has {len(prompt_ids)} tokens, but {where} takes {limit} "
            "(max_position_embeddings) with the continuation; shorten it"
        )
    return prompt_ids


def empty_model(directory: Path, family: Family | None = None) -> TextModel:
    """Build the model of a checkpoint directory on the meta device: with Perdure's code for its
    family, else with that of transformers. Raises ModelConfigError or RecipeError if neither
    exists."""
    try:
        architecture = read_config(directory, family)
    except UnsupportedConfigError as error:
        if family:
            raise
        return build_theirs(directory, error.reason, repeated_blocks)
    with torch.device("meta"):
        return Decoder(architecture, family=family)


def load_weights(model: TextModel, directory: Path, device: torch.device) -> None:
    """Load weights into a model on the meta device: float32 on the CPU, otherwise bfloat16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def materialise(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:  # buffers computed in the constructor are in no file
            return tensor.to(device)
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, dtype=kind, device=device)

    # _apply replaces each parameter separately, which unties shared ones
    ties = ties_of(model)
    model._apply(materialise)
    tie_again(model, ties)
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    trained = dict(model.named_parameters())
    tensors = apart({**trained, **buffers}, model.stacks_apart)
    finite = apart(trained, model.stacks_apart)
    load_model(directory, tensors, tied=model.tied_copies, finite=finite)
    model.eval()


def base_of(directory: Path, given: Path | None = None) -> Path:
    """Return the checked directory of an adapter's base model: `given`, else the recorded one."""
    with open_source(directory) as source, open_adapter(source) as adapter:
        named = str(given or adapter.base_model)
        wanted = adapter.trained_over.get("fingerprint")
    base = Path(named)
    if not named or not (base / "config.json").is_file():
        raise StorageError(
            f"{directory}: was trained over {printable(named) or 'a model it does not name'}, "
            "which has no model; copy the model there, or give its directory (ckpt export --base)"
        )
    try:
        actual = weights_digest(base)
    except CheckpointError as error:
        raise StorageError(f"the base model of {directory}: {error}") from error
    if isinstance(wanted, str) and wanted != actual:
        raise WrongModel(
            f"{directory}: was trained over other weights than those in {base} (fingerprint "
            f"{printable(wanted)} expected, {actual} found); give the directory of those weights"
        )
    return base


@torch.no_grad()
def _merge(model: TextModel, adapter: ExportedAdapter) -> None:
    """Add an adapter's products B·A to the weights in place, in float32, rounded to each weight's
    dtype, and copy the tensors that it holds whole. If it was trained over nf4, weights are first
    rounded to nf4. Raises GenerateError if a name or shape does not fit the model."""
    named = dict(model.named_parameters())
    for name in (*adapter.pairs, *adapter.whole):
        weight, shape = named.get(name), adapter.shape_of(name)
        if weight is None or tuple(weight.shape) != shape:
            raise GenerateError(
                f"the adapter changes {printable(name)} of shape {list(shape)}, which its base "
                "model does not have; use the model over which the adapter was trained"
            )
        if name in adapter.whole:
            weight.copy_(adapter.read(adapter.whole[name]))
        else:
            a, b = (matrix.to(weight.device) for matrix in adapter.matrices(name))
            weight.copy_(torch.addmm(adapter.under(weight), b, a))


def _decode_pieces(
    tokenizer: Tokenizer, prompt_ids: list[int], new_ids: Iterator[int]
) -> Iterator[str]:
    """Yield the text that each new token adds, but no incomplete character."""
    ids = list(prompt_ids)
    shown = len(tokenizer.decode(ids))
    for token in new_ids:
        ids.append(token)
        # decoded as a whole: spaces and characters depend on earlier tokens
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and len(text) > shown:
            yield text[shown:]
            shown = len(text)
    rest = tokenizer.decode(ids)[shown:]
    if rest:
        yield rest


def _check_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        hint = "use a directory with config.json, tokenizer.json and safetensors files"
        if (directory / "checkpoints").is_dir():
            hint = f"it is a run; use one of the directories in {directory / 'checkpoints'}"
        raise GenerateError(f"{directory}: not a checkpoint directory (no config.json); {hint}")


def _read_tokenizer(directory: Path, rows: int) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise GenerateError(f"{directory}: has no tokenizer.json; copy the model's tokenizer there")
    try:
        tokenizer = read_tokenizer(file)
    except DataError as error:
        raise GenerateError(f"{error}; copy it there again") from error
    if tokenizer.get_vocab_size() > rows:
        raise GenerateError(
            f"{file}: has {tokenizer.get_vocab_size()} tokens, more than the model's vocab_size="
            f"{rows}; copy the model's tokenizer there"
        )
    return tokenizer
