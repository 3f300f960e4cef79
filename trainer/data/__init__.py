"""What is trained on: prepared tokens (made by prepare, read by shards.py and loader.py), or the
user's own `Samples` (sample_stream.py); in the order of order.py, or that of their `Stream`."""

from trainer.data.order import Order
from trainer.data.samples import Samples
from trainer.data.stream import Stream

__all__ = ["Order", "Samples", "Stream"]
