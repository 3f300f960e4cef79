"""What joins machines: ports, interfaces, NVLinks and mounts. A fault is one line that says what to
do; what is not there is none."""

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from elastic.group.health import check_folders, describe_mount
from elastic.group.network import network_problems
from elastic.group.nvml import HealthNvmlLinks, domain_of, link_problems, read_links

ACTIVE = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}


def write(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(f"{text}\n")
    return path


@pytest.fixture
def machine(tmp_path):
    """A machine with three ports, two interfaces and a bond of them."""
    for number in range(3):
        adapter = write(tmp_path / f"sys/class/infiniband/mlx5_{number}", hca_type="MT4129")
        port = write(adapter / "ports/1", link_layer="InfiniBand", **ACTIVE)
        write(port / "counters", symbol_error="7", link_downed="1")
    net = tmp_path / "sys/class/net"
    for name in ("eth0", "eth1"):
        write(net / name / "device")
        write(net / name / "statistics", rx_crc_errors="3")
        write(net / name, operstate="up")
    write(net / "bond0", operstate="up")
    write(net / "bond0/bonding", slaves="eth0 eth1")
    return tmp_path


def port(machine: Path, number: int, **files: str) -> None:
    write(machine / f"sys/class/infiniband/mlx5_{number}/ports/1", **files)


def told(machine: Path, **environment: str) -> list[str]:
    return network_problems(machine, environment, pause=0.0)


def test_a_machine_in_order_or_without_any_network_has_no_problem(machine, tmp_path):
    assert (
        told(machine, NCCL_IB_HCA="mlx5", GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth") == []
    )
    assert told(tmp_path / "nothing", NCCL_IB_HCA="mlx5", GLOO_SOCKET_IFNAME="eth0") == []


def test_ports(machine):
    cable = "see its cable and its switch"
    port(machine, 1, state="1: DOWN", phys_state="2: Polling")
    (line,) = told(machine)
    others = "2 of its kind on this machine are ACTIVE"
    assert line.startswith(f"mlx5_1:1 is DOWN, and {others}; {cable}, or name")
    assert told(machine, NCCL_IB_HCA="mlx5_0,mlx5_2:1") == []
    assert told(machine, NCCL_IB_HCA="^mlx5_1") == told(machine, NCCL_IB_DISABLE="1") == []
    (line,) = told(machine, NCCL_IB_HCA="=mlx5_1")
    assert line == f"mlx5_1:1 is DOWN, and NCCL_IB_HCA names it; {cable}"
    (line,) = told(machine, NCCL_IB_HCA="rdma")
    assert line.startswith("NCCL_IB_HCA=rdma names no adapter of this machine; it has mlx5_0, mlx")
    port(machine, 1, phys_state="3: Disabled")
    assert told(machine) == [], "nobody has named it, and it is switched off"
    port(machine, 1, state="2: INIT", phys_state="5: LinkUp")
    assert told(machine) == ["mlx5_1:1 waits to be set up; see that a subnet manager (opensm) runs"]
    port(machine, 1, **{**ACTIVE, "rate": "100 Gb/sec (4X EDR)"})
    (line,) = told(machine)
    assert line.startswith(
        "mlx5_1:1 runs at 100 Gb/s, and another of its kind on this machine at 400; see"
    )
    for number in range(3):  # no port is in use, and none was named
        port(machine, number, state="1: DOWN", phys_state="2: Polling")
    assert told(machine) == []


def test_interfaces(machine):
    (line,) = told(machine, GLOO_SOCKET_IFNAME="eth")
    assert line == "GLOO_SOCKET_IFNAME=eth: there is no interface eth, but bond0, eth0, eth1"
    assert told(machine, NCCL_SOCKET_IFNAME="^docker") == []
    write(machine / "sys/class/net/eth1", operstate="down")
    bond, *lines = reversed(told(machine, NCCL_SOCKET_IFNAME="=eth1", GLOO_SOCKET_IFNAME="eth0"))
    assert bond.startswith("interface eth1 of bond bond0 is down, so that bond0 is slower; see its")
    assert lines == [
        "NCCL_SOCKET_IFNAME==eth1: interface eth1 is down; see its cable, or start it with "
        "`ip link set eth1 up`"
    ]


def test_errors_that_rise(machine):
    """Old ones do not count."""
    counters = machine / "sys/class/infiniband/mlx5_2/ports/1/counters"
    statistics = machine / "sys/class/net/eth1/statistics"

    def fail():
        write(counters, symbol_error="9")
        write(statistics, rx_crc_errors="4")

    timer = threading.Timer(0.05, fail)
    timer.start()
    found = network_problems(machine, {}, pause=0.2)
    timer.join()
    assert found == [
        "mlx5_2:1: errors rise within 0.2 s (symbol_error by 2); clean or replace its cable or "
        "transceiver",
        "eth1: errors rise within 0.2 s (rx_crc_errors by 1); clean or replace its cable or "
        "transceiver",
    ]


H100, ALL = "NVIDIA H100 80GB HBM3", frozenset(range(18))


@pytest.mark.parametrize(
    ("before", "after", "problems"),
    [
        ([], [], []),
        ([HealthNvmlLinks("T4")] * 2, [HealthNvmlLinks("T4")] * 2, []),
        ([HealthNvmlLinks(H100, ALL)] * 8, [HealthNvmlLinks(H100, ALL)] * 8, []),
        # Old errors, and a card of another kind, are no fault.
        ([HealthNvmlLinks(H100, ALL, errors=5), HealthNvmlLinks("T4")],) * 2 + ([],),
        (
            [HealthNvmlLinks(H100, ALL)] * 2,
            [HealthNvmlLinks(H100, ALL), HealthNvmlLinks(H100, ALL - {3, 7}, frozenset({3, 7}))],
            ["GPU 1: 16 of its NVLinks are up (down: 3, 7), and 18 of another NVIDIA H100 80GB"],
        ),
        (
            [HealthNvmlLinks(H100, ALL)],
            [HealthNvmlLinks(H100, ALL, errors=2)],
            ["GPU 0: 2 NVLink errors within"],
        ),
        (
            [HealthNvmlLinks(H100, ALL)],
            [HealthNvmlLinks(H100, ALL, joined=False)],
            ["GPU 0: it has not joined its NVLink fabric; see that nvidia-fabricmanager runs"],
        ),
    ],
)
def test_nvlinks(before, after, problems):
    found = link_problems(before, after)
    assert len(found) == len(problems)
    assert all(line.startswith(start) for line, start in zip(found, problems, strict=True)), found


def test_a_node_is_in_the_domain_that_all_its_gpus_are_in():
    one, other = HealthNvmlLinks(H100, domain="nvl-1.0"), HealthNvmlLinks(H100, domain="nvl-2.0")
    assert domain_of([one, one]) == "nvl-1.0"
    assert domain_of([one, other]) == domain_of([one, HealthNvmlLinks(H100)]) == domain_of([]) == ""


STAND_IN = """
/* Two GPUs of a domain, with the calls of NVIDIA's nvml.h; one link of the second is down. */
#include <string.h>
typedef struct {unsigned char uuid[16]; int status; unsigned int clique; unsigned char state;} info;
int nvmlInit_v2(void) { return FAILS; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "?"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **d) { *d = (char *)0 + i + 1; return 0; }
int nvmlDeviceGetName(void *d, char *name, unsigned int n) { strncpy(name, "GB200", n); return 0; }
int nvmlDeviceGetNvLinkState(void *d, unsigned int link, unsigned int *active)
{ *active = !(d == (char *)0 + 2 && link == 4); return link < 18 ? 0 : 2; }
int nvmlDeviceGetNvLinkErrorCounter(void *d, unsigned int link, int which, unsigned long long *n)
{ *n = 1; return which == 2 ? 3 : 0; }
int nvmlDeviceGetGpuFabricInfo(void *d, info *i)
{ memset(i->uuid, 0xAB, 16); i->status = 0; i->clique = 7; i->state = 3; return 0; }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_library_is_asked_as_its_header_says(tmp_path):
    (tmp_path / "nvml.c").write_text(STAND_IN)
    for name, code in (("good.so", 0), ("bad.so", 9)):
        command = ["cc", "-shared", "-fPIC", "-w", f"-DFAILS={code}", "-o", name, "nvml.c"]
        subprocess.run(command, cwd=tmp_path, check=True)
    problems, domain = read_links(str(tmp_path / "good.so"))
    assert [line.partition(";")[0] for line in problems] == [
        "GPU 1: 17 of its NVLinks are up (down: 4), and 18 of another GB200 of this machine"
    ]
    assert domain == "nvl-abababab.7"
    with pytest.raises(RuntimeError, match="nvmlInit_v2: Driver Not Loaded"):
        read_links(str(tmp_path / "bad.so"))
    assert read_links(str(tmp_path / "none.so")) == ([], ""), "a missing library is no fault"


def test_a_folder_that_does_not_answer_is_named_and_not_waited_for(tmp_path):
    """A pipe that nobody writes to keeps whoever opens it waiting, as a dead server does."""
    os.mkfifo(tmp_path / "index.json")
    began = time.monotonic()
    (silent,) = check_folders({"data.sources.0.path": f"{tmp_path}/index.json"}, seconds=0.2)
    assert time.monotonic() - began < 5
    assert silent.refuses
    assert str(silent).startswith(
        f"data.sources.0.path: no answer within 0.2 s from {tmp_path}/index.json"
    )
    assert str(silent).endswith("; mend or remount it, or name another path")
    os.close(os.open(tmp_path / "index.json", os.O_RDWR))  # lets the thread go


def test_folders_that_answer_or_are_not_there_yet_are_no_problem(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "closed").mkdir(mode=0)
    paths = [tmp_path, *(tmp_path / name for name in ("file", "new/run", "file/x", "closed", "e"))]
    assert check_folders({str(path): str(path) for path in paths}) == []
    (tmp_path / "e").symlink_to("e")
    (loop,) = check_folders({"run.dir": str(tmp_path / "e")})
    assert str(loop).startswith(f"run.dir: Too many levels of symbolic links from {tmp_path}/e")


def test_a_mount_is_named(tmp_path):
    lines = [
        "22 1 0:20 / / rw - ext4 /dev/root rw",
        "30 22 0:40 / /mnt rw shared:1 - nfs4 server:/export rw",
        "31 30 0:41 / /mnt/a\\040b rw - lustre mds@tcp:/work rw",
        "broken",
    ]
    write(tmp_path / "proc/self", mountinfo="\n".join(lines))
    assert describe_mount(Path("/mnt/a b/run"), tmp_path) == " (lustre mds@tcp:/work on /mnt/a b)"
    assert describe_mount(Path("/mnt/data"), tmp_path) == " (nfs4 server:/export on /mnt)"
    assert (
        describe_mount(Path("/mnty"), tmp_path)
        == describe_mount(Path("/mnt"), tmp_path / "none")
        == ""
    )
