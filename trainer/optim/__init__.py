"""Optimizers, the learning-rate schedule, and exact arithmetic."""
