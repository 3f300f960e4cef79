"""The format of checkpoints. Does no file I/O."""
