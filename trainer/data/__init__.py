"""Prepared data: made by prepare.py, ordered by order.py, read by shards.py and loader.py."""
