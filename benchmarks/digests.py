"""What it costs a save to look at its numbers: digests, and whether all are finite.

It happens in the thread that has copied them, after the copy, when training already goes on. Beside
it stand the copy itself and the checksum that the writer process makes of the same bytes. One
thread; milliseconds of processor time per 100 MB, which other processes change little.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from benchmarks.support import arguments, heading, print_table, spread, write_json
from checkpointing.format.digests import digest_and_finite

COLUMNS = 1024


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0], size=400, rounds=15)
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], object]] = {}
    for dtype, kind in (("F32", np.uint32), ("BF16", np.uint16)):
        rows = options.size * 1_000_000 // (COLUMNS * np.dtype(kind).itemsize)
        numbers = np.random.default_rng(0).integers(0, 0x3F00, (rows, COLUMNS)).astype(kind)
        for shape, data in (("matrix", numbers), ("vector", numbers.reshape(-1))):
            cases[f"digest, finite: {dtype} {shape}"] = _look(dtype, data)
    source = torch.from_numpy(numbers.view(np.uint8))
    target = source.clone()
    cases["copy"] = lambda: target.copy_(source)
    cases["CRC-32"] = lambda: crc32(numbers.data)
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, work in cases.items():
            began = time.thread_time()
            work()
            figures[name].append((time.thread_time() - began) * 1e5 / options.size)
    title = f"a look at {options.size} MB in one thread"
    heading(title)
    print_table([{"work": name, "ms per 100 MB": spread(of)} for name, of in figures.items()])
    write_json(title, figures, options.json)


def _look(dtype: str, data: NDArray[np.generic]) -> Callable[[], object]:
    return lambda: digest_and_finite("weight", dtype, data.shape, (0,) * data.ndim, data)


if __name__ == "__main__":
    main()
