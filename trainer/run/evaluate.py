"""The validation pass: the same sequences in the same micro-batches at any world size."""

from collections.abc import Mapping
from itertools import islice

import torch
import torch.distributed as dist

from elastic import PAUSE_TO_LEAVE, Pulse
from elastic.node.exchange import NodeExchangeSum, received
from trainer.data.loader import load
from trainer.data.stream import COUNTED
from trainer.parallel.passes import COUNT
from trainer.recipe.strategies import pp
from trainer.run.speed import RunSpeedRecorder
from trainer.run.state import Run
from trainer.tasks.task import TaskValidation


class RunValidator:
    """Decides when a run is validated, and logs the results. On all ranks."""

    def __init__(self, run: Run, speed: RunSpeedRecorder) -> None:
        self._run, self._speed = run, speed
        self._pending = False

    def make_up(self) -> float:
        """Run the validation pass that the loaded state lacks because a node left: decisions of
        `run.stop_after` must not depend on that. Returns PAUSE_TO_LEAVE if a node must leave again,
        else 0."""
        run, evaluation = self._run, self._run.task.validation
        if not evaluation or run.done or not run.progress.lacks_pass(run.recipe.run):
            return 0.0
        values = evaluate(run, evaluation)
        if values is None:
            return PAUSE_TO_LEAVE
        self._judge(values)
        return 0.0

    def after_step(self, requested: float) -> float:
        """Validate the weights after this step if validation is due; skip it if a node leaves.
        Returns `requested`, the sum of the ranks' pause requests before the pass, or PAUSE_TO_LEAVE
        if a node must leave."""
        run, evaluation = self._run, self._run.task.validation
        if not evaluation or not run.due(run.recipe.run.evaluate_every):
            return requested
        with self._speed.aside():
            values = evaluate(run, evaluation) if requested < PAUSE_TO_LEAVE else None
        self._pending = values is None
        if values is not None:
            self._judge(values)
            return requested
        when = "yet" if run.done or run.recipe.run.stop_after else "at all"
        run.log.say(f"step {run.progress.step} is not validated {when}: a node leaves")
        return PAUSE_TO_LEAVE

    def _judge(self, values: Mapping[str, float]) -> None:
        """Log the results of a validation pass. Update the best loss, and the number of passes
        since, which `run.stop_after` and `checkpoint.keep_best` use."""
        self._run.progress.judge(values.get("validation_loss"))
        self._run.log.validation(self._run.progress.step, values)

    def finish(self) -> None:
        """Validate the last step if a leaving node interrupted its pass, once the step is saved."""
        run, evaluation = self._run, self._run.task.validation
        values = evaluate(run, evaluation, heed=False) if self._pending and evaluation else None
        if values:
            run.log.validation(run.progress.step, values)


@torch.no_grad()
def evaluate(run: Run, evaluation: TaskValidation, *, heed: bool = True) -> dict[str, float] | None:
    """Return the means of the model's scalars over the validation set. With `heed`, stop and return
    None if a node must leave; the ranks agree on that regularly. On all ranks."""
    stream, count = evaluation.stream, evaluation.count
    model, pulse, step, device = run.model, run.pulse, run.progress.step, run.world.device
    cuts, requests = run.mesh.deal(count, run.recipe.micro_batch)
    total: torch.Tensor | None = None
    batches = load(stream, requests, workers=0, pin_memory=device.type == "cuda")
    pairs = zip(cuts, batches, strict=True)
    stages = pp.ranks(run.recipe.strategy)
    together = 4 * stages if stages > 1 else 1  # fewer would leave pipeline stages idle
    leaving = False
    with pulse.during("data"):
        with model.evaluating():
            while some := list(islice(pairs, together)):
                pulse.report(step, "evaluate")
                if leaving := heed and pause_request(pulse) >= PAUSE_TO_LEAVE:
                    break
                for forward in model.run([inputs for _, inputs in some], train=False):
                    pulse.report(step, "evaluate")
                    cut, batch = some[forward.number]
                    result = forward({k: x.to(device) for k, x in batch.items() if k != COUNTED})
                    if not isinstance(result, dict):
                        continue
                    usual = batch.get(COUNTED, len(cut))
                    weight = result.pop(COUNT, usual) * (bool(cut) and run.mesh.counts)
                    sums = torch.stack([one.double() for one in run.validated.in_order(result)])
                    part = torch.cat([sums, sums.new_ones(1)]) * weight
                    total = part if total is None else total + part
                pulse.report(step, "data")
        pulse.report(step, "evaluate")
        if leaving:
            return None
        names = run.validated.agree(["loss", *model.beside_loss], run.mesh.group)
        if total is None:
            total = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=run.mesh.group)
        *totals, counted = received(total)
    return evaluation.values(
        {name: value / counted for name, value in zip(names, totals, strict=True)}
    )


def pause_request(pulse: Pulse) -> float:
    """Return the sum of `Pulse.pause_request` over all ranks. On all ranks."""
    return NodeExchangeSum(pulse.pause_request).wait()
