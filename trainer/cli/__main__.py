"""Runs `perdure` as `python -m trainer.cli`, for checkouts without the console command."""

from trainer.cli.main import main

if __name__ == "__main__":
    main()
