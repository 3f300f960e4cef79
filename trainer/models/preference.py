"""Objectives that compare the two answers of a pair. Each is a mean over pairs, computed from the
log-probabilities of whole answers.

In the formulas c and r are the log-probabilities of the chosen and the rejected answer, c' and r'
their log-probabilities by the reference model, and |c| and |r| their numbers of tokens:

| objective | loss of a pair |
|---|---|
| DPO, Rafailov et al. 2023 | -log sigmoid(beta ((c - c') - (r - r'))) |
| IPO, Azar et al. 2023 | ((c - c') / |c| - (r - r') / |r| - 1 / (2 beta))^2 |
| SimPO, Meng et al. 2024 | -log sigmoid(beta c / |c| - beta r / |r| - gamma) |
| ORPO, Hong et al. 2024 | -beta log sigmoid(logit(c / |c|) - logit(r / |r|)) - c / |c| |

IPO uses means over tokens, as trl does on the advice of the paper's authors; the paper writes sums.
logit(x) is the logarithm of the odds p / (1 - p), where p = exp(x).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.recipe.objective import USUAL_BETA, USUAL_GAMMA, Objective


@dataclass(frozen=True)
class PreferenceLoss:
    """An objective that compares the answers of pairs, with all its weights."""

    name: str
    beta: float
    gamma: float
    sft_weight: float
    referenced: bool
    """Whether the objective needs log-probabilities by a reference model."""

    def __call__(
        self, by_label: Tensor, segments: Tensor, counts: Tensor, reference: Tensor | None
    ) -> Tensor | dict[str, Tensor]:
        """Return means over P pairs, float64 scalars by name: `loss`; `reward_margin`, β times the
        score of the chosen answer minus that of the rejected; `reward_accuracy`, the fraction of
        pairs in which the chosen answer has the higher score; and with `sft_weight` also
        `cross_entropy`, of the chosen answers per token. If a reference is needed and missing,
        return the log-probabilities of whole answers (2 P,) float64.

        Args:
            by_label: (N,), log-probabilities of labels.
            segments: N int64, index of the answer of each label, in the order chosen, rejected,
                chosen, rejected ….
            counts: (2 P,), numbers of tokens of the answers.
            reference: (2 P,), log-probabilities by the reference, if `referenced`.
        """
        sums = by_label.new_zeros(len(counts), dtype=torch.float64)
        log_probs = sums.index_add(0, segments.flatten(), by_label.double())
        means = log_probs / counts
        if self.referenced:
            if reference is None:
                return log_probs
            gained = log_probs - reference
            scores = gained / counts if self.name == "ipo" else gained
        else:
            scores = means
        if self.name == "orpo":  # log(1 - p) would lose its digits for p near 1
            scores = means - torch.log(-torch.expm1(means))
        chosen, rejected = scores.view(-1, 2).unbind(1)
        ahead = chosen - rejected
        if self.name == "ipo":
            loss = (ahead - 1 / (2 * self.beta)) ** 2
        elif self.name == "orpo":
            loss = -self.beta * F.logsigmoid(ahead)
        else:
            loss = -F.logsigmoid(self.beta * ahead - self.gamma)
        recorded = {
            "reward_margin": (self.beta * ahead).mean(),
            "reward_accuracy": (ahead > 0).double().mean(),
        }
        if self.sft_weight:
            cross_entropy = -means.view(-1, 2)[:, 0]
            recorded["cross_entropy"] = cross_entropy.mean()
            loss = loss + self.sft_weight * cross_entropy
        return {"loss": loss.mean(), **recorded}


def preference_of(objective: Objective) -> PreferenceLoss | None:
    """Return the objective of a recipe; None if it does not compare answers."""
    if not objective.compares:
        return None
    name, weight = objective.name, objective.sft_weight
    return PreferenceLoss(
        name,
        beta=objective.beta or USUAL_BETA[name],
        gamma=(USUAL_GAMMA if objective.gamma is None else objective.gamma)
        if name == "simpo"
        else 0.0,
        sft_weight=float(name == "orpo") if weight is None else weight,
        referenced=objective.referenced,
    )
