"""What a rank does from its start to its exit code: worker.py, and the loop in train.py."""
