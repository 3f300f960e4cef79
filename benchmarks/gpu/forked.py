"""Whether CUDA's allocator grows its segments in a rank, which is forked from a process that has
torch: `-m benchmarks.gpu.forked` prints 1, or 0.

torch reads the options of its allocator once. Here as in a rank they are set after the fork, so
only an allocation shows whether that was in time.
"""

import os

import torch

from trainer.run.worker import grow_segments


def main() -> None:
    """Fork, allocate there, and look at what that has made."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    grow_segments()
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    print(int(all(segment["is_expandable"] for segment in segments)), flush=True)
    del kept


if __name__ == "__main__":
    main()
