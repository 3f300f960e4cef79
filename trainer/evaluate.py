"""A fixed validation pass: the same sequences in the same micro-batches at any world size."""

import torch
import torch.distributed as dist

from elastic import PAUSE_TO_LEAVE, Pulse, World
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
    *,
    heed: bool = True,
) -> dict[str, float] | None:
    """Means over the validation set of what the model returns of it; None if a node was told to go
    meanwhile (`heed`), on which the ranks agree before each micro-batch. Called on all ranks.

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
    leaving = False
    pulse.report(step, "data")
    for cut, inputs in zip(cuts, batches, strict=True):
        pulse.report(step, "evaluate")
        if leaving := heed and asked_to_pause(pulse) >= PAUSE_TO_LEAVE:
            break
        means = model({key: tensor.to(world.device) for key, tensor in inputs.items()})
        total = total + means.double() * len(cut)
        pulse.report(step, "data")
    pulse.report(step, "evaluate")
    for module, training in modes.items():  # the user may keep parts in eval mode
        module.training = training
    if leaving:
        return None
    dist.all_reduce(total)
    return evaluation.values([value / count for value in total.reshape(-1).tolist()])


def asked_to_pause(pulse: Pulse) -> float:
    """The sum of `Pulse.asked_to_pause` over the ranks. Called on all ranks."""
    asked = torch.tensor(float(pulse.asked_to_pause), dtype=torch.float64)  # by gloo: no GPU waits
    dist.all_reduce(asked)
    return asked.item()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
