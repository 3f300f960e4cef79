"""Training data: prepared tokens (written by prepare, read by shards.py and loader.py), or a user's
own `Samples` (sample_stream.py); both in the order of order.py."""

from trainer.data.order import Order
from trainer.data.samples import Samples

__all__ = ["Order", "Samples"]
