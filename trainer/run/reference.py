"""Computes log-probabilities of answers under the initial model, for objectives such as DPO.

[Note: reference] The log-probabilities are computed once, with the weights of step 0. With a LoRA
adapter these are the frozen weights, because B is zero. Micro-batches of the sequences in file
order are dealt to the ranks, so the numbers are equal at any world size. They are kept in memory
and in a file of the run directory: 8 bytes per pair, where a second model would cost gigabytes. A
start reads them from a rank's memory, or from the file if its base weights, data and dtype match.
Otherwise it computes them anew.

The file has safetensors format: for each split one float32 per document, NaN where the pair fits
into no sequence. Its metadata names base weights, data and dtype, and a digest of the numbers.
"""

import hashlib
import json
import struct
import time
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from checkpointing.format.tensors import broadcast
from checkpointing.format.untrusted import an_object, read_object
from elastic import Pulse, World
from elastic.node.exchange import received
from elastic.node.files import read_bytes
from trainer.data.loader import TokenStream, load
from trainer.data.prepare.writer import atomic
from trainer.data.stream import COUNTED
from trainer.parallel.fsdp import fsdp_units
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallel_model import ParallelModel
from trainer.recipe import Recipe
from trainer.tasks.task import Task

FILE = "reference.safetensors"
_HEADER_BYTES = 1 << 16


class Reference:
    """Loads or computes the reference log-probabilities of a run. On all ranks.

    Args:
        init_from: digest of the weights in `model.init_from`.
    """

    def __init__(self, recipe: Recipe, task: Task, init_from: str) -> None:
        self._recipe = recipe
        self._streams: dict[str, TokenStream] = {}
        for split, stream in (
            ("train", task.stream),
            ("validation", task.validation and task.validation.stream),
        ):
            if isinstance(stream, TokenStream):
                self._streams[split] = stream
        prints = [stream.fingerprint for stream in self._streams.values()]
        precision, adapter = recipe.precision, recipe.model.adapter
        formats = (precision.dtype, precision.matmul, adapter.base if adapter else None)
        self._made_of = {
            "base": init_from,
            "data": hashlib.sha256(" ".join(prints).encode()).hexdigest(),
            "dtype": " ".join(filter(None, formats)),
        }
        self._path = recipe.directory / FILE
        self.lines: list[str] = []
        """Lines for the log of the run; [] on ranks other than 0."""

    def find(self, world: World, mesh: Mesh) -> bool:
        """Broadcast the log-probabilities from a rank that has them in memory, or that is rank 0
        and can read the file. Returns False if there is no such rank. On all ranks."""
        kept = all(stream.reference is not None for stream in self._streams.values())
        written = self._read() if world.is_main and not kept else None
        here = kept or written is not None
        owner = torch.tensor(world.rank if here else world.world_size, device=world.device)
        dist.all_reduce(owner, dist.ReduceOp.MIN, group=mesh.group)
        source = received(owner)
        if source == world.world_size:
            return False
        if written is not None:
            self._attach(written)
            self.lines.append(f"reference: log-probabilities are read from {self._path}")
        held = {
            split: torch.empty(stream.documents)
            if stream.reference is None
            else torch.from_numpy(stream.reference)
            for split, stream in self._streams.items()
        }
        broadcast(held.values(), source, mesh.group, world.device)
        self._attach({split: tensor.numpy() for split, tensor in held.items()})
        # Rank 0 may have moved to another node with another disk.
        if world.is_main and written is None and not (kept and self._path.exists()):
            self._write()
        return True

    def compute(self, model: ParallelModel, world: World, mesh: Mesh, pulse: Pulse) -> None:
        """Compute the log-probabilities with `model`, whose weights are of step 0, and write the
        file."""
        pairs = sum(stream.documents for stream in self._streams.values()) // 2
        if world.is_main:
            print(f"reference: log-probabilities of {pairs:,} pairs are computed once", flush=True)
        began = time.monotonic()
        self._attach(
            {
                split: _log_probs(model, stream, self._recipe.micro_batch, world, mesh, pulse)
                for split, stream in self._streams.items()
            }
        )
        seconds = time.monotonic() - began
        if world.is_main:
            self.lines.append(f"reference: computed in {seconds:.1f} s, kept in {self._path}")
            self._write()

    def _attach(self, found: Mapping[str, NDArray[np.float32]]) -> None:
        for split, stream in self._streams.items():
            stream.reference = found[split]

    def _read(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the log-probabilities in the file, by split; None if it is missing or unusable."""
        sizes = {split: 4 * stream.documents for split, stream in self._streams.items()}
        try:
            data = read_bytes(self._path, _HEADER_BYTES + sum(sizes.values()))
            length = 8 + int.from_bytes(data[:8], "little")
            made_of = an_object(read_object(data[8:length]).get("__metadata__"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note_recomputed(f"cannot be read ({error})")
            return None
        values = memoryview(data)[length:]
        if other := [key for key, one in self._made_of.items() if made_of.get(key) != one]:
            self._note_recomputed(f"is of another {' and '.join(other)}")
        elif made_of.get("sha256") != hashlib.sha256(values).hexdigest():
            self._note_recomputed("is damaged")
        elif len(values) != sum(sizes.values()):
            self._note_recomputed("has another size than the data")
        else:
            ends = np.cumsum([*sizes.values()]).tolist()
            return {
                split: np.frombuffer(values[end - size : end], "<f4").copy()
                for (split, size), end in zip(sizes.items(), ends, strict=True)
            }
        return None

    def _note_recomputed(self, why: str) -> None:
        self.lines.append(f"note: {self._path} {why}, so the reference is computed anew")

    def _write(self) -> None:
        """Replace the file. A failure is logged, not raised."""
        values = {split: stream.reference for split, stream in self._streams.items()}
        parts = {k: one.astype("<f4").tobytes() for k, one in values.items() if one is not None}
        content, place = b"".join(parts.values()), 0
        header: dict[str, object] = {
            "__metadata__": {**self._made_of, "sha256": hashlib.sha256(content).hexdigest()}
        }
        for split, part in parts.items():
            span = [place, place := place + len(part)]
            header[split] = {"dtype": "F32", "shape": [len(part) // 4], "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        try:
            with atomic(self._path) as file:
                file.write(struct.pack("<Q", len(text)) + text + content)
        except OSError as error:
            self.lines.append(
                f"note: {self._path} cannot be written ({error.strerror}); the next start computes "
                "the reference anew"
            )


@torch.no_grad()
def _log_probs(
    model: ParallelModel, stream: TokenStream, size: int, world: World, mesh: Mesh, pulse: Pulse
) -> NDArray[np.float32]:
    """Return the log-probabilities of all documents of a stream, float32 (documents,). On all
    ranks. `size`: sequences per micro-batch."""
    ordered, device, count = stream.in_file_order, world.device, stream.sequences
    answers = ordered.documents_at(np.arange(count))
    numbers = range(mesh.dp_rank, -(-count // (size * mesh.dp_size)) * mesh.dp_size, mesh.dp_size)
    cuts = [range(n * size, min(n * size + size, count)) for n in numbers]
    # A rank with no micro-batch left repeats the first one of all, so that all ranks enter the same
    # collectives.
    requests = [list(cut) or list(range(min(size, count))) for cut in cuts]
    batches = load(ordered, requests, workers=0, pin_memory=device.type == "cuda")
    log_probs_by_document = torch.zeros(stream.documents, device=device)
    modes = {module: module.training for module in model.module.modules()}
    model.module.eval()
    with pulse.during("data"):
        for cut, batch in zip(cuts, batches, strict=True):
            pulse.report(0, "evaluate")
            inputs = {key: one.to(device) for key, one in batch.items() if key != COUNTED}
            with model.autocast():
                log_probs = model.module(**inputs)
            if cut and mesh.counts:
                places = np.concatenate(answers[cut.start : cut.stop])
                log_probs_by_document[torch.from_numpy(places).to(device)] = log_probs.float()
            pulse.report(0, "data")
        pulse.report(0, "evaluate")
        # All ranks but the one that computed a number hold 0 for it.
        dist.all_reduce(log_probs_by_document, group=mesh.group)
    for module, training in modes.items():
        module.training = training
    # FSDP's gathered copies would keep these weights when others are loaded next.
    for unit in fsdp_units(model.module):
        unit.reshard()
    values = log_probs_by_document.cpu().numpy()
    values[np.setdiff1d(np.arange(stream.documents), np.concatenate(answers))] = np.nan
    return values
