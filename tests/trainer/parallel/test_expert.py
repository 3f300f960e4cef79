"""Where tokens go is decided in the forward pass, and not again where a block is recomputed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.models.test_moe import ARCHITECTURE, drawn
from trainer.parallel import expert
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.recipe import StrategySection

LAYERS = ARCHITECTURE.num_hidden_layers
CHOICE, EXCHANGE, WAIT = "aten.topk.default", "c10d.alltoall_base_.default", "tolist"


class Seen(TorchDispatchMode):
    """Counts operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts how often the host asks for the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") == WAIT
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mode", "again"), [("full", False), ("selective", False), ("selective", True)]
)
def test_recomputation_reuses_the_routing(alone: None, mode: Any, again: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 131, (2, 2, 24), generator=draw)
    plain, decoder = drawn().train(), drawn().train()
    plain(ids, labels)["loss"].backward()
    expert.apply(decoder, init_device_mesh("cpu", (1,)), StrategySection(ep=1))
    apply_activation_checkpointing(decoder, list(decoder.blocks), mode, again=again, draws=False)
    with Seen() as seen, Waits() as waits:
        decoder(ids, labels)["loss"].backward()
    # The sizes once; rows there and back in the forward pass, its repetition and the backward pass.
    exchanges = LAYERS * (1 + 3 * 2)
    assert (seen.count[CHOICE], seen.count[EXCHANGE], waits.count) == (LAYERS, exchanges, LAYERS)
    for expected, found in zip(plain.parameters(), decoder.parameters(), strict=True):
        gradient = found.grad
        assert gradient is not None
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert torch.equal(gradient, expected.grad)
