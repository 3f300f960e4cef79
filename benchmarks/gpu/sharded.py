"""Has a single rank train under FSDP2: `-m benchmarks.gpu.sharded MODULE ARGUMENT …` runs a module
that trains. There the trainer leaves FSDP out, as it has nobody to shard with; this has it decide
as it does for two ranks. Hooks, casts and DTensors are those of many ranks; their collectives are
for `benchmarks.gpu.sharing`.

Prints a line with the number of FSDP's units before the first step.
"""

import re
import runpy
import sys
from typing import Any
from unittest.mock import patch


def units(output: str) -> int:
    """What a run has printed: how many modules FSDP gathered and reduced, 0 without FSDP."""
    found = re.search(r"^FSDP units: (\d+)$", output, re.MULTILINE)
    return int(found[1]) if found else 0


def main() -> None:
    """Never returns."""
    from trainer.parallel import mesh
    from trainer.parallel.fsdp import fsdp_units
    from trainer.run import worker

    decide, train = mesh.is_sharded_by_fsdp, worker.train

    def as_for_two(recipe: Any, world_size: int) -> bool:
        return decide(recipe, max(2, world_size))

    def told(run: Any, startup: Any) -> int:
        print(f"FSDP units: {len(fsdp_units(run.model.module))}", flush=True)
        return train(run, startup)

    del sys.argv[0]
    with (
        patch.object(mesh, "is_sharded_by_fsdp", as_for_two),
        patch.object(worker, "train", told),
    ):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
