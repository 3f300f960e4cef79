"""Slice 2: two ranks on one GPU, over gloo. NCCL refuses that, so this is for tests alone.

As a program, `-m benchmarks.gpu.sharing RECIPE.yaml`, it is a rank of such a job, under torchrun or
not.
"""

import os
import socket
import sys
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.correct import losses
from benchmarks.gpu.setting import (
    RunFailedError,
    Setting,
    Trained,
    UnsupportedError,
    difference,
    ending,
    job_environment,
    recipe,
    write_recipe,
)
from lab.local_nodes import start_python

REFUSALS = ("not implemented", "not supported", "unsupported", "gloo")
"""Words of gloo, and of torch about it, when it cannot do something."""


def two_ranks(setting: Setting, **strategy: Any) -> dict[str, Any]:
    """Losses of two ranks against those of one, in float32."""
    sections = recipe(setting, "small", strategy=strategy)
    return {"difference": difference(together(setting, sections), losses(setting, "alone"))}


def together(setting: Setting, sections: dict[str, Any]) -> list[float]:
    """Losses of a run of two ranks on one device.

    Raises:
        UnsupportedError: gloo cannot carry it.
        RunFailedError: it ended otherwise than well.
    """
    path = write_recipe(setting, "two", sections)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2"}
    job |= {"LOCAL_WORLD_SIZE": "2"}
    logs = [setting.scratch / f"rank-{rank}.log" for rank in range(2)]
    environment = {**job_environment(setting), **job}
    ranks = [
        start_python(
            ["benchmarks.gpu.sharing", str(path)],
            setting.scratch,
            {**environment, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            log,
        )
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait() for process in ranks]
    for code, log in zip(codes, logs, strict=True):
        print(log.read_text(), flush=True)
        if code:
            why = ending(code, log.read_text())
            refused = any(word in why.lower() for word in REFUSALS)
            raise (UnsupportedError if refused else RunFailedError)(why)
    return Trained(setting.scratch / "two", "").losses()


def main() -> None:
    """As `-m trainer`."""
    from elastic.node.standin import NODE_SOCKET, stand_in

    if NODE_SOCKET in os.environ:
        stand_in("benchmarks.gpu.sharing:rank", "benchmarks.gpu.sharing:prepare", sys.argv[1:])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank(sys.argv[1:])


def prepare(arguments: tuple[str, ...]) -> Any:
    """As the trainer's, which would refuse a GPU to a second rank."""
    from trainer.run import join, preflight

    with patch.object(preflight, "_check_device", lambda *_: None):
        return join.prepare(arguments)


def rank(arguments: list[str]) -> None:
    """A training process whose device is the first, whatever its local rank; never returns."""
    import torch.distributed as dist

    from trainer.run import join, preflight, worker

    start, join_plainly = dist.init_process_group, join.join_world

    def over_gloo(backend: str, **options: Any) -> None:
        if backend != "gloo":
            backend, options["device_id"] = "cpu:gloo,cuda:gloo", None
        start(backend, **options)

    def join_on_first(*arguments: Any) -> Any:
        with patch.dict(os.environ, LOCAL_RANK="0"):
            return join_plainly(*arguments)

    with (
        patch.object(dist, "init_process_group", over_gloo),
        patch.object(join, "join_world", join_on_first),
        patch.object(preflight, "_check_device", lambda *_: None),
    ):
        worker.main(arguments)


if __name__ == "__main__":
    main()
