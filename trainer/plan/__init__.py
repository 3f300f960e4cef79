"""What a recipe will need, before anything is rented: `predict` for one recipe on one machine;
search.py for every strategy, and which to take."""

from trainer.plan.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
