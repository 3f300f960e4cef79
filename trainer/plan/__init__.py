"""Predicts what a recipe needs before a machine is rented: `predict` for one recipe on one machine;
search.py compares all strategies."""

from trainer.plan.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
