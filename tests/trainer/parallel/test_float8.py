"""Products in 8 bits: their arithmetic, emulated, against float64; what is converted; FSDP."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import RECIPE
from trainer.parallel import float8
from trainer.parallel.float8 import (
    apply_float8,
    check_matmul,
    converted,
    gather_in_8_bits,
)
from trainer.recipe import RecipeError, load_recipe
from trainer.tasks.task import bare_model

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPACING = {E4M3: (2.0**-3, 2.0**-9), E5M2: (2.0**-2, 2.0**-16)}
"""Of a format: the distance of neighbours, relative, and that of the smallest ones."""


def in_8_bits(values: Tensor, matmul: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What float64 `values` (M, K), which a product sums along K, become; and the most by which
    they may have changed, as the format has it."""
    largest = torch.finfo(dtype).max
    if matmul == "fp8_tensorwise":
        scale = largest / values.abs().amax()
    elif matmul == "fp8_rowwise":
        scale = 2 ** (largest / values.abs().amax(1, keepdim=True)).log2().floor()
    else:
        most = values.unflatten(1, (-1, 32)).abs().amax(2)
        scale = 2 ** -(most / largest).log2().ceil().repeat_interleave(32, 1)
    relative, smallest = SPACING[dtype]
    error = torch.maximum(values.abs() * relative, smallest / scale) / 2
    return (values * scale).float().to(dtype).double() / scale, error


def check_product(found: Tensor, a: Tensor, b: Tensor, matmul: str, dtypes: tuple) -> None:
    """`found` is a @ b.T of 8-bit numbers, and as near to that of float64 as these allow."""
    (a8, a_error), (b8, b_error) = (
        in_8_bits(x, matmul, kind) for x, kind in zip((a, b), dtypes, strict=True)
    )
    assert torch.all((a8 - a).abs() <= a_error)
    assert torch.all((b8 - b).abs() <= b_error)
    in_float32 = 2.0**-23 * math.ceil(math.log2(a.shape[1]) + 2) * (a8.abs() @ b8.abs().T)
    assert torch.all((found - a8 @ b8.T).abs() <= in_float32)
    bound = a.abs() @ b_error.T + a_error @ b.abs().T + a_error @ b_error.T + in_float32
    away = (found - a @ b.T).abs()
    assert torch.all(away <= bound)
    assert away.max() > 1e-3 * (a @ b.T).abs().max()  # they were 8 bits


@pytest.mark.parametrize("matmul", ["fp8_tensorwise", "fp8_rowwise", "mxfp8"])
def test_products_are_those_of_8_bit_numbers(matmul):
    """Forward, gradient of the input, gradient of the weight, of numbers from 2^-12 to 2^4."""
    torch.manual_seed(0)

    def wide(*shape: int) -> Tensor:
        return torch.randn(shape) * 2.0 ** torch.randint(-12, 3, (shape[0], 1))

    layer = nn.Linear(96, 64, bias=False)
    layer.weight.data = wide(64, 96)
    model = nn.Sequential(layer)
    x, gradient = wide(128, 96).requires_grad_(), wide(128, 64)
    apply_float8([model], matmul, emulate=True)
    assert type(model[0]) is not nn.Linear
    assert model[0].weight is layer.weight
    y = model(x.view(4, 32, 96)).view(128, 64)
    y.backward(gradient)
    x64, w64, g64 = x.detach().double(), layer.weight.detach().double(), gradient.double()
    of_gradients = E5M2 if matmul == "fp8_tensorwise" else E4M3
    check_product(y.detach(), x64, w64, matmul, (E4M3, E4M3))
    check_product(x.grad, g64, w64.T, matmul, (of_gradients, E4M3))
    check_product(layer.weight.grad, g64.T, x64.T, matmul, (of_gradients, E4M3))


def of_tiny_model(tmp_path, *overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path, ["precision.dtype=bf16", *overrides])
    model, blocks, _ = bare_model(recipe)
    return recipe, model, blocks


def test_only_linear_layers_of_blocks_that_the_format_fits_are_converted(tmp_path):
    _, model, blocks = of_tiny_model(tmp_path)
    names = list(model.state_dict())
    attention = {f"{x}_proj" for x in "qkvo"}
    mlp = {"gate_proj", "up_proj", "down_proj"}
    assert {name for _, name, _ in converted(blocks, "fp8_rowwise")} == attention | mlp
    # hidden_size is 48, no multiple of 32.
    assert not list(converted(blocks, "mxfp8"))

    class Routed(nn.Module):
        precise = ("gate",)

        def __init__(self):
            super().__init__()
            self.gate, self.up, self.odd = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 17)

    assert [name for _, name, _ in converted([Routed()], "fp8_rowwise")] == ["up"]
    apply_float8(blocks, "fp8_tensorwise", emulate=True)
    assert list(model.state_dict()) == names


def test_fsdp_sends_weights_in_8_bits(tmp_path):
    """Uneven shards; bit for bit what comes of whole float32 weights that are rounded then."""

    def train(rank: int, in_8_bits: bool) -> list[float]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(9, 32), *blocks)
        apply_float8(blocks, "fp8_tensorwise", emulate=True)
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
        for number, unit in enumerate((*blocks, model)):
            fully_shard(unit, mesh=mesh, reshard_after_forward=number == 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if in_8_bits:
            gather_in_8_bits(model)
        received, losses = [], []
        blocks[1][0].register_forward_pre_hook(
            lambda layer, _: received.append(type(layer.weight).__name__)
        )
        for _ in range(2):
            for training in (True, False):
                with torch.set_grad_enabled(training):
                    loss = model(torch.arange(6).view(3, 2)[rank]).square().mean()
                if training:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        assert (set(received) == {"Float8TrainingTensor"}) == in_8_bits
        dist.barrier()
        return losses

    apply_float8([nn.Sequential(nn.Linear(16, 16))], "fp8_tensorwise")  # import it before the fork
    both = run_ranks(3, lambda rank: [train(rank, form) for form in (False, True)], tmp_path)
    in_32, in_8 = zip(*both, strict=True)
    assert in_32 == in_8
    assert all(len(set(losses)) == 3 for losses in in_8)


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    recipe, _, blocks = of_tiny_model(tmp_path, "precision.matmul=mxfp8", "run.device=auto")
    with pytest.raises(RecipeError, match=r"capability 10\.0 or above, but this machine has no"):
        check_matmul(recipe, blocks, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"or above, but this machine has 9\.0; take another"):
        check_matmul(recipe, blocks, (9, 0))
    with pytest.raises(RecipeError, match="no linear layer whose sizes are multiples of 32"):
        check_matmul(recipe, blocks, (10, 0))
    monkeypatch.setattr(float8, "find_spec", lambda _: None)
    with pytest.raises(RecipeError, match="torchao is not installed; pip install"):
        check_matmul(recipe, blocks, (10, 0))
    for override, problem in (
        ("precision.dtype=fp32", "precision.dtype: precision.matmul=mxfp8 goes with bf16; set"),
        ("run.determinism=exact", "run.determinism: precision.matmul=mxfp8 has no exact mode"),
        ("data.seq_len=48", "data.seq_len: 48 is no multiple of 32, which mxfp8 needs"),
    ):
        with pytest.raises(RecipeError, match=problem):
            of_tiny_model(tmp_path, "precision.matmul=mxfp8", override)
