"""transformers' Trainer, stopped and resumed through this engine."""

from contextlib import suppress

import pytest
import torch

from checkpointing import CheckpointError
from tests.checkpointing.worlds import run_ranks
from tests.late import Late

transformers, ours = Late("transformers"), Late("checkpointing.adapters.hugging_face")
STEPS, SIZE = 14, 24  # a bit more than two epochs of six steps


class StopNowError(Exception):
    """As if it had been killed."""


def stop_at(step):
    """A callback."""

    class StopAt(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise StopNowError

    return StopAt()


def train(folder, callbacks, resume=None):
    """Losses by step of a tiny Llama with dropout."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.3,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    items = [torch.randint(64, (8,), generator=draw) for _ in range(SIZE)]
    arguments = transformers.TrainingArguments(
        output_dir=folder / "out", max_steps=STEPS, per_device_train_batch_size=4, seed=3,
        learning_rate=1e-2, save_strategy="no", report_to=[], logging_steps=1, use_cpu=True,
        disable_tqdm=True, logging_nan_inf_filter=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": item, "labels": item} for item in items],
        callbacks=callbacks,
    )
    with suppress(StopNowError):
        trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {log["step"]: log["loss"] for log in logs if "loss" in log}, weights


def test_a_trainer_stops_and_goes_on_as_if_it_had_not(tmp_path):
    whole, weights = train(tmp_path, [])
    first = ours.CheckpointCallback(tmp_path / "run", every=4, keep=2)
    assert first.resume() is None
    train(tmp_path, [first, stop_at(11)])
    first.checkpointer.close()

    forgotten = ours.CheckpointCallback(tmp_path / "run", every=4)
    with pytest.raises(CheckpointError, match="has step 8, but the Trainer begins at step 0"):
        train(tmp_path, [forgotten])
    forgotten.checkpointer.close()

    second = ours.CheckpointCallback(tmp_path / "run", every=4, keep=2)
    losses, end = train(tmp_path, [second], second.resume())
    del whole[8]  # logged after it was saved
    assert losses == whole
    assert all(torch.equal(end[name], weights[name]) for name in weights)
    steps = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert steps == ["step-00000012", "step-00000014"]


def test_ranks_that_would_go_on_from_different_steps_are_all_told(tmp_path):
    arguments = transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[])

    def begin(rank, step):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        state = transformers.TrainerState(global_step=step, max_steps=9)
        callback = ours.CheckpointCallback(tmp_path / "run", every=4)
        if rank == 0:  # the folder of the other is on a disk of its own, perhaps
            callback.resume()
        parts = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
        callback.on_train_begin(arguments, state, None, **parts)
        return callback, state

    def work(rank):
        callback, state = begin(rank, 0)
        state.global_step = 4
        callback.on_step_end(arguments, state, transformers.TrainerControl())
        callback.on_train_end(None, state, None)
        with pytest.raises(CheckpointError, match="has step 4, but the Trainer begins at step 0"):
            begin(rank, 4 - 4 * rank)
        return "told"

    assert run_ranks(2, work, tmp_path / "ranks") == ["told"] * 2


def test_a_url_is_no_folder_of_that_name():
    with pytest.raises(ValueError, match="s3://bucket/run: the Trainer cannot read files"):
        ours.CheckpointCallback("s3://bucket/run", every=1)
