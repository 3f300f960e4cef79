"""Arithmetic whose result depends neither on the order nor on the grouping of terms.

[Note: exact mode] With `run.determinism: exact` a run gives the same bits at every world size and
under every sharding, also when the world changes. Ranks that compute a sample together (tensor,
pipeline and context parallelism) round in their own way, independent of other ranks. So bits are
equal at every data-parallel size, for a constant number of these.

- *Work.* The global batch is cut into numbered micro-batches of fixed shape; the world size only
  decides which rank computes which (`elastic.group.batch_plan`). Kernels are deterministic, and a
  CPU rank has one thread, because the number of threads determines how sums are cut.
- *Gradients.* Those of each micro-batch are rounded to multiples of `GRID`. A float64 holds all
  multiples up to 2**53, so sums in float64, on a rank and between ranks, do not round, and their
  order does not matter. FSDP computes both; with one rank per shard group it replaces DDP. Sums
  within a tensor-parallel group come before.
- *Loss.* Likewise, on `LOSS_GRID`.
- *Norm.* `square_sums`: the squares are cut into pieces on grids of their own.
- *Update.* Operations that IEEE 754 defines to the last bit (adamw.py, muon.py). Kernels of
  torch.optim may round the end of a tensor, beyond the last full vector, differently, and the world
  size determines where a shard ends.
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
"""Unit of gradients. Adam's step does not depend on elements this small, 6e-14: its eps is 1e-8."""
LARGEST_GRADIENT = 2.0**52 * GRID
"""256. A larger element makes the gradient of its tensor NaN, and the step is skipped."""
LOSS_GRID = 2.0**-32
"""Unit of losses: sums are exact up to 2 million."""
PIECES = 3
"""Pieces of a square. With 10**11 parameters the last ends 47 bits below the largest square."""
CHUNK = {"cpu": 2**15, "cuda": 2**24}
"""Elements squared at a time: as many as fit in a CPU's cache, or keep a GPU busy."""


def use_exact_kernels(device: torch.device) -> None:
    """Use deterministic kernels in this process from now on, and one thread on a CPU."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    # cuBLAS reads it with its first handle; without it torch refuses deterministic products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def snap_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss in float64, rounded to a multiple of LOSS_GRID, so that sums are exact."""
    return (loss.double() / LOSS_GRID).round() * LOSS_GRID


def snap_gradients(
    units: Iterable[nn.Module], terms: int, sharded: Callable[[nn.Parameter], bool]
) -> None:
    """From now on, round the gradients of FSDP units to multiples of GRID in each backward pass.

    Args:
        units: modules that FSDP gathers as one; their forward has whole parameters.
        terms: number of gradients summed: of micro-batches, each weighted by its share of the
            global batch, or of parts of their sequences.
        sharded: whether a parameter is not gathered by FSDP.

    Rounds in the gradient's own format (bfloat16 or float32): the nearest multiple of GRID has no
    more digits than the number. An element above LARGEST_GRADIENT / terms, whose sum might not be
    exact, makes the whole tensor NaN.
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
        # FSDP's hook ran before: parameters of this unit are whole, those of other units are not.
        for parameter in unit.parameters():
            if sharded(parameter) or parameter in snapped:
                continue
            if parameter.requires_grad:
                parameter.register_hook(snap)
                snapped.add(parameter)

    for unit in units:
        unit.register_forward_pre_hook(watch)


def square_sums(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """This rank's part of the squared gradient norm: PIECES float64 numbers that add up to it.

    Their sums over all ranks are exact, so they are equal for every mesh; NaN on all ranks if a
    gradient is not finite. On all ranks: they first agree on the largest gradient.

    Pre-rounding of Demmel & Nguyen 2013, "Fast Reproducible Floating-Point Summation": a square is
    cut into pieces, each a multiple of a power of two large enough that the sum of all is exact.
    """
    gradients = [gradient for p in parameters if (gradient := _own_gradient(p)) is not None]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, math.inf).to(largest)
        # NaN as infinity: a maximum over ranks may lose a NaN.
        largest = torch.maximum(largest, torch.where(norm.isnan(), math.inf, norm))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    # Includes the elements of other pipeline stages.
    elements = largest.new_full((), sum(gradient.numel() for gradient in gradients))
    dist.all_reduce(elements)
    bound, count = received(largest), int(received(elements))
    sums = torch.zeros(PIECES, dtype=torch.float64, device=device)
    if not math.isfinite(bound):
        return sums.fill_(math.nan)
    digits = 52 - math.ceil(math.log2(count + 1))
    # `count` multiples of 2**e, none above 2**(e + digits), have an exact sum. The first pieces are
    # below 2**top, and each leaves a rest of at most half its unit.
    top = 2 * math.frexp(bound)[1]
    units = [2.0 ** (top - number - (number + 1) * digits) for number in range(PIECES)]
    for gradient in gradients:
        for chunk in gradient.flatten().split(CHUNK[gradient.device.type]):
            rest = chunk.double().square_()
            for number, unit in enumerate(units):
                shift = 1.5 * 2.0**52 * unit  # adding it rounds to a multiple of unit
                piece = (rest + shift).sub_(shift)
                sums[number] += piece.sum()
                rest.sub_(piece)
    return sums


def _own_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The part of a gradient that this rank counts, or None: of replicas the first counts."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient if gradient is None or dist.get_rank() == 0 else None
    place = gradient.device_mesh.get_coordinate() or ()
    for coordinate, placement in zip(place, gradient.placements, strict=True):
        if placement.is_replicate() and coordinate:
            return None
    local = local_tensor(gradient)
    return local if local.numel() else None
