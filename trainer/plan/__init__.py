"""Predicts memory and time of a recipe on a machine that need not exist. `predict` is for the
recipe's own strategy; search.py compares all strategies."""

from trainer.plan.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
