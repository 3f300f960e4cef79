"""OLMo 3, with the keys of transformers' `Olmo3Config`: OLMo 2 with a window in most layers."""

from dataclasses import replace

from trainer.models.families import olmo2
from trainer.models.family import LayerKind, kinds_by_window, window_of
from trainer.recipe.architecture import Architecture


def layers(architecture: Architecture) -> list[LayerKind]:
    """Return the kind of each layer. Every fourth layer has no window, unless `layer_types` says
    otherwise. Layers with a window have unscaled rotary wavelengths."""
    slides = [(number + 1) % 4 != 0 for number in range(architecture.num_hidden_layers)]
    kinds = kinds_by_window(architecture, window_of(architecture), slides)
    local = (architecture.options or {}).get("rope_local_base_freq")
    if local is not None and (not isinstance(local, int | float) or local <= 0):
        raise ValueError(f"rope_local_base_freq: {local!r} is no number above 0; set one, or null")
    theta = float(local or architecture.rope_theta)
    return [replace(kind, theta=theta) if kind.window else kind for kind in kinds]


FAMILY = replace(
    olmo2.FAMILY,
    model_type="olmo3",
    model_class="Olmo3ForCausalLM",
    defaults={
        **olmo2.FAMILY.defaults,
        "rope_theta": 5e5,
        "rope_local_base_freq": None,
        "sliding_window": 4096,
    },
    options={
        "sliding_window": 4096,
        "layer_types": None,
        "rope_local_base_freq": None,  # base for layers with a window; None: rope_theta
    },
    layers=layers,
)
