"""Arithmetic whose result depends neither on the order nor on the grouping of its terms.

[Note: exact mode] With `run.determinism: exact` a run gives the same bits at every world size and
under every sharding, also when the world changes on the way. Ranks that compute a sample together
(tensor, pipeline and context parallelism) round in their own way, which no other rank changes: so
the bits are the same at every data-parallel size, with as many of them as before.

- *Work.* The global batch is cut into numbered micro-batches of fixed shape; the world size only
  decides which rank computes which (`elastic.group.batch_plan`). Kernels are deterministic, and
  a CPU rank has one thread, as sums are cut by the number of threads.
- *Gradients.* Those of each micro-batch are rounded to multiples of `GRID`. A float64 holds all
  multiples up to 2**53, so adding them up in float64, on a rank and between ranks, rounds nothing,
  and order cannot matter. FSDP does both; with one rank per shard group it also serves for DDP.
  What a tensor-parallel group adds up, it adds up before that.
- *Loss.* Likewise, on `LOSS_GRID`.
- *Norm.* `square_sums`: the squares are cut into pieces that lie on grids of their own.
- *Update.* Operations that IEEE 754 defines to the last bit (adamw.py, muon.py). The kernels of
  torch.optim may round the end of a tensor, which vector instructions do not reach, otherwise than
  its rest, and where a shard ends depends on the world size.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.format.tensors import local_tensor
from elastic.node.exchange import received

GRID = 2.0**-44
"""Gradients are multiples of it. Adam's step feels an element this small, 6e-14, no more: its eps
is 1e-8."""
LARGEST_GRADIENT = 2.0**52 * GRID
"""256: an element beyond it makes the gradient of its tensor NaN, and the step is skipped."""
LOSS_GRID = 2.0**-32
"""Losses are multiples of it: sums are exact up to 2 million."""
PIECES = 3
"""Parts that a square is cut into. At 10**11 parameters the last one ends 47 bits below the largest
square."""
CHUNK = {"cpu": 2**15, "cuda": 2**24}
"""Elements that are squared at a time: what the cache holds; what keeps a GPU busy."""


def use_exact_kernels(device: torch.device) -> None:
    """For this process, from now on: deterministic kernels, and one thread on a CPU."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    # cuBLAS reads it when its first handle is made, and torch refuses to go on without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def snap_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss in float64, rounded to a multiple of LOSS_GRID: such terms add up exactly."""
    return (loss.double() / LOSS_GRID).round() * LOSS_GRID


def snap_gradients(
    units: Iterable[nn.Module], terms: int, sharded: Callable[[nn.Parameter], bool]
) -> None:
    """From now on, each backward pass rounds the gradients of FSDP units to multiples of GRID.

    Args:
        units: modules that FSDP gathers as one; their forward pass puts whole parameters in place.
        terms: gradients that are added up: of micro-batches, each weighted by its share of the
            global batch, or of parts of their sequences.
        sharded: whether a parameter is one that FSDP has not gathered.

    Works in the format of the gradient (bfloat16 or float32): a multiple of GRID that is close to
    a number has no more digits than the number. An element above LARGEST_GRADIENT / terms, whose
    sum might not be exact, makes the whole tensor NaN.
    """
    limit = LARGEST_GRADIENT / terms
    snapped: set[nn.Parameter] = set()

    def snap(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor):
            whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
            local = snap(local_tensor(gradient))
            mesh, shape, stride = gradient.device_mesh, gradient.shape, gradient.stride()
            return DTensor.from_local(local, mesh, whole, shape=shape, stride=stride)
        largest = torch.linalg.vector_norm(gradient, math.inf)
        grid = torch.where(largest <= limit, GRID, math.nan).to(gradient.dtype)
        return gradient.mul(1 / GRID).round_().mul_(grid)

    @torch.compiler.disable
    def watch(unit: nn.Module, _inputs: object) -> None:
        # FSDP's own hook has run: the parameters of this unit are whole now, those of others not.
        for parameter in unit.parameters():
            if sharded(parameter) or parameter in snapped:
                continue
            if parameter.requires_grad:
                parameter.register_hook(snap)
                snapped.add(parameter)

    for unit in units:
        unit.register_forward_pre_hook(watch)


def square_sums(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """This rank's part of the squared gradient norm, PIECES float64 numbers that add up to it.

    Summed over all ranks each is exact, so it is the same for every mesh. NaN on all ranks if any
    gradient is not finite. On all ranks: they first agree on the largest gradient.

    Pre-rounding of Demmel & Nguyen 2013, "Fast Reproducible Floating-Point Summation": a square is
    cut into pieces, each a multiple of a power of two so large that the sum of all is exact.
    """
    gradients = [gradient for p in parameters if (gradient := _own_gradient(p)) is not None]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, math.inf).to(largest)
        # A NaN as infinity: a maximum over ranks may lose it.
        largest = torch.maximum(largest, torch.where(norm.isnan(), math.inf, norm))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    # Those of the other stages of a pipeline, too.
    elements = largest.new_full((), sum(gradient.numel() for gradient in gradients))
    dist.all_reduce(elements)
    bound, count = received(largest), int(received(elements))
    sums = torch.zeros(PIECES, dtype=torch.float64, device=device)
    if not math.isfinite(bound):
        return sums.fill_(math.nan)
    digits = 52 - math.ceil(math.log2(count + 1))
    # `count` multiples of 2**e, none above 2**(e + digits), have an exact sum. The first pieces
    # are below 2**top, and what each leaves over is at most half of its unit.
    top = 2 * math.frexp(bound)[1]
    units = [2.0 ** (top - number - (number + 1) * digits) for number in range(PIECES)]
    for gradient in gradients:
        for chunk in gradient.flatten().split(CHUNK[gradient.device.type]):
            rest = chunk.double().square_()
            for number, unit in enumerate(units):
                shift = 1.5 * 2.0**52 * unit  # so large that adding it rounds to a multiple of unit
                piece = (rest + shift).sub_(shift)
                sums[number] += piece.sum()
                rest.sub_(piece)
    return sums


def _own_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The part of the gradient that is this rank's to count: of replicas, the first counts."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient if gradient is None or dist.get_rank() == 0 else None
    place = gradient.device_mesh.get_coordinate() or ()
    for coordinate, placement in zip(place, gradient.placements, strict=True):
        if placement.is_replicate() and coordinate:
            return None
    local = local_tensor(gradient)
    return local if local.numel() else None
