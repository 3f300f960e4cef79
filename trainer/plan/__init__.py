"""What a recipe will need, before anything is rented. `predict` is the only door."""

from trainer.plan.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
