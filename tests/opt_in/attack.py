"""Strangers against real runs: a second user, and a second machine on the same network, try to get
in while the runs train and recover. Started by attack.sh, in namespaces where nothing else runs.

The strangers are told all that this process, as root, can find out: which sockets there are, what
is in the memory of the run, every key of the store. What they do, they do as user 65534.
"""

import importlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path

import torch.distributed as dist
from isal.isal_zlib import crc32
from safetensors.torch import load_file

from benchmarks.support import python_path
from elastic.node.zygote import ZygoteProgram
from elastic.process import descendants, signal_family
from lab.container import Container
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import RECIPE, ROOT, losses
from tests.opt_in.attack_group import attack_group
from trainer.data.prepare.prepare import prepare

STRANGER = 65534
MEMORY = Path("/dev/shm")
OVERRIDES = [
    *("run.determinism=exact", "optimizer.lr=3e-4"),
    *("schedule.name=constant", "elastic.snapshot_every=1", "checkpoint.slots=2"),
]
NESTED = b"[" * 100_000


@dataclass
class Attack:
    """What was tried, and what came of it."""

    name: str
    tried: int = 0
    got_in: list[str] = field(default_factory=list)

    def attempt(self, what: str, action: Callable[[], object]) -> None:
        """Something that must fail with an OSError, or do nothing (a false result)."""
        self.tried += 1
        with suppress(OSError, EOFError):
            if action():
                self.got_in.append(what)

    def add(self, other: "Attack") -> None:
        """Count what another process has tried."""
        self.tried += other.tried
        self.got_in += other.got_in


# --- what strangers do: processes of their own, as another user -----------------------------------


def stranger(machine: Container, function: str, *arguments: object) -> subprocess.Popen[str]:
    """Begin `function` on a machine, as user 65534."""
    command = [
        sys.executable,
        "-m",
        *machine.inside,
        "tests.opt_in.attack",
        function,
        *map(str, arguments),
    ]
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}  # many listeners are no stores
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=quiet)


def result_of(process: subprocess.Popen[str]) -> Attack:
    """What a stranger has tried."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"a stranger failed:\n{output}"
    return Attack(**json.loads(output.splitlines()[-1]))


def drop_rights() -> None:
    """From now on, be the stranger. What Python imports late is imported now: it may lie where only
    root can read it."""
    for module in "encodings.idna", "multiprocessing.connection":
        importlib.import_module(module)
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


def attack_sockets(marker: str, run: str, *pids: str) -> Attack:
    """1. Connect to every Unix socket, and be a rank, an agent or a zygote; look for another way
    through what the processes of the run have open, and for its secrets."""
    attack = Attack("1. unix sockets, made-up ranks, descriptors, secrets")
    names = {line.split(" ")[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    ways = ["\0" + name[1:] if name.startswith("@") else name for name in names if name[:1] in "@/"]
    ways += [f"/proc/{pid}/fd/{number}" for pid in pids for number in range(64)]
    environment = {"PATH": os.environ["PATH"], "RANK": "0", "LOCAL_RANK": "0", "PERDURE_ROUND": "1"}
    job = ZygoteProgram(
        "subprocess:call", "subprocess:call", ["touch", marker], environment, "/"
    ).pack()
    nowhere = os.open(os.devnull, os.O_RDWR)
    drop_rights()
    for way in ways:
        for kind in socket.SOCK_SEQPACKET, socket.SOCK_STREAM:
            for message in (
                b'{"run": true}',
                b'{"spawn": "1.0.0", "env": {}}',
                b'{"notice": "SIGTERM"}',
                b"\0\0\0\x04" + b"\xff" * 64,
            ):

                def talk(way=way, kind=kind, message=message) -> bool:
                    with socket.socket(socket.AF_UNIX, kind) as ours:
                        ours.settimeout(0.5)
                        ours.connect(way)
                        socket.send_fds(ours, [message], [job, nowhere, nowhere, nowhere])
                        return ours.recv(4096).startswith(b"{") or Path(marker).exists()

                attack.attempt(f"{way!r} answered {message!r}", talk)
    for name in (".secret", "checkpoints/.run"):
        attack.attempt(f"read {name}", (Path(run) / name).read_bytes)
    for pid in pids:
        attack.attempt(f"read the environment of {pid}", Path(f"/proc/{pid}/environ").read_bytes)
        attack.attempt(
            f"entered the root of {pid}", lambda pid=pid: os.listdir(f"/proc/{pid}/root")
        )
        attack.attempt(f"killed {pid}", lambda pid=pid: os.kill(int(pid), signal.SIGKILL) is None)
    if Path(marker).exists():
        attack.got_in.append("code of the stranger ran as the user of the run")
    return attack


def attack_memory(copy: str) -> Attack:
    """2. Plant memory of the run with other weights and a newer step, under every name by which it
    is looked for, and links to it. It counts as refused if the run then goes on as it was."""
    attack = Attack("2. planted memory")
    found = {path: path.read_bytes() for path in Path(copy).rglob("*") if path.is_file()}
    name = Path(copy).name
    drop_rights()
    os.umask(0)
    places = [
        MEMORY / re.sub(r"-\d+-\w+$", f"-{999990 + number}-{number}", name) for number in range(4)
    ]
    for folder in places[:3]:
        closed = folder == places[0]
        for path, data in found.items():
            target = folder / path.relative_to(copy)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if closed else 0o777)
            target.write_bytes(data)
            target.chmod(0o600 if closed else 0o666)
            attack.tried += 1
    places[3].symlink_to(places[2])
    attack.tried += 1
    return attack


def attack_network(host: str, port: str, stop: str, *listeners: str) -> Attack:
    """3. Over the network: write to every key of the store, and talk to everything that listens."""
    attack = Attack("3. forged store keys, every listener")
    drop_rights()
    oldest: dict[str, bytes] = {}
    store = connect(host, int(port))
    while not Path(stop).exists():
        try:
            for key in store.list_keys():
                if key.startswith("init/"):
                    continue
                value = store.get(key)
                oldest.setdefault(key, value)
                for forged in forgeries(value, oldest[key]):
                    store.set(key, forged)
                    attack.tried += 1
                    time.sleep(0.1)  # long enough for every node to have read it
        except dist.DistError:  # the key is just gone
            time.sleep(0.1)
        time.sleep(0.1)
    for listener in listeners:
        place, _, number = listener.rpartition(":")
        for junk in b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, b"\0\0\0\x01x", NESTED, b"":

            def talk(junk=junk, place=place, number=number) -> None:
                with socket.create_connection((place, int(number)), timeout=1.0) as ours:
                    ours.sendall(junk)
                    ours.recv(64)

            attack.attempt(f"{listener} was given {junk[:16]!r}", talk)
        attack.attempt(
            f"{listener} takes all of a first message that has no end",
            lambda place=place, number=number: overlong(place, int(number)),
        )
        for key in b"", b"\0" * 32, host.encode():
            attack.attempt(
                f"{listener} takes the key {key!r}",
                lambda key=key, place=place, number=number: within(
                    2, lambda: Client((place, int(number)), authkey=key)
                ),
            )
    return attack


def overlong(place: str, port: int) -> bool:
    """Whether a writer takes what one who is not known has to say, however much it is."""
    with socket.create_connection((place, port), timeout=5.0) as ours:
        if ours.recv(4) != struct.pack("!i", 32):  # no writer: it does not speak first
            return False
        for part in bytes(32), bytes(16):  # a number and a MAC, as a caller sends
            ours.sendall(struct.pack("!i", len(part)) + part)
        ours.sendall(struct.pack("!i", 1 << 30))
        ours.sendall(bytes(64 << 20))  # more than the kernel keeps for a process that does not read
        return True


def within(seconds: int, action: Callable[[], object]) -> object:
    """action(), or a TimeoutError."""

    def expired(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        return action()
    except Exception as error:  # an AuthenticationError is none of OSError
        raise OSError(str(error)) from error
    finally:
        signal.alarm(0)


def connect(host: str, port: int) -> dist.TCPStore:
    """A client of a store."""
    return dist.TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
    )


def forgeries(value: bytes, old: bytes) -> Iterator[bytes]:
    """What a stranger would like a key to hold; at last what it held long ago."""
    seal = value[:64] if re.match(rb"[0-9a-f]{64}", value) else b""
    yield from (b"\xff\xfe", b"[1]", NESTED, b"closed", seal + b"9" * 400)
    with suppress(ValueError):
        document = json.loads(value[len(seal) :])
        if isinstance(document, dict):
            closed = {"code": 0, "reason": "a stranger says so"}
            forged = {**document, "closed": closed, "version": document.get("version", 0) + 1000}
            text = json.dumps(forged, separators=(",", ":")).encode()
            yield from (text, seal + text, b"0" * 64 + text)
    yield old


# --- files ---------------------------------------------------------------------------------------


def hostile(step: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """What the files of a checkpoint may say: (what, how to make a copy of `step` say so)."""
    record = json.loads((step / "index.json").read_text())
    weights = next(path.name for path in step.glob("model*.safetensors"))

    def names(other: str) -> Callable[[Path], None]:
        renamed = json.loads(json.dumps(record).replace(json.dumps(weights), json.dumps(other)))
        return lambda copy: (copy / "index.json").write_text(sealed(renamed))

    def holds(name: str, data: bytes, *, resealed: bool) -> Callable[[Path], None]:
        there = {name: {"bytes": len(data), "crc32": [f"{crc32(data):08x}"]}}
        forged = {**record, "files": {**record["files"], **there}}

        def change(copy: Path) -> None:
            (copy / name).write_bytes(data)
            if resealed:
                (copy / "index.json").write_text(sealed(forged))

        return change

    def record_is(data: bytes) -> Callable[[Path], None]:
        return lambda copy: (copy / "index.json").write_bytes(data)

    for other in ("../../outside", "/etc/hostname", "a\0b", "a\nb", "\x1b[2J\x1b]0;got in\a", ""):
        yield f"a commit record that names {other!r}", names(other)
    for data in b"[1]", b"[]", b"null", NESTED, b'{"files": [1]}', b"\xff\xfe\0", b"":
        yield f"a commit record that begins {data[:16]!r}", record_is(data)
    overlapping = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")
    }
    for data in (
        (1 << 62).to_bytes(8, "little") + b"{}",
        header(NESTED),
        header(b"[1]"),
        header(json.dumps(overlapping).encode()) + bytes(16),
        header(b'{"\x1b[2J": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}')
        + bytes(16),
    ):
        yield f"weights that begin {data[:24]!r}", holds(weights, data, resealed=False)
        yield f"resealed weights that begin {data[:24]!r}", holds(weights, data, resealed=True)
    for name, data in (
        *(("model.safetensors.index.json", data) for data in (b'{"weight_map": [1]}', NESTED)),
        *(("trainer_state.json", data) for data in (b"[1]", NESTED)),
    ):
        yield f"a resealed {name} that begins {data[:24]!r}", holds(name, data, resealed=True)


def header(text: bytes) -> bytes:
    """The start of a safetensors file."""
    return len(text).to_bytes(8, "little") + text


def sealed(record: dict) -> str:
    """A commit record with its checksum, which is no secret."""
    body = {key: value for key, value in record.items() if key != "sha256"}
    return json.dumps({**body, "sha256": digest(body)})


def attack_files(scratch: Path, run: Path) -> Attack:
    """4. Every command that looks at checkpoints."""
    attack = Attack("4. hostile files")
    good = max((run / "checkpoints").glob("step-*"))
    for what, change in hostile(good):
        victim = scratch / "hostile"
        shutil.copytree(run, victim)
        copy = victim / "checkpoints" / "step-99999999"
        shutil.copytree(good, copy)
        for path in good.glob("model*.safetensors"):  # all is well, if one follows "../../outside"
            shutil.move(copy / path.name, victim / "outside")
            shutil.copy(victim / "outside", copy)
        change(copy)
        for command in ("ls", "show", "verify", "prune --keep 1"):
            arguments = [*command.split()[:1], str(victim), *command.split()[1:]]
            attack.tried += 1
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "trainer.cli", "ckpt", *arguments],
                    capture_output=True, check=False, timeout=30, cwd=scratch,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                attack.got_in.append(f"ckpt {command}, {what}: does not end")
                continue
            output = done.stdout + done.stderr
            if b"Traceback" in output or done.returncode not in (0, 2):
                attack.got_in.append(f"ckpt {command}, {what}: ends with {done.returncode}")
            if command == "verify" and done.returncode == 0:
                attack.got_in.append(f"ckpt verify, {what}: good, it says")
            if re.search(rb"[\0\x07\x1b]", output):
                attack.got_in.append(f"ckpt {command}, {what}: raw on the terminal")
            if command.startswith("prune") and not (victim / "checkpoints" / good.name).is_dir():
                attack.got_in.append(f"ckpt {command}, {what}: deleted the good checkpoint")
        if (victim / "outside").read_bytes() != next(good.glob("model*.safetensors")).read_bytes():
            attack.got_in.append(f"{what}: changed a file outside")
        shutil.rmtree(victim)
    return attack


def shared_directory(scratch: Path) -> Attack:
    """5. A member of the group that a run directory belongs to."""
    attack = Attack("5. a run directory of a group")

    def train(*overrides: str) -> "subprocess.CompletedProcess[bytes]":
        command = [sys.executable, "-m", "trainer", "recipe.yaml", *OVERRIDES, *overrides]
        return subprocess.run(command, cwd=scratch, check=False, capture_output=True, timeout=300)

    attack_group(
        scratch,
        train,
        drop_rights,
        sealed,
        lambda what, got_in: attack.attempt(what, lambda: got_in),
    )
    return attack


# --- the runs ------------------------------------------------------------------------------------


def main(scratch: Path) -> int:
    """Everything; returns the exit code."""
    (scratch / "recipe.yaml").write_text(RECIPE.replace("steps: 50", "steps: 1000000"))
    corpus = scratch / "corpus"
    corpus.mkdir()
    for number, path in enumerate(sorted((ROOT / "trainer").rglob("*.py"))):
        (corpus / f"{number:03}.txt").write_text(path.read_text())
    prepare([str(corpus)], scratch / "data", tokenizer="bytes", validation_fraction=0.1)
    attacks = two_machines(scratch)
    attacks += one_machine(scratch)
    attacks += attack_wire.between_ranks(scratch)
    outcome = Attack("results of the runs")
    for name in sorted(("one", "two", *attack_wire.RUNS), key=lambda name: newest(scratch / name)):
        say(f"an undisturbed run to step {newest(scratch / name)}, in one process")
        worker = ["recipe.yaml", *OVERRIDES, "run.dir=undisturbed", "checkpoint.every=0"]
        subprocess.run(
            [sys.executable, "-m", "trainer", *worker, f"run.steps={newest(scratch / name)}"],
            cwd=scratch, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        compare(scratch, name, outcome)
    attacks.append(outcome)
    say("files that say what they should not")
    attacks.append(attack_files(scratch, scratch / "undisturbed"))
    say("a run directory that a group may write to")
    attacks.append(shared_directory(scratch))
    return report(attacks)


def two_machines(scratch: Path) -> list[Attack]:
    """A run over a network that a stranger is on, and with strangers on its machines."""
    marker = scratch / "strangers" / "got-in"
    marker.parent.mkdir()
    marker.parent.chmod(0o777)
    outcome = Attack("results of the runs")
    found = [outcome]
    worker = ["recipe.yaml", *OVERRIDES, "run.dir=two", "checkpoint.every=0"]
    with LocalNodes(
        [*worker, "checkpoint.peer_copy=true"], folder=scratch, nnodes="2", logs=scratch / "log",
        environment={"PYTHONPATH": python_path(ROOT)}, launcher=("trainer.cli", "train"),
        own_network=True,
    ) as nodes:  # fmt: skip
        outside = Container.start(nodes._network, f"{nodes.prefix}.99")
        try:
            say("two machines, and a third that writes to the store from the first moment")
            stops = [marker.with_name(f"stop-{number}") for number in range(2)]
            first = stranger(outside, "attack_network", f"{nodes.prefix}.1", nodes.port, stops[0])
            both = [nodes.add(), nodes.add()]
            until(outcome, "step 50", lambda: newest(scratch / "two") >= 50, nodes)
            stops[0].touch()
            found.append(result_of(first))
            pids = [[node.process.pid, *node.family()] for node in both]
            places = [
                f"{nodes.prefix}.{node.number + 11}:{port}"
                for node, family in zip(both, pids, strict=True)
                for address, port in listening(family)
                if address != "loopback"
            ]
            say(f"step {newest(scratch / 'two')}: user {STRANGER} on both machines")
            for node, family in zip(both, pids, strict=True):
                found.append(
                    result_of(
                        stranger(node.container, "attack_sockets", marker, scratch / "two", *family)
                    )
                )
                found.append(plant(scratch, node.container))
            say(f"step {newest(scratch / 'two')}: the third machine, meanwhile a rank is killed")
            again = stranger(
                outside, "attack_network", f"{nodes.prefix}.1", nodes.port, stops[1], *places
            )
            ranks = both[1].trainers()
            done = newest(scratch / "two")
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            until(outcome, "a recovery", lambda: newest(scratch / "two") > done + 20, nodes)
            stops[1].touch()
            found.append(result_of(again))
            for node in both:
                node.process.send_signal(signal.SIGTERM)
            until(outcome, "the end", lambda: all(n.process.poll() is not None for n in both))
        finally:
            outside.kill()
        codes = [node.process.poll() for node in both]
        if codes != [75, 75]:
            outcome.got_in.append(f"the agents ended with {codes}")
        for node in both:
            if "Traceback" in node.text():
                outcome.got_in.append(f"node {node.number} printed a traceback")
    return found


def one_machine(scratch: Path) -> list[Attack]:
    """A run on one machine with a network: it listens on loopback only, and goes on from its own
    checkpoints after it was killed, whatever lies beside them."""
    outcome = Attack("results of the runs")
    loopback = Attack("3. listening on loopback only")
    found = [outcome, loopback]
    marker = scratch / "strangers" / "got-in-alone"
    network = Container.start_network("10.78.0.1")
    try:
        machine = Container.start(network, "10.78.0.11")
        try:
            say("one machine, two ranks")
            run = scratch / "one"
            job = start_alone(machine, scratch)
            until(outcome, "step 60", lambda: newest(run) >= 60 or job.poll() is not None)
            family = [job.pid, *descendants(job.pid)]
            for address, port in listening(family):
                loopback.attempt(f"port {port} on {address}", lambda on=address: on != "loopback")
            found.append(result_of(stranger(machine, "attack_sockets", marker, run, *family)))
            signal_family(job.pid, signal.SIGKILL)
            job.wait()
            say(f"killed in step {newest(run)}; hostile checkpoints are put beside its own")
            good = max((run / "checkpoints").glob("step-*[0-9]"))
            for number, (_, change) in enumerate(hostile(good)):
                copy = run / "checkpoints" / f"step-{90_000_000 + number:08}"
                shutil.copytree(good, copy)
                change(copy)
                outcome.tried += 1
            found.append(plant(scratch, machine))
            done, job = newest(run), start_alone(machine, scratch)
            until(
                outcome, "20 more steps", lambda: newest(run) > done + 20 or job.poll() is not None
            )
            job.send_signal(signal.SIGTERM)
            code = job.wait(120)
            if code != 75:
                outcome.got_in.append(f"it ended with {code}")
        finally:
            machine.kill()
    finally:
        network.kill()
    return found


def start_alone(machine: Container, scratch: Path) -> subprocess.Popen[bytes]:
    """`perdure train` on a machine."""
    worker = ["train", "recipe.yaml", *OVERRIDES, "run.dir=one", "checkpoint.every=20"]
    with open(scratch / "log" / "one.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *machine.inside, "trainer.cli", *worker, "--nproc-per-node=2"],
            cwd=scratch, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        )  # fmt: skip


def plant(scratch: Path, machine: Container) -> Attack:
    """Copy the run's memory on a machine, change weights and step, mend what can be mended without
    its secret, and have a stranger put it there."""
    attack = Attack("2. planted memory")
    until(attack, "memory of the run", lambda: any(manifests(machine.memory)), seconds=20)
    if attack.got_in:  # it is gone with the run, or the stranger's doing
        return attack
    source = next(path.parent for path in manifests(machine.memory))
    copy = scratch / "copies" / str(machine.process.pid) / source.name
    shutil.copytree(source, copy, ignore_dangling_symlinks=True)
    for path in copy.rglob("*.safetensors"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    for path in manifests(copy.parent):
        seal, separator, text = path.read_bytes().rpartition(b"\n")
        body = json.loads(text)
        body.pop("sha256", None)
        body["step"] = 700_000  # the same on all machines, or it is not whole
        body["state"] = re.sub(r'"step": \d+', '"step": 700000', body["state"])
        for name, spans in body["ranges"].items():
            data = (path.with_suffix("") / name).read_bytes()
            body["checksums"][name] = [crc32(data[start:stop]) for start, stop in spans]
        if path.suffix == ".json":
            body["sha256"] = digest(body)
        path.write_bytes(seal + separator + json.dumps(body).encode())
    os.chmod(scratch / "copies", 0o755)
    return result_of(stranger(machine, "attack_memory", copy))


def manifests(folder: Path) -> list[Path]:
    """What the slots in memory are said to hold."""
    return [
        path for path in folder.glob("perdure-*/slot-*") if path.suffix in (".json", ".manifest")
    ]


def digest(body: Mapping[str, object]) -> str:
    """As a manifest without a secret has it."""
    from hashlib import sha256

    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """("loopback" or an address, port) of every TCP socket on which processes listen."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            links = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in links:
                        address, _, port = local.partition(":")
                        loopback = address.endswith("7F") or address == f"{'0' * 24}01000000"
                        found.add(("loopback" if loopback else address, int(port, 16)))
    return sorted(found)


def newest(run: Path) -> int:
    """The newest step that a run has logged."""
    return max(losses(run.parent, run.name), default=0)


def until(
    outcome: Attack,
    what: str,
    condition: Callable[[], bool],
    nodes: LocalNodes | None = None,
    seconds: float = 120,
) -> None:
    """Wait for it; if it does not come, or the run ends first, that is something that got in."""
    deadline = time.monotonic() + seconds
    while not condition():
        ended = nodes and all(node.process.poll() is not None for node in nodes.nodes)
        if ended or time.monotonic() > deadline:
            outcome.got_in.append(
                f"{what} did not come: {'the run ended' if ended else 'time-out'}"
            )
            return
        time.sleep(0.05)


def compare(scratch: Path, name: str, outcome: Attack) -> None:
    """A run must have come to what the undisturbed one came to, bit for bit."""
    outcome.tried += 1
    found = losses(scratch, name)
    expected = {
        step: loss for step, loss in losses(scratch, "undisturbed").items() if step in found
    }
    if found != expected or not found:
        different = [step for step in found if found[step] != expected.get(step)]
        outcome.got_in.append(f"{len(different)} losses differ, the first in step {different[:1]}")
    weights = []
    for run in "undisturbed", name:
        step = scratch / run / "checkpoints" / f"step-{newest(scratch / name):08}"
        files = sorted(step.rglob("*.safetensors"))
        tensors = {key: value for path in files for key, value in load_file(path).items()}
        weights.append({key: value.numpy().tobytes() for key, value in tensors.items()})
    if not weights[0] or weights[0] != weights[1]:
        outcome.got_in.append("the final weights and optimizer state are not those undisturbed")


def report(attacks: list[Attack]) -> int:
    """Print what was tried; returns the exit code."""
    totals: dict[str, Attack] = {}
    for attack in attacks:
        totals.setdefault(attack.name, Attack(attack.name)).add(attack)
    for attack in sorted(totals.values(), key=lambda attack: attack.name):
        print(f"{attack.name}: {attack.tried} tried, {len(attack.got_in)} got in")
        for what, count in sorted(
            {what: attack.got_in.count(what) for what in attack.got_in}.items()
        ):
            print(f"    GOT IN{f' ({count} times)' if count > 1 else ''}: {what[:200]!r}")
    failed = any(attack.got_in for attack in totals.values())
    print(
        "FAILED" if failed else "nothing got in; all runs ended with the bits of an undisturbed one"
    )
    return int(failed)


def say(what: str) -> None:
    """On the console, with the time since the beginning."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {what}", flush=True)


BEGAN = time.monotonic()

if __name__ == "__main__":
    sys.modules["tests.opt_in.attack"] = sys.modules["__main__"]  # what the parts import
    from tests.opt_in import attack_wire
    from tests.opt_in.attack_wire import attack_addresses, attack_caches  # noqa: F401  # by name

    if sys.argv[1].startswith("attack_"):
        print(json.dumps(asdict(globals()[sys.argv[1]](*sys.argv[2:]))), flush=True)
        os._exit(0)
    sys.exit(main(Path(sys.argv[1])))
