"""Two ranks that cut a head, and a model of the user's, and compare with the whole ones."""

import copy
from collections.abc import Callable
from itertools import product
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer import HeadLoss
from trainer.models import Decoder
from trainer.models import loss as loss_module
from trainer.models.adapter import add_adapters
from trainer.models.family import family_of
from trainer.models.loss import head_cross_entropy
from trainer.parallel import tensor
from trainer.parallel.tensor import TensorParallelGroup, TensorParallelLoss
from trainer.recipe import RecipeError, StrategySection
from trainer.recipe.architecture import Architecture
from trainer.recipe.sections import AdapterSection

SIZES = {
    **{"vocab_size": 18, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
}


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    """To float32 rounding, relative to the largest element."""
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def compare_losses(rank: int, ranks: TensorParallelGroup, mesh: DeviceMesh) -> None:
    sequence = ranks.sequence
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 8, 16), torch.randn(131, 16) * 3
    labels = torch.randint(0, 131, (3, 8))
    labels[0, 3:] = -100
    wanted = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = head_cross_entropy(*wanted, labels, 1 << 20)
    (expected * 5).backward()
    given = hidden.chunk(2, 1)[rank].clone() if sequence else hidden.clone()
    given.requires_grad_()
    cut = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    loss = TensorParallelLoss(ranks)(given, cut, labels)
    (loss * 5).backward()
    close(loss, expected)
    whole = wanted[0].grad
    assert whole is not None
    close(given.grad, whole.chunk(2, 1)[rank] if sequence else whole)  # type: ignore[arg-type]
    assert isinstance(cut.grad, DTensor)
    close(cut.grad.full_tensor(), wanted[1].grad)  # type: ignore[arg-type]
    with torch.no_grad():
        close(TensorParallelLoss(ranks)(given, cut, labels), expected)
    again = given.detach().requires_grad_()
    frozen = nn.Parameter(cut.detach(), requires_grad=False)
    with mock.patch.object(loss_module, "add_product") as made:
        (TensorParallelLoss(ranks)(again, frozen, labels) * 5).backward()
    assert not made.called, "a frozen head needs no gradient"
    assert torch.equal(again.grad, given.grad)  # type: ignore[arg-type]


class Own(nn.Module):
    """A model with biases, a norm in the same module as its products, and a tied head."""

    tensor_plan = {  # noqa: RUF012
        "embed": "vocabulary",
        "places": "vocabulary",
        "head": "vocabulary",
        "*.up": "column",
        "*.gate": "column",
        "*.down": "row",
        "*norm": "norm",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 8), nn.Linear(8, 19, bias=False)
        self.head.weight, self.places = self.embed.weight, nn.Embedding(9, 8)
        self.layers = nn.ModuleList([OwnBlock(), OwnBlock()])
        self.loss = HeadLoss()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.loss(x, self.head.weight, ids.roll(-1, 1))
        return loss


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(8), nn.Linear(12, 8)
        self.up, self.gate = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.down(self.up(y) * self.gate(x).sigmoid())  # of different inputs
        return x + self.down(torch.tanh(self.up(x)))  # without a norm between


def compare_models(mesh: DeviceMesh, sequence: bool) -> None:
    torch.manual_seed(0)
    model, ids = Own(), torch.randint(0, 19, (3, 6))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(ids)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    again = Own()
    again.load_state_dict(state)
    tensor.apply(again, mesh["tp"], StrategySection(tp=2, sequence_parallel=sequence))
    fully_shard(again, mesh=mesh["dp_shard"])
    loss = again(ids)
    loss.backward()
    close(loss, expected)
    assert [name for name, _ in again.named_parameters()] == list(gradients), "ties are kept"
    for name, parameter in again.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        close(parameter.grad.full_tensor(), gradients[name])  # type: ignore[arg-type]
    assert "pass the weight of the head to a" in complaint(again.head, torch.zeros(1, 8))
    if sequence:
        assert "5 tokens does not divide among tp=2" in complaint(again, ids[:, :5])


def compare_families(mesh: DeviceMesh, sequence: bool) -> None:
    """Biases, norms of all heads together, and products that are several in one, the last ones with
    an adapter."""
    for name in ("qwen2", "olmo2", "gemma3_text", "phi3"):
        family = family_of(name)
        architecture = family.complete(Architecture(model_type=name, **SIZES))
        torch.manual_seed(0)
        model = Decoder(architecture)
        if name == "phi3":
            add_adapters(model, AdapterSection(rank=2, base="fp32"))
        model.double()  # rounding in float32 reaches 2.5e-5 on some CPUs; norms stay in float32
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5)
                if parameter.dim() == 1:
                    parameter.add_(1)
        ids = torch.randint(0, 18, (3, 6))
        again = copy.deepcopy(model)
        expected = model(ids, ids.roll(-1, 1))
        expected.backward()
        tensor.apply(again, mesh["tp"], StrategySection(tp=2, sequence_parallel=sequence))
        fully_shard(again, mesh=mesh["dp_shard"])
        loss = again(ids, ids.roll(-1, 1))
        loss.backward()
        close(loss, expected)
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert wanted.keys() == {n for n, p in again.named_parameters() if p.grad is not None}
        for fqn, gradient in wanted.items():
            close(again.get_parameter(fqn).grad.full_tensor(), gradient, 1e-5)  # type: ignore


def complaint(function: Callable[..., object], *args: object) -> str:
    try:
        function(*args)
    except (RecipeError, ValueError) as error:
        return str(error)
    raise AssertionError("it was not refused")


def compare_all(rank: int) -> int:
    """Returns `rank`, as one that has come to the end."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    for sequence, logits in product((False, True), (1 << 20, 300)):  # at once, and in chunks
        loss_module.max_chunk_logits = lambda _, most=logits: most  # type: ignore[attr-defined]
        compare_losses(rank, TensorParallelGroup(mesh["tp"], sequence), mesh["tp"])
    for sequence in (False, True):
        compare_models(mesh, sequence)
        compare_families(mesh, sequence)
    return rank
