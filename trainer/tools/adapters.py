"""Finds the base model of an adapter, and checks that the adapter was trained over it."""

from pathlib import Path

from checkpointing.errors import CheckpointError, StorageError, WrongModel
from checkpointing.format.layout import TRAINER_STATE
from checkpointing.format.peft import CONFIG, read_config
from checkpointing.format.untrusted import printable
from checkpointing.storage.steps import read_state
from checkpointing.tools.merge import trained_over
from elastic.node.files import read_bytes
from trainer.run.identity import weights_digest


def base_of(directory: Path, given: Path | None = None) -> Path:
    """Return the directory of an adapter's base model, after checking its fingerprint.

    Args:
        directory: the adapter: a checkpoint of Perdure, an export, or a directory of PEFT.
        given: base model to use instead of the one in adapter_config.json.

    Raises:
        StorageError: the base model is missing.
        WrongModel: the adapter was trained over a model with another fingerprint.
        DamagedCheckpoint: the adapter's files are damaged.
    """
    file = directory / CONFIG
    named = read_config(read_bytes(file, follow=True), str(file)).base
    base = given or Path(named)
    if not (base / "config.json").is_file():
        raise StorageError(
            f"{directory}: was trained over {printable(str(base)) or 'a model it does not name'}, "
            "which has no model; copy the model there, or give its directory (ckpt export --base)"
        )
    state = read_state(directory) if (directory / TRAINER_STATE).is_file() else None
    wanted = trained_over(directory, state).get("fingerprint")
    try:
        actual = weights_digest(base)
    except CheckpointError as error:
        raise StorageError(f"the base model of {directory}: {error}") from error
    if isinstance(wanted, str) and wanted != actual:
        raise WrongModel(
            f"{directory}: was trained over other weights than those in {base} (fingerprint "
            f"{printable(wanted)} expected, {actual} found); give the directory of those weights"
        )
    return base
