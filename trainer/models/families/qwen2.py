"""Qwen2 and Qwen2.5, with the keys of transformers' `Qwen2Config`."""

from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, Block
from trainer.models.family import Family, LayerKind, kinds_by_window, window_of
from trainer.recipe.architecture import Architecture


def layers(architecture: Architecture) -> list[LayerKind]:
    """Return the kind of each layer. With `use_sliding_window` the layers from index
    `max_window_layers` on have a window, unless `layer_types` says otherwise."""
    options, window = architecture.options or {}, window_of(architecture)
    if not options.get("use_sliding_window"):
        window = None
    first = options.get("max_window_layers", 0)
    slides = [number >= first for number in range(architecture.num_hidden_layers)]
    return kinds_by_window(architecture, window, slides)


FAMILY = Family(
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    block=lambda architecture: Block(
        architecture, Attention(architecture, bias=True), MLP(architecture)
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    heads_divide_hidden=False,
    options={
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "layer_types": None,
    },
    layers=layers,
    tensor_plan=TENSOR_PLAN,
)
