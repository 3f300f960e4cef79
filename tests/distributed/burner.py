"""A process that never rests: `python -m tests.distributed.burner`."""

if __name__ == "__main__":
    while True:
        pass
