"""What a GPU machine is asked once one can be had: `python -m benchmarks.gpu`."""
