"""Causal language models that transformers computes, with Perdure's loss on their head.

[Note: their module] The module outputs the inputs of its head instead of logits, and the loss
multiplies them in chunks of rows (loss.py). So apart from that product a module may only scale its
logits, or cap them softly. Documents are separated by masks, which transformers creates in one
place for all models. Shapes: B batch, T sequence, D hidden, V vocabulary.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from checkpointing.format.nf4 import weights_in
from checkpointing.load.foreign import by_model_names
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.steps import hugging_face_tensors
from trainer.models.decoder import Decoder
from trainer.models.hf import ModelConfigError, read_json
from trainer.models.loss import HeadLoss, capped, preference_loss
from trainer.models.parameter_names import ties_of
from trainer.recipe import RecipeError
from trainer.recipe.sections import ObjectiveSection

OLDEST = (5, 24)
"""Oldest tested transformers. Version 4 creates masks in many places."""
_LOADING_CODE = ("auto_map", "attn_implementation", "experts_implementation")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json with the number of experts."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Values of `layer_types` for layers that see other tokens only through a mask."""
_OWN = "train this model through model.factory (docs/extending.md)"
_PADDING = 8
"""Columns added to the head's weight for a bias: GPUs are slow with other sizes."""


class TransformersModel(nn.Module):
    """A causal language model that transformers computes, with the interface of `Decoder`."""

    stacks: Sequence[str] = ()
    stacks_apart: Sequence[str] = ()

    def __init__(
        self, theirs: Any, blocks: Sequence[nn.Module], names: Mapping[str, str], cap: float | None
    ) -> None:
        """Wrap a module of transformers, whose output head is replaced in place.

        Args:
            theirs: the module.
            blocks: its layers.
            names: top-level module → its name in files, where they differ.
            cap: soft cap of the logits.

        Raises:
            RecipeError: it has no layers, parameters or buffers beside its submodules, or a head
                that is not supported.
        """
        super().__init__()
        self.name = type(theirs).__name__
        if not blocks or theirs._parameters or theirs._buffers:
            raise _refusal(self.name, "has parameters beside its layers, or no list of layers")
        head = _replace_head(theirs)
        _check_head(theirs, head.weight.shape[1], blocks[0])
        for name, child in theirs.named_children():
            self.add_module(names.get(name, name), child)
        # in a tuple, so that it is no submodule, which would prefix all names
        self._theirs = (theirs,)
        self._head = (head,)
        self.blocks = tuple(blocks)
        self.head_loss = HeadLoss()
        self.preference: ObjectiveSection | None = None
        self.compiled_beside_blocks = (self.head_loss,)
        self.cap = cap
        self._takes_positions = "position_ids" in inspect.signature(theirs.forward).parameters
        self.config = theirs.config
        self.vocab_size = head.weight.shape[0]
        most = getattr(self.config, "max_position_embeddings", None)
        self.most_positions = most if isinstance(most, int) and most > 0 else None
        self.draws = any(
            "drop" in key and isinstance(value, float) and value > 0
            for key, value in self.config.to_dict().items()
            if not key.startswith(("summary_", "classifier_"))  # of models with other heads
        )
        counts = [getattr(self.config, key, None) for key in _EXPERTS]
        self.experts = any(isinstance(count, int) and count > 1 for count in counts)
        self.tied_copies = ties_of(self)

    def mixes_documents(self) -> str | None:
        """Why documents of one sequence would see each other; None if masks separate them."""
        theirs = self._theirs[0]
        others = {*(getattr(self.config, "layer_types", None) or ())} - _ATTENTION
        if others or getattr(theirs, "_is_stateful", False):
            what = ", ".join(sorted(map(str, others))) or "a state"
            return f"has layers that see other tokens without a mask ({what})"
        files = {sys.modules[type(module).__module__] for module in theirs.modules()}
        makers = ("create_causal_mask", "create_sliding_window_causal_mask")
        if not any(hasattr(file, maker) for file in files for maker in makers):
            return "creates its own masks"
        return None

    def flops_per_token(self, seq_len: int) -> float:
        """As `Family.flops_per_token`, but without discount for windows; 0 for experts."""
        if self.experts:
            return 0.0
        config, theirs = self.config, self._theirs[0]
        looked_up = theirs.get_input_embeddings().weight
        products = [p for p in self.parameters() if p is not looked_up or p is self._head[0].weight]
        frozen = sum(weights_in(p) for p in products if not p.requires_grad)
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        attention = 12 * len(self.blocks) * heads * size * seq_len
        return 6.0 * sum(map(weights_in, products)) - 2.0 * frozen + attention

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        segments: Tensor | None = None,
        answer_labels: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """See `Decoder.forward`."""
        hidden = self.hidden(input_ids, document_ids)
        if labels is None:
            return self.head(hidden)
        product = self._product(hidden)
        if segments is None or answer_labels is None:
            return self.head_loss(*product, labels, self.cap)
        assert self.preference
        by_label = self.head_loss.log_probs(*product, labels, self.cap)
        return preference_loss(self.preference, by_label, segments, answer_labels, reference)

    def hidden(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return the inputs of the head, (B, T, D)."""
        theirs, given = self._theirs[0], {"input_ids": input_ids}
        theirs.training = self.training
        if document_ids is None:
            hidden = theirs(**given).logits
        else:
            runs, positions = document_runs(document_ids)
            given |= {"position_ids": positions} if self._takes_positions else {}
            with _documents_hidden(runs, self.name, self.config._attn_implementation):
                hidden = theirs(**given).logits
        return hidden.to(self._head[0].weight.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        return capped(F.linear(hidden, self._head[0].weight, self._head[0].bias), self.cap)

    def _product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and weight whose product is the logits, bias included."""
        head = self._head[0]
        if head.bias is None:
            return hidden, head.weight
        wide = F.pad(F.pad(hidden, (0, 1), value=1.0), (0, _PADDING - 1))
        column = F.pad(head.bias[:, None], (0, _PADDING - 1))
        return wide, torch.cat([head.weight, column], dim=1)


TextModel: TypeAlias = Decoder | TransformersModel


def document_runs(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number, position) of each token's document, a run of equal `document_ids`: (B, T)."""
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(first)
    starts = torch.where(first, places, 0).cummax(1).values
    return first.cumsum(1), places - starts


@contextmanager
def _documents_hidden(runs: Tensor, name: str, attention: str) -> Iterator[None]:
    """Make the masks that transformers creates for an implementation of attention in the block hide
    tokens with another number in `runs` (B, T). Raises RecipeError if it creates none."""
    from transformers import masking_utils as masks

    registry, causal = masks.ALL_MASK_ATTENTION_FUNCTIONS, masks.causal_mask_function
    make, alike = registry[attention], masks.packed_sequence_mask_function(runs)
    mask_created = False

    def mask(*given: Any, mask_function: Any = causal, **options: Any) -> Any:
        nonlocal mask_created
        mask_created = True
        # transformers skips a mask that is only causal; attention would then see other documents.
        options["allow_is_causal_skip"] = False
        return make(*given, mask_function=masks.and_masks(mask_function, alike), **options)

    registry[attention] = mask
    try:
        yield
    finally:
        del registry[attention]  # the entry of transformers counts again
    if not mask_created:
        raise RecipeError(
            f"data.document_mask: {name} of transformers created no mask, so its documents saw "
            "each other; set data.document_mask=false to accept that"
        )


def build_theirs(
    directory: StoragePlace, reason: str, blocks_of: Callable[[nn.Module], Sequence[nn.Module]]
) -> TransformersModel:
    """Build the model of a config.json: parameters on the meta device, buffers on the CPU. Runs no
    code of the checkpoint, and downloads nothing. `reason`: why transformers is needed."""
    config_json, installed = read_json(directory), check_installed(reason)
    _import_without_torchao()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type, file = config_json.get("model_type"), directory / "config.json"
    if model_type == "mistral" and "layer_types" in config_json:  # as in AutoConfig
        model_type = "ministral"
    if model_type not in CONFIG_MAPPING:
        code = ", and code in a checkpoint is not run" if "auto_map" in config_json else ""
        raise ModelConfigError(
            f"{file}: transformers {installed} knows no model_type {model_type!r}{code}; {_OWN}"
        )
    ours = {k: value for k, value in config_json.items() if k.lstrip("_") not in _LOADING_CODE}
    try:
        config = CONFIG_MAPPING[model_type].from_dict(ours)
    except Exception as error:  # checks of transformers raise many types
        raise ModelConfigError(f"{file}: transformers {installed}: {_first_line(error)}") from error
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(model_type, "is no causal language model")
    made_by = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    _check_kind(config, made_by.__name__, file)
    cap = getattr(config, "final_logit_softcapping", None) or None
    try:
        config.use_cache = False
        config.return_dict = True
        config.dtype = torch.float32
        config._attn_implementation = "sdpa" if made_by._supports_sdpa else "eager"
        if cap:
            config.final_logit_softcapping = None
        with _parameters_on_meta():
            theirs = made_by(config)
    except Exception as error:
        raise ModelConfigError(f"{file}: transformers {installed}: {_first_line(error)}") from error
    names = _names_in_files(theirs, directory)
    return TransformersModel(theirs, blocks_of(theirs), names, cap)


def _import_without_torchao() -> None:
    """Import what models of transformers need, but not torchao, which transformers imports where it
    is installed. Importing torchao opens a CUDA context, and forks of this process, which the ranks
    of a node are, could then not use CUDA."""
    from transformers import utils
    from transformers.utils import import_utils

    installed = import_utils.is_torchao_available
    utils.is_torchao_available = import_utils.is_torchao_available = lambda *_, **__: False
    try:
        import transformers.modeling_utils  # noqa: F401
    finally:
        utils.is_torchao_available = import_utils.is_torchao_available = installed


def check_installed(reason: str) -> str:
    """Return the installed version of transformers. Raises RecipeError if it is missing or too old;
    `reason`: why the model needs it."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = ""
    if not installed or tuple(map(int, installed.split(".")[:2])) < OLDEST:
        raise RecipeError(
            f"model.init_from: {reason}; transformers {'.'.join(map(str, OLDEST))} would compute "
            f"the model, but {installed or 'none'} is installed; pip install "
            "'perdure[transformers]'"
        )
    return installed


def _check_kind(config: Any, name: str, file: StoragePlace) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        raise _refusal(name, "has an encoder and a decoder")
    if "ForConditionalGeneration" in name:
        raise _refusal(name, "takes other inputs than text")
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    decodes = getattr(config, "is_decoder", False)
    if both_ways or getattr(config, "is_causal", True) is False or (masked and not decodes):
        raise _refusal(name, "is not causal: it sees the tokens that come next")
    for key in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, key, 0):
            raise ModelConfigError(
                f"{file}: {key}={getattr(config, key)} would drop different layers on each rank; "
                "write 0.0 in this file"
            )
    if getattr(config, "output_router_logits", False):
        raise ModelConfigError(
            f"{file}: output_router_logits=true adds an auxiliary loss for experts, which only "
            "Perdure's own families have; write false to train without it"
        )


def _names_in_files(theirs: Any, directory: StoragePlace) -> dict[str, str]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    conversions = get_model_conversion_mapping(theirs, add_legacy=False)
    if not conversions:
        return {}
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    stored, known = hugging_face_tensors(directory), theirs.state_dict().keys()
    renamed: dict[str, str] = {}
    for name in stored:
        part, _, end = name.partition(".")
        first, _, rest = apply_renamings(name, renamings).partition(".")
        if first != part and rest == end and f"{first}.{rest}" in known:
            renamed[first] = part

    def in_files(name: str) -> str:
        first, dot, rest = name.partition(".")
        return renamed.get(first, first) + dot + rest

    read = by_model_names(stored, [in_files(name) for name in known])
    missing = [name for name, _ in theirs.named_parameters() if in_files(name) not in read]
    if missing:
        raise ModelConfigError(
            f"{directory}: its files lack {missing[0]}, which transformers makes of other tensors "
            f"in them, and Perdure reads weights as they are; {_OWN}"
        )
    return renamed


def _replace_head(theirs: Any) -> Any:
    """Replace the output head of a model of transformers by an nn.Identity that holds the head's
    weight and bias, and return the nn.Identity. Raises RecipeError if the head is no nn.Linear."""
    linear = theirs.get_output_embeddings()
    name = next((name for name, module in theirs.named_modules() if module is linear), None)
    if name is None or type(linear) is not nn.Linear:
        raise _refusal(type(theirs).__name__, "has no output head that is an nn.Linear")
    head = nn.Identity()
    for key, parameter in linear._parameters.items():
        head.register_parameter(key, parameter)
    theirs.set_submodule(name, head)
    return head


class _HeadInput:
    """Output of the modules below the head in `_check_head`, with None as any other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: object) -> Any:
        return self.last_hidden_state if index == 0 else ()


def _check_head(theirs: Any, width: int, block: nn.Module) -> None:
    """Raise RecipeError if a module does more with hidden states (…, `width`) than [Note: their
    module] allows. The modules that contain its blocks return fixed hidden states meanwhile."""
    above = [
        module
        for module in theirs.modules()
        if module not in (theirs, block) and block in {*module.modules()}
    ]
    # both signs and several magnitudes, so that a nonlinear head is detected
    hidden = torch.linspace(-3, 3, 2 * width).view(1, 2, width)
    try:
        for module in above:
            module.forward = lambda *_, **__: _HeadInput(hidden)
        logits = theirs(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits.float()
        factor = (logits / hidden).mean()
        linear = bool(torch.allclose(logits, hidden * factor, rtol=1e-5) and factor.abs() > 0)
    except Exception:  # `_HeadInput` lacks what some models expect
        linear = False
    finally:
        for module in above:
            del module.forward
    if not linear:
        raise _refusal(type(theirs).__name__, "does more with its head than multiply and scale")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:

    def move(_module: nn.Module, _name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # None leaves it unchanged, so a tied weight stays tied
        return nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _refusal(name: object, problem: str) -> RecipeError:
    what = f"{name} of transformers {problem}, so it cannot be trained this way"
    return RecipeError(f"model.init_from: {what}; {_OWN}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
