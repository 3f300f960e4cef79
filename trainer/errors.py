"""Which errors are the user's to mend."""


def known_errors() -> tuple[type[Exception], ...]:
    """Errors of the user's input; anything else is a fault of ours and keeps its traceback.

    A function, so that a command that meets none does not import what they belong to.
    """
    from checkpointing import CheckpointError
    from elastic import LedgerError
    from trainer.data.shards import DataError
    from trainer.generate import GenerateError
    from trainer.models.hf import ConfigError
    from trainer.recipe import RecipeError

    return RecipeError, ConfigError, DataError, CheckpointError, LedgerError, GenerateError
