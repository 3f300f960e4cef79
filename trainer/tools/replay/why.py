"""Explains a step: its documents ranked by loss, gradient norm and share of the gradient, the
parameters with the largest gradients, and the neighbouring steps.

[Note: share] The gradient g of a step is the sum of its documents' gradients g_d, each weighted by
its share of the labels. The share of document d is <g_d, g> / |g|^2: shares sum to 1, apart from
terms that a model adds to its loss. A document with a large loss may have a small share, because
its gradient points elsewhere; hence several lists.

[Note: loss a byte] A tokenizer cuts noise into tokens of one letter. A model soon learns which
letters these are, so that such a token costs no more than that of a word of six letters. So a list
by the loss a byte of text shows noise well. Words in a wrong order show better in the list by the
loss a token. Samples of the user's own data have no text, and so no list by bytes.

[Note: few labels] A step may hold only the last words of a document, whose mean loss is high by
chance. So the lists of losses are ordered by the mean that the document would have with PRIOR more
labels or bytes, each with the mean loss of the step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.distributed.tensor import DTensor

from checkpointing.format.tensors import local_tensor
from checkpointing.format.untrusted import printable
from checkpointing.ranks import exchange
from checkpointing.storage.place import location
from elastic.node.exchange import received
from trainer.data.loader import TokenStream
from trainer.data.sample_stream import SampleStream
from trainer.data.shards import TokenDataset
from trainer.data.stream import COUNTED, IGNORED_LABEL
from trainer.data.tokenizer import read_tokenizer
from trainer.optim.optimizer import build_schedule
from trainer.recipe import RecipeError, counted
from trainer.recipe.seeds import stable_seed
from trainer.recipe.stages import ordered
from trainer.run.state import Run
from trainer.run.step import StepGradients, seed_generators
from trainer.text import table
from trainer.tools.replay.lineage import ReplayLineage
from trainer.tools.replay.rebuild import ReplaySources

LISTED = 5
"""Length of each list of documents and of the list of parameters."""
AROUND = 3
"""Steps shown before and after the explained step."""
PRIOR = {"token": 10, "label": 10, "pair": 0, "byte": 30}
"""See [Note: few labels]. For tokens it is about the variance of the losses in a document, divided
by the variance of the means of documents. A step holds pairs only as a whole."""
SHOWN_TOKENS, SHOWN_LETTERS = 60, 70
"""Tokens of a document that are decoded, and letters of their text that are shown."""


@dataclass
class _DocumentShare:
    """What a step takes of one document, one pair of answers, or one sample of the user's own
    data."""

    source: int
    number: int
    """Index in its source; of a pair, the index of the chosen answer."""
    ids: Sequence[int] = ()
    """The first tokens that the model was to predict."""
    sequences: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """(position, inputs of the model) of each sequence with a part of the document. Other labels
    are masked in these inputs. COUNTED is the number of labels; 1 for a pair."""
    bytes: int = 0
    """Bytes of the text of the document's labels in UTF-8; 0: no text."""

    @property
    def count(self) -> int:
        """Number of labels, pairs or samples."""
        return sum(batch[COUNTED] for _, batch in self.sequences)


@dataclass(frozen=True)
class _Weighed:
    """Loss and gradient of one part of a step."""

    part: _DocumentShare
    loss_sum: float
    """Sum over the labels of the part; of a pair, the loss."""
    norm: float
    """Norm of the part's own gradient, weighted as in the step."""
    share: float
    """Share of the step's gradient, see [Note: share]."""


def why(
    run: Run, result: StepGradients, lineage: ReplayLineage, sources: ReplaySources
) -> Iterator[str]:
    """Yield the lines that explain a step, given the run's state before it, and its loss and
    gradients (`result`). Collective; replaces the gradients in the model. Raises RecipeError if the
    data has no documents."""
    step = run.progress.step + 1
    # DDP's gradients lie in memory that the next backward pass writes to.
    whole = {name: gradient.clone() for name, gradient in _gradients(run).items()}
    scale = result.undivided / run.progress.loss_scale.value
    largest = _largest(run, whole, scale)
    names = _Names(run)
    stream, begin = run.task.stream, run.progress.sequences
    if not isinstance(stream, TokenStream | SampleStream):
        raise RecipeError(
            "--why: this data has no documents that can be told apart in the loss: it is a graph; "
            "leave --why away"
        )
    parts = parts_of(stream, range(begin, begin + run.plan.global_batch), names.tokenizer)
    if run.world.is_main:
        print(
            f"\nwhy: step {step} took {len(parts)} documents, or parts of them; each takes a "
            "forward and a backward pass, of each sequence that it is in",
            flush=True,
        )
    count = max(1, sum(part.count for part in parts))
    weighed = [_weigh(run, part, whole, scale, result.norm, count) for part in parts]
    shares = sum(one.share for one in weighed)
    finite = [one for one in weighed if math.isfinite(one.loss_sum)]
    loss = sum(one.loss_sum for one in finite)
    a_label = loss / max(1, sum(one.part.count for one in finite))
    a_byte = loss / max(1, sum(one.part.bytes for one in finite))

    def with_prior(one: _Weighed, unit: str, size: int, mean: float) -> float:
        return (one.loss_sum + mean * PRIOR[unit]) / (size + PRIOR[unit])

    def added(one: _Weighed) -> float:
        """Return how much the mean loss of the step would fall without this part."""
        return (one.loss_sum - one.part.count * a_label) / max(1, count - one.part.count)

    lists: dict[str, Callable[[_Weighed], float]] = {
        f"highest loss a {names.unit}": lambda one: with_prior(
            one, names.unit, one.part.count, a_label
        ),
        "highest loss a byte": lambda one: with_prior(one, "byte", one.part.bytes, a_byte),
        "largest gradient of its own": lambda one: one.norm,
        f"largest share of the gradient (all together {shares:.1%})": lambda one: one.share,
    }
    if not any(part.bytes for part in parts):
        del lists["highest loss a byte"]
    for title, key in lists.items():
        # NaN comes first, and infinity second: such documents explain most
        ranked = sorted(weighed, key=lambda one: (math.isnan(key(one)), key(one)), reverse=True)
        yield f"\n{title}:"
        yield from names.table([(one, added(one)) for one in ranked[:LISTED]])
    yield "\nlargest gradients, by parameter:"
    square = result.norm**2 or 1.0
    rows = [[f"{norm:.4g}", f"{norm**2 / square:.1%}", name] for name, norm in largest]
    yield from table([["norm", "of |g|²", "parameter"], *rows], right={0, 1}, indent="  ")
    yield "\nthe steps around it:"
    yield from _neighbouring_steps(run, step, lineage, sources)


# --- documents -------------------------------------------------------------------------------


def parts_of(
    stream: TokenStream | SampleStream,
    positions: Iterable[int],
    tokenizer: Callable[[int], Tokenizer],
) -> list[_DocumentShare]:
    """Return the documents, pairs or samples in the sequences at `positions` of a stream.
    `tokenizer` returns the tokenizer of a source."""
    parts: dict[tuple[int, int], _DocumentShare] = {}
    for position in positions:
        batch = stream.fetch([position])
        if isinstance(stream, SampleStream):
            (source,), (sample,) = stream.locate(np.array([position]))
            part = parts.setdefault((source, sample), _DocumentShare(int(source), int(sample)))
            part.sequences.append((position, batch))
            continue
        source, documents = stream.documents_of(position)
        text = torch.cat([batch["input_ids"][0][1:], batch["labels"][0][-1:]])
        for number, mine in by_document(documents, batch, paired=stream.paired):
            counted = mine["labels"][mine["labels"] != IGNORED_LABEL].tolist()
            if not counted:
                continue
            ids = text[torch.from_numpy(documents == number)].tolist()
            new = _DocumentShare(source, number, [one for one in ids if one >= 0][:SHOWN_TOKENS])
            part = parts.setdefault((source, number), new)
            part.sequences.append((position, mine))
            if not stream.paired:
                part.bytes += len(tokenizer(source).decode(counted).encode())
    return list(parts.values())


def _paired(run: Run) -> bool:
    return isinstance(run.task.stream, TokenStream) and run.task.stream.paired


def by_document(
    documents: NDArray[np.int64], batch: Mapping[str, Any], *, paired: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index of a document, the sequence with only its labels) for each document in a
    sequence; for a pair, the index of the chosen answer, and the labels of both answers.

    Args:
        documents: (T,), index of each label's document; -1 where no label counts.
        batch: the sequence, as the model's inputs.
    """
    if paired:  # the answers of a pair are neighbours
        documents = np.where(documents < 0, documents, documents // 2 * 2)
    for number in dict.fromkeys(documents[documents >= 0].tolist()):
        inside = torch.from_numpy(documents == number)[None]
        labels = torch.where(inside, batch["labels"], IGNORED_LABEL)
        mine = {**batch, "labels": labels, COUNTED: int((labels != IGNORED_LABEL).sum())}
        if paired:
            first = int(batch["segments"][inside][0])
            answers = slice(first, first + 2)
            mine |= {
                "segments": torch.where(inside, batch["segments"] - first, 0),
                "answer_labels": batch["answer_labels"][answers],
                COUNTED: 1,
            }
            if "reference" in batch:
                mine["reference"] = batch["reference"][answers]
        yield number, mine


def _weigh(
    run: Run,
    part: _DocumentShare,
    whole: Mapping[str, torch.Tensor],
    scale: float,
    norm: float,
    count: int,
) -> _Weighed:
    """Compute loss and gradient of one part alone. Collective: all replicas compute the same, and
    that of the first counts."""
    model, recipe, device = run.model, run.recipe, run.world.device
    paired = _paired(run)
    total = torch.zeros(3, dtype=torch.float64, device=device)
    model.zero_gradients()
    for forward in model.run([batch for _, batch in part.sequences], train=True):
        position, batch = part.sequences[forward.number]
        inputs = {key: one.to(device) for key, one in batch.items() if key != COUNTED}
        if recipe.draws:
            seed_generators(stable_seed(recipe.run.seed, "dropout", position), device)
        result = forward(inputs)
        if isinstance(result, dict):
            # Auxiliary losses, such as that of a router, belong to no document. The cross-entropy
            # of a pair is a part of its loss.
            mean = result["loss"] if paired else result.get("cross_entropy", result["loss"])
            loss = mean * batch[COUNTED]
            # All replicas enter the collectives; only the gradient of the first replica counts.
            weight = run.progress.loss_scale.value / count * (run.mesh.dp_rank == 0)
            forward.root = loss * weight
            if run.mesh.dp_rank == 0 and run.mesh.counts:
                total[2] += loss.detach()
    model.collect_gradients()
    for name, gradient in _gradients(run).items():
        # Each rank adds its part; replicated parts are added once per copy.
        copies = run.mesh.holders // _shards(gradient)
        own = local_tensor(gradient).double() / run.progress.loss_scale.value
        total[0] += (own * (local_tensor(whole[name]).double() * scale)).sum().to(device) / copies
        total[1] += own.square().sum().to(device) / copies
    dist.all_reduce(total, group=run.mesh.group)
    along, square, loss_sum = received(total)
    return _Weighed(part, loss_sum, square**0.5, along / norm**2 if norm else 0.0)


def _gradients(run: Run) -> dict[str, torch.Tensor]:
    """FQN → gradient, of the gradients that count on this rank."""
    pipeline = run.model.pipeline
    elsewhere = pipeline.counted_elsewhere if pipeline else None
    return {
        name: parameter.grad
        for name, parameter in run.model.parameters.items()
        if parameter.grad is not None and parameter is not elsewhere
    }


def _shards(gradient: torch.Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(1 if placement.is_replicate() else size for size, placement in sizes)


def _largest(run: Run, whole: Mapping[str, torch.Tensor], scale: float) -> list[tuple[str, float]]:
    """Return (name, gradient norm) of the parameters with the largest norms. Collective."""
    squares = {
        name: float(local_tensor(gradient).double().square().sum())
        * scale**2
        / (run.mesh.holders // _shards(gradient))
        for name, gradient in whole.items()
    }
    total: Counter[str] = Counter()
    every: list[dict[str, float]] = exchange(squares, run.world.world_size, run.mesh.group)
    for of_rank in every:
        total.update(of_rank)
    return [(name, square**0.5) for name, square in total.most_common(LISTED)]


class _Names:
    """Formats the documents of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._paths = [source.path for source in ordered(run.recipe.data)]
        self._opened: dict[int, tuple[TokenDataset, Tokenizer]] = {}
        self.unit = "token" if isinstance(run.task.stream, TokenStream) else "label"
        if _paired(run):
            self.unit = "pair"

    def table(self, weighed: Iterable[tuple[_Weighed, float]]) -> list[str]:
        """Format a table of parts, each with what it adds to the loss of the step."""
        rows = [["loss", "a byte", "adds", "norm", "share", f"{self.unit}s"]]
        rows[0] += ["document", "record", "text"]
        for one, added in weighed:
            size, count = one.part.bytes, one.part.count
            losses = [f"{one.loss_sum / max(1, count):.3f}"]
            losses += [f"{one.loss_sum / size:.3f}" if size else "", f"{added:+.4f}"]
            gradient = [f"{one.norm:.4g}", f"{one.share:.1%}"]
            rows.append([*losses, *gradient, f"{count:,}", *self._named(one.part)])
        return table(rows, right=range(6), indent="  ")

    def tokenizer(self, source: int) -> Tokenizer:
        return self._open(source)[1]

    def _open(self, source: int) -> tuple[TokenDataset, Tokenizer]:
        if source not in self._opened:
            path = self._paths[source]
            tokenizer = read_tokenizer(location(path) / "tokenizer.json")
            self._opened[source] = TokenDataset(path, "train"), tokenizer
        return self._opened[source]

    def _named(self, part: _DocumentShare) -> tuple[str, str, str]:
        """Format the document, record, and the beginning of the text of a part."""
        if not self._paths:
            return f"sample {part.number}", str(self._run.recipe.data.factory), ""
        path = self._paths[part.source]
        dataset, tokenizer = self._open(part.source)
        origin = dataset.origin(part.number)
        record = f"{origin[0]}:{origin[1]}" if origin else "not known: prepared by an older version"
        text = printable(tokenizer.decode(list(part.ids), skip_special_tokens=False))
        if len(text) > SHOWN_LETTERS:
            text = f"{text[:SHOWN_LETTERS]}…"
        return f"{part.number} of {printable(location(path).name)}", printable(record), text


# --- the steps around ------------------------------------------------------------------------


def _neighbouring_steps(
    run: Run, step: int, lineage: ReplayLineage, sources: ReplaySources
) -> list[str]:
    """Format a table of the neighbouring steps, from ledger and recipes."""
    steps = range(max(1, step - AROUND), min(lineage.last, step + AROUND) + 1)
    rows = []
    for _, group in groupby(steps, key=lambda one: lineage.stretch(one, one)[0].start.recipe):
        # groupby's groups end when the next one begins.
        some = list(group)
        rate = None
        with suppress(RecipeError):  # the recipe of another start may be missing
            recipe = sources.recipe_of(lineage.attempt_of(some[0]))
            rate = build_schedule(counted(recipe, run.task.stream.sequences))
        for one in some:
            attempt, record = lineage.attempt_of(one), lineage.recorded(one)
            loss = f"{record.loss:.4f}" if record and record.loss is not None else ""
            norm = f"{record.norm:.4g}" if record and record.norm is not None else ""
            lr = f"{rate(one):.3e}" if rate else ""
            numbers = [f"{one}", loss, norm, lr, str(attempt.start.world_size)]
            remarks = [_mixture(run, lineage, one), _special_events(lineage, one)]
            rows.append(["→" if one == step else "", *numbers, *remarks])
    head = ["", "step", "loss", "norm", "lr", "ranks", "sequences by source", ""]
    return table([head, *rows], right={1, 2, 3, 4, 5}, indent="  ")


def _mixture(run: Run, lineage: ReplayLineage, step: int) -> str:
    """Count the sequences of a step by source, where there are several."""
    record, stream = lineage.recorded(step), run.task.stream
    if record is None or not isinstance(stream, TokenStream) or len(run.recipe.data.sources) < 2:
        return ""
    numbers, _ = stream.locate(np.arange(record.first, record.after_last))
    sources = run.recipe.data.sources
    numbers = np.array([sources.index(source) for source in ordered(run.recipe.data)])[numbers]
    return ", ".join(
        f"{count} of {number}" for number, count in enumerate(np.bincount(numbers)) if count
    )


def _special_events(lineage: ReplayLineage, step: int) -> str:
    attempt, record = lineage.attempt_of(step), lineage.recorded(step)
    remarks = []
    if step == attempt.start.step + 1 and step > 1:
        changed = ", ".join(
            f"{printable(key)} {printable(str(old))} → {printable(str(new))}"
            for key, (old, new) in attempt.start.changed.items()
        )
        remarks.append(f"attempt {attempt.number} begins" + (f": {changed}" if changed else ""))
    if record and record.skipped:
        remarks.append(f"skipped for its {printable(record.skipped)}")
    if step in lineage.rollbacks:
        remarks.append(f"then rolled back to step {lineage.rollbacks[step]}")
    return "; ".join(remarks)
