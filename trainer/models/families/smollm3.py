"""SmolLM3, with the keys of transformers' `SmolLM3Config`: some layers have no rotary positions."""

from dataclasses import replace

from trainer.models.families import llama
from trainer.models.family import LayerKind, kinds_by_window, window_of
from trainer.recipe.architecture import Architecture


def layers(architecture: Architecture) -> list[LayerKind]:
    """Return the kind of each layer. `no_rope_layers` has a 1 for each layer that rotates queries
    and keys, otherwise a 0; null: every `no_rope_layer_interval`th layer does not rotate. With
    `use_sliding_window`, the layers that do not rotate have a window, unless `layer_types` says
    otherwise."""
    options, count = architecture.options or {}, architecture.num_hidden_layers
    rotary, interval = options.get("no_rope_layers"), options.get("no_rope_layer_interval", 4)
    if rotary is None:
        if interval < 1:
            raise ValueError(f"no_rope_layer_interval: must be above 0, but it is {interval}")
        rotary = [int((number + 1) % interval != 0) for number in range(count)]
    listed = isinstance(rotary, list | tuple) and all(flag in (0, 1) for flag in rotary)
    if not listed or len(rotary) < count:
        raise ValueError(
            f"no_rope_layers: needs a 0 or 1 for each of {count} layers, but it is {rotary!r}"
        )
    window = window_of(architecture) if options.get("use_sliding_window") else None
    return kinds_by_window(architecture, window, [not flag for flag in rotary], rotary)


FAMILY = replace(
    llama.FAMILY,
    model_type="smollm3",
    model_class="SmolLM3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    heads_divide_hidden=False,
    unread={"pad_token_id": None},
    options={
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
    },
    layers=layers,
)
