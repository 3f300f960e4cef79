"""A fixed validation pass: the same sequences in the same micro-batches at any world size."""

import torch
import torch.distributed as dist

from elastic import Pulse, World
from trainer.data.loader import load
from trainer.parallel.parallelize import ParallelModel
from trainer.recipe import Recipe
from trainer.tasks import Evaluation


@torch.no_grad()
def evaluate(
    model: ParallelModel,
    evaluation: Evaluation,
    recipe: Recipe,
    world: World,
    pulse: Pulse,
    step: int,
) -> dict[str, float]:
    """Means over the validation set of what the model returns of it. Called on all ranks.

    The validation set is cut into numbered micro-batches of one fixed shape, and the world size
    only decides which rank computes which. A rank that has none left repeats the first one with
    weight 0, so that every rank enters the same collectives. Sums are float64, in which the few
    float32 addends are exact: the same weights give the same value at every world size.
    """
    stream, count = evaluation.stream, evaluation.count
    size = recipe.batch.micro_batch
    numbers = range(world.rank, _round_up(-(-count // size), world.world_size), world.world_size)
    cuts = [range(n * size, min(n * size + size, count)) for n in numbers]
    requests = [list(cut) or list(range(min(size, count))) for cut in cuts]
    total: torch.Tensor = torch.zeros((), dtype=torch.float64, device=world.device)
    modes = {module: module.training for module in model.module.modules()}
    model.module.eval()
    batches = load(stream, requests, workers=0, pin_memory=world.device.type == "cuda")
    pulse.report(step, "data")
    for cut, inputs in zip(cuts, batches, strict=True):
        pulse.report(step, "evaluate")
        means = model({key: tensor.to(world.device) for key, tensor in inputs.items()})
        total = total + means.double() * len(cut)
        pulse.report(step, "data")
    pulse.report(step, "evaluate")
    for module, training in modes.items():  # the user may keep parts in eval mode
        module.training = training
    dist.all_reduce(total)
    return evaluation.values([value / count for value in total.reshape(-1).tolist()])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
