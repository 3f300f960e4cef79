"""A rank that leaves the gradients of an adapter, or of a model, under several layouts, those that
it has, and what is under an adapter in nf4, in OUT-RANK.safetensors:
python -m tests.distributed.lora_gradients OUT RECIPE.yaml 'key=value …' …"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic.world import World, join_world, leave_world
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.recipe import Recipe, load_recipe
from trainer.run.saves import load_published
from trainer.tasks.task import bare_model
from trainer.tasks.text_model import documents_for

if TYPE_CHECKING:
    from tests.distributed.jobs import Job

ROWS, LENGTH, VOCABULARY = 24, 16, 264


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Of A and B, which is not zero: or that of A would have no gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 0.1


def batch(vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Inputs and labels; so few of some rows count that a mean of means would be another."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row, ignored in ((0, 9), (1, 14), (3, 2), (6, 15), (7, 15), (9, 12), (18, 16)):
        labels[row, :ignored] = -100
    return ids[:, :-1], labels


def documents() -> Tensor:
    """Where a model is told of documents: which each token belongs to."""
    return (torch.arange(LENGTH) + torch.arange(ROWS)[:, None]) // 6


def gradients(recipe: Recipe, world: World) -> dict[str, Tensor]:
    """Those of this rank's parameters, by FQN, whole; of what is in nf4 its bytes."""
    model, blocks, _ = bare_model(recipe)
    mesh = build_mesh(recipe, world)
    made = parallelize(model, blocks, mesh, recipe, world.device, values)
    made.draw_weights()
    load_published(made, recipe, made.under_adapter(whole=True), model.tied_copies)
    ids, labels = batch(model.vocab_size)
    total = (labels != -100).sum()
    tensors = {"input_ids": ids, "labels": labels}
    if documents_for(recipe) == "document_ids":
        tensors["document_ids"] = documents()
    inputs = [
        {name: tensor[row : row + 2] for name, tensor in tensors.items()}
        for row in range(2 * mesh.dp_rank, ROWS, 2 * mesh.dp_size)
    ]

    for forward in made.run(inputs, train=True):
        given = inputs[forward.number]
        means = forward(given)
        if isinstance(means, dict):
            forward.root = means["loss"] * ((given["labels"] != -100).sum() / total)
    made.collect_gradients()
    frozen = [
        name for name, p in made.parameters.items() if not p.requires_grad and p.grad is not None
    ]
    assert not frozen, f"frozen, with a gradient: {frozen}"
    found: dict[str, Tensor] = {name: made.parameters[name].detach() for name in made.in_nf4}
    for name, parameter in made.optimized.items():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = parameter.grad.float()
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in sorted(found.items())
    }


def of_layouts(
    start: "Callable[..., Job]", ranks: int, layouts: Sequence[str], folder: Path
) -> list[dict[str, Tensor]]:
    """What ranks leave under each of the layouts, which `start` starts."""
    program = ("tests.distributed.lora_gradients", str(folder / "gradients"))
    code, output = start(ranks, *layouts, program=program).wait()
    assert code == 0, output
    found: list[dict[str, Tensor]] = [{} for _ in layouts]
    for rank in range(ranks):
        for name, tensor in load_file(folder / f"gradients-{rank}.safetensors").items():
            number, _, parameter = name.partition("/")
            found[int(number)][parameter] = tensor
    return found


def leave(compute: Callable[[Recipe, World], Mapping[str, Tensor]]) -> None:
    """Be a rank that leaves what it computes under each layout of its command line."""
    out, path, *layouts = sys.argv[1:]
    world = join_world("cpu", 60)
    left = {
        f"{number}/{name}": tensor.contiguous()
        for number, layout in enumerate(layouts)
        for name, tensor in compute(load_recipe(path, layout.split()), world).items()
    }
    save_file(left, f"{out}-{world.rank}.safetensors")
    leave_world(0)


if __name__ == "__main__":
    leave(gradients)
