"""What the peers share that run a Trainer of transformers, or one made of it. On one rank."""

import os
from typing import Any

from transformers import TrainerCallback

from benchmarks.support.peer import Clock, Job


class Told(TrainerCallback):
    """Tells the clock of every step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.step()


def training_arguments(job: Job) -> dict[str, Any]:
    """Arguments by which a Trainer does the steps of the recipe, and writes nothing."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # or it would wrap the model in DDP
        os.environ.pop(name)
    recipe, options = job.recipe, job.recipe.optimizer
    return {
        "output_dir": recipe.run.dir,
        "max_steps": recipe.run.steps,
        "per_device_train_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": job.passes,
        "learning_rate": options.lr,
        "adam_beta1": options.betas[0],
        "adam_beta2": options.betas[1],
        "adam_epsilon": options.eps,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.clip_norm,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": job.mixed,
        "logging_steps": recipe.run.log_every,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": job.device.type == "cpu",
    }
