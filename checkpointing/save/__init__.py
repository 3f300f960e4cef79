"""Saves tensors as a committed step."""
