"""What a run minimises: the options, and which objectives compare pairs of answers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from trainer.recipe.bounds import Amount

REFERENCED = ("dpo", "ipo")
"""Objectives that measure a model against the one that it began as."""
USUAL_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}
USUAL_GAMMA = 1.0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised: the cross-entropy of tokens (sft), or of pairs of answers a preference for
    the chosen one. See docs/fine_tuning.md."""

    name: Literal["sft", "dpo", "ipo", "simpo", "orpo"] = "sft"
    """sft: the cross-entropy of trained tokens. dpo (Rafailov et al. 2023), ipo (Azar et al. 2023),
    simpo (Meng et al. 2024), orpo (Hong et al. 2024): for data prepared with `--pairs`.
    dpo and ipo measure against the model that the run began with."""

    beta: Annotated[float, Gt(0)] | None = None
    """What the papers call beta, of orpo lambda. 2.0 for simpo and 0.1 for the others, unless
    set."""

    gamma: Amount | None = None
    """For simpo: the margin by which the chosen answer is to be ahead. 1.0 unless set."""

    sft_weight: Amount | None = None
    """For pairs: weight of the mean cross-entropy of the chosen answer's tokens, which is added. 1
    for orpo and 0 for the others, unless set."""

    @property
    def compares(self) -> bool:
        """Whether it is one of pairs of answers."""
        return self.name != "sft"

    @property
    def referenced(self) -> bool:
        """Whether it measures against the model that the run began with."""
        return self.name in REFERENCED
