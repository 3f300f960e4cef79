"""The learning rate as a pure function of the step, with no state to save."""

import math
from collections.abc import Callable
from numbers import Real

from trainer.recipe import Recipe, RecipeError, ScheduleSection
from trainer.recipe.factory import call_factory, refusing

Rate = Callable[[int], float]


def build_schedule(recipe: Recipe, tried: int = 3) -> Rate:
    """Return the recipe's schedule. Raises RecipeError if `schedule.factory` returned no function,
    or an invalid rate for one of about `tried` steps, which include the first and the last. The
    schedule raises it at other steps with an invalid rate."""
    steps, lr, options = recipe.run.steps, recipe.optimizer.lr, recipe.schedule
    if not options.factory:
        return lambda step: learning_rate(step, steps, lr, options)
    name = options.factory
    given = {"steps": steps, "lr": lr, **options.factory_options}
    rate = call_factory("schedule.factory", name, given)
    if not callable(rate):
        raise RecipeError(
            f"schedule.factory: {name} returned {type(rate).__name__}, not a function from a step "
            "to its learning rate"
        )

    def checked(step: int) -> float:
        with refusing("schedule.factory", f"the rate of step {step} by {name}"):
            raw = rate(step)
        # Tensors are refused (they are not Real), because reading one could wait for a GPU.
        value = float(raw) if isinstance(raw, Real) else math.nan
        if math.isfinite(value) and value >= 0:
            return value
        raise RecipeError(
            f"schedule.factory: {name} gives {raw!r} as the learning rate of step {step}; it "
            "must be a finite number, no tensor, and at least 0"
        )

    for step in {*range(1, steps, max(1, steps // tried)), steps}:
        checked(step)
    return checked


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Return the learning rate of `step` (from 1) in a run of `steps` steps."""
    warmup, decay = schedule.lengths(steps)
    floor = peak * schedule.min_lr_ratio
    if step <= warmup:
        return peak * step / warmup
    decay = decay if schedule.name == "wsd" else steps - warmup
    progress = min(1.0, max(0.0, (step - (steps - decay)) / decay))
    match schedule.name:
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            return peak + (floor - peak) * progress
        case "constant":
            return peak
