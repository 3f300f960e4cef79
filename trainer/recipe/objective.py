"""Training objectives and their options."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from trainer.recipe.bounds import Amount

REFERENCED = ("dpo", "ipo")
"""Objectives whose loss depends on log-probabilities under the initial model."""
USUAL_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}
USUAL_GAMMA = 1.0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss: cross-entropy of tokens (sft), or a preference for the chosen answer of each pair.
    See docs/fine_tuning.md."""

    name: Literal["sft", "dpo", "ipo", "simpo", "orpo"] = "sft"
    """sft: the cross-entropy of trained tokens. dpo (Rafailov et al. 2023), ipo (Azar et al. 2023),
    simpo (Meng et al. 2024), orpo (Hong et al. 2024): for data prepared with `--pairs`. dpo and ipo
    compare with the initial model of the run."""

    beta: Annotated[float, Gt(0)] | None = None
    """beta in these papers; for orpo their lambda. Default: 2.0 for simpo, otherwise 0.1."""

    gamma: Amount | None = None
    """For simpo: required margin of the chosen answer. Default: 1.0."""

    sft_weight: Amount | None = None
    """For dpo, ipo, simpo and orpo: weight of the mean cross-entropy of the chosen answer's tokens,
    which is added to the loss. Default: 1 for orpo, otherwise 0."""

    @property
    def compares(self) -> bool:
        """Whether the objective compares pairs of answers."""
        return self.name != "sft"

    @property
    def referenced(self) -> bool:
        """Whether the objective compares with the initial model of the run."""
        return self.name in REFERENCED
