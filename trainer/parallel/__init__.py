"""Distributes a model over ranks. The entry point is `parallelize.parallelize`. This module imports
nothing, so that recipes can be checked without importing DTensor and FSDP."""
