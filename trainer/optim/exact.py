"""Arithmetic whose result depends neither on the order nor on the grouping of terms.

[Note: exact mode] With `run.determinism: exact` a run gives the same bits at every data-parallel
size and under every sharding, even if they change during the run. The sizes of tensor, pipeline,
context and expert parallelism must stay constant, because they change how a sample is rounded, or
which micro-batches an expert sums up at once.

- *Work.* The global batch is cut into micro-batches of fixed shape; the world size only decides
  which rank computes which (`elastic.group.batch_plan`). Kernels are deterministic. A CPU rank has
  one thread, because the number of threads changes how sums are cut.
- *Gradients.* The gradients of each micro-batch are rounded to multiples of `GRID`. A float64
  represents the first 2**53 multiples exactly, so sums in float64, on a rank and between ranks, do
  not round, and their order does not matter. FSDP computes these sums; for `strategy.name: ddp` its
  shard groups have one rank each. Sums within a tensor-parallel group come before the rounding.
- *Loss.* Losses are rounded to multiples of `LOSS_GRID` in the same way.
- *Norm.* Squares are cut into pieces, each rounded to its own grid, see `square_sums`.
- *Update.* Updates consist of operations that IEEE 754 defines to the last bit (adamw.py, muon.py).
  Vectorised kernels of torch.optim may round the last elements of a tensor differently, and the
  world size determines where a shard ends.
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
"""Gradients are rounded to multiples of 6e-14, which hardly changes Adam's updates, because its eps
is 1e-8."""
LARGEST_GRADIENT = 2.0**52 * GRID
"""Largest element of a summed gradient, 256. Beyond it the gradient becomes NaN."""
LOSS_GRID = 2.0**-32
"""Losses are rounded to multiples of this number. Their sums are exact up to 2 million."""
PIECES = 3
"""Number of pieces into which a square is cut. With 10**11 parameters the last piece ends 47 bits
below the largest square."""
CHUNK = {"cpu": 2**15, "cuda": 2**24}
"""Elements squared at a time, by device: they fit in a CPU's cache, or keep a GPU busy."""


def use_exact_kernels(device: torch.device) -> None:
    """Make this process use deterministic kernels, and on a CPU one thread."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    # Without it torch refuses cuBLAS's matrix products in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def snap_loss(loss: torch.Tensor) -> torch.Tensor:
    """Round a loss to a multiple of LOSS_GRID, in float64."""
    return (loss.double() / LOSS_GRID).round() * LOSS_GRID


def snap_gradients(
    units: Iterable[nn.Module], terms: int, sharded: Callable[[nn.Parameter], bool]
) -> None:
    """Register hooks that round the gradients of FSDP units to multiples of GRID in each backward
    pass. Gradients keep their dtype (bfloat16 or float32), which can represent the rounded numbers.
    If an element exceeds LARGEST_GRADIENT / terms, its sum might not be exact, and the whole
    gradient becomes NaN.

    Args:
        units: modules that FSDP gathers as one.
        terms: largest number of gradients that are summed: of micro-batches, or of parts of their
            sequences.
        sharded: returns whether a parameter is sharded at the moment, not gathered by FSDP.
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
        # FSDP's own hook ran before this one, so exactly the parameters of this unit are gathered.
        for parameter in unit.parameters():
            if parameter.requires_grad and not sharded(parameter) and parameter not in snapped:
                parameter.register_hook(snap)
                snapped.add(parameter)

    for unit in units:
        unit.register_forward_pre_hook(watch)


def square_sums(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return this rank's term of the squared gradient norm, as PIECES float64 numbers that sum to
    it; NaN on all ranks if a gradient is not finite. Called on all ranks; runs two small
    all-reduces. The sum of each number over all ranks is exact, so the norm is equal for every
    mesh: a square is cut into pieces, which are multiples of large powers of two (pre-rounding,
    Demmel & Nguyen 2013, "Fast Reproducible Floating-Point Summation")."""
    gradients = [gradient for p in parameters if (gradient := _own_gradient(p)) is not None]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, math.inf).to(largest)
        # NaN becomes infinity, because a maximum over ranks may ignore NaN.
        largest = torch.maximum(largest, torch.where(norm.isnan(), math.inf, norm))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    # The number of elements on all ranks, including other pipeline stages.
    elements = largest.new_full((), sum(gradient.numel() for gradient in gradients))
    dist.all_reduce(elements)
    bound, count = received(largest), int(received(elements))
    sums = torch.zeros(PIECES, dtype=torch.float64, device=device)
    if not math.isfinite(bound):
        return sums.fill_(math.nan)
    digits = 52 - math.ceil(math.log2(count + 1))
    # The sum of `count` multiples of 2**e, none above 2**(e + digits), is exact. A square is below
    # 2**top, and a piece leaves a rest of at most half its unit.
    top = 2 * math.frexp(bound)[1]
    units = [2.0 ** (top - number - (number + 1) * digits) for number in range(PIECES)]
    for gradient in gradients:
        for chunk in gradient.flatten().split(CHUNK[gradient.device.type]):
            rest = chunk.double().square_()
            for number, unit in enumerate(units):
                shift = 1.5 * 2.0**52 * unit  # adding this number rounds to a multiple of unit
                piece = (rest + shift).sub_(shift)
                sums[number] += piece.sum()
                rest.sub_(piece)
    return sums


def _own_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the shard of a gradient that this rank adds to the norm; None if a lower rank adds an
    equal one."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient if gradient is None or dist.get_rank() == 0 else None
    place = gradient.device_mesh.get_coordinate() or ()
    for coordinate, placement in zip(place, gradient.placements, strict=True):
        if placement.is_replicate() and coordinate:
            return None
    local = local_tensor(gradient)
    return local if local.numel() else None
