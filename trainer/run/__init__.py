"""A training process (rank) from its start to its exit code: worker.py; the loop is in train.py."""
