"""Imported by the process that jobs are forked from: what each of them would do anew."""

import gc
from importlib import import_module

gc.disable()  # nothing that is imported here is garbage
for name in ("trainer.run.worker", "torch.distributed.run", "trainer.models.families.qwen3"):
    import_module(name)
import_module("trainer.recipe.checking").adapter(import_module("trainer.recipe").Recipe)
gc.enable()
