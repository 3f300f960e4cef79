"""Runs `perdure` as `python -m trainer.cli`, where it is not installed."""

from trainer.cli.main import main

if __name__ == "__main__":
    main()
