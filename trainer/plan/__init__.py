"""Predicts memory and time of a recipe on a machine that need not exist: `predict`. search.py
compares all strategies."""

from trainer.plan.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
