"""Trainers of other libraries as elastic jobs. Each module needs its library."""
