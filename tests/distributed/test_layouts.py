"""What was trained in one layout of model parallelism is anybody's: of other layouts, and of other
programs."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpointing.tools.convert import export
from tests.distributed.jobs import soak
from tests.distributed.test_expert_parallel import EP, MOE

START = ("run.steps=3", "schedule={}", "model.architecture.num_hidden_layers=4")
TP2_PP2 = ("strategy.tp=2", "strategy.sequence_parallel=true", "strategy.pp=2")


@soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("run", "model", "first", "ep"),
    [("layouts", (), (), ("strategy.pp=2",)), ("experts", MOE, EP, EP)],
    ids=["dense", "experts"],
)
def test_a_checkpoint_of_tp2_pp2_goes_through_all_layouts_and_out(
    workspace, train, start, run, model, first, ep
):
    """TP2 x PP2 → FSDP4 → CP2 x FSDP2 → CP2 x PP2 → one process → transformers, bit for bit. With
    experts TP2 x PP2 x EP2 at first, and EP2, in place of PP2, beside CP2 and by itself."""
    train(4, f"run.dir={run}", *START, *TP2_PP2, *first, *model)
    trained = before = workspace / run / "checkpoints"
    for ranks, layout in (
        (4, ()),
        (4, ("strategy.cp=2",)),
        (4, ("strategy.cp=2", *ep)),
        (2, ep),
        (1, ()),
    ):
        after = workspace / run / f"{ranks}-{'-'.join(layout)}"
        program = ("tests.distributed.resaved", str(after))
        given = (f"checkpoint.directory={before}", *START[1:], *layout, *model)
        code, output = start(ranks, *given, program=program).wait()
        assert code == 0, output
        before = after
    step = "step-00000003"
    names = [path.relative_to(trained) for path in sorted(trained.rglob("*.safetensors"))]
    assert len(names) == 2
    for name in names:
        assert (trained / name).read_bytes() == (before / name).read_bytes(), name
    export(trained / step, workspace / run / "exported")
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (trained / step, before / step, workspace / run / "exported")
    ]
    assert models[0]
    for other in models[1:]:
        assert models[0].keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in models[0].items())
    command = ["-m", "trainer.cli", "generate", run, "--prompt", "the", "--temperature", "0"]
    texts = [
        subprocess.run(
            [sys.executable, *command[:3], folder, *command[4:]],
            cwd=workspace, check=True, capture_output=True, text=True,
        ).stdout
        for folder in (run, f"{run}/exported")
    ]  # fmt: skip
    assert texts[0].startswith("the")
    assert texts[0] == texts[1]
