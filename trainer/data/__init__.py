"""Training data by position: prepared token shards, which prepare/ writes, and shards.py and
loader.py read; a user's `Samples`, in the order of order.py; or a user's `Stream`, which has its
own order."""

from trainer.data.order import Order
from trainer.data.stream import Samples, Stream

__all__ = ["Order", "Samples", "Stream"]
