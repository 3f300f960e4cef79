"""A rank whose masks are transformers' own: those of OPT know of no documents.
python -m tests.distributed.leaky RECIPE.yaml [key=value …]"""

import runpy
from contextlib import nullcontext

from trainer.models import transformers_model

if __name__ == "__main__":
    transformers_model._documents_hidden = lambda *_: nullcontext()  # type: ignore[assignment]
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
