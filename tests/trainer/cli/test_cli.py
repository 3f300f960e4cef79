"""The way of a user, command by command; where it matters, in real processes."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from elastic.process import children
from tests.distributed.jobs import RECIPE, ROOT, soak
from trainer.cli.main import main

PERDURE = Path(sys.executable).parent / "perdure"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "recipe.yaml").write_text(RECIPE)
    rows = [{"body": f"Line {n}: the quick brown fox jumps over the dog."} for n in range(500)]
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, "not json")
    (folder / "text.jsonl").write_text("\n".join(lines))
    set_traps(folder)
    return folder


def set_traps(folder):
    """Files and folders that are called like modules of ours, of torch's and of Python's."""
    for name in ("trainer", "elastic", "checkpointing", "lab", "torch", "random", "tokenizers"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('out of the folder')")


def started(folder, arguments, **environment):
    return subprocess.Popen(
        [PERDURE, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def perdure(folder, *arguments, code=0, meanwhile=lambda pid: None):
    with started(folder, arguments, OMP_NUM_THREADS="1") as process:
        deadline = time.monotonic() + 120
        while True:
            meanwhile(process.pid)
            try:
                output, _ = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline or process.kill()
    assert process.returncode == code, output
    return output


def sign_of_life(folder, *arguments):
    """What a command prints up to the line that it loads PyTorch, and what it has imported."""
    told = []
    with started(folder, arguments, PYTHONPROFILEIMPORTTIME="1") as process:
        assert process.stdout
        for line in process.stdout:
            told.append(line)
            if line == "# loading PyTorch\n":
                break
        process.kill()
    return "".join(told)


def listeners(pid: int) -> set[str]:
    """Addresses that a process and all that it has started listen on, in hexadecimal, as Linux
    writes them."""
    inodes, todo = set(), [pid]
    while todo:
        one = todo.pop()
        todo += children(one)
        with suppress(OSError):
            for path in Path(f"/proc/{one}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(path).removeprefix("socket:[").rstrip("]"))
    listening = "0A"
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == listening and fields[9] in inodes:
                found.add(local.partition(":")[0])
    return found


COMMANDS = [
    *(["ckpt", name, "run"] for name in ("ls", "show", "verify")),
    ["generate", "run", "--prompt", "Line 7", "--max-new-tokens", "8"],
]


@pytest.fixture
def tell(folder, monkeypatch, capsys):
    """tell(*arguments, code=0) → what a command prints that this process runs (errors, if it
    fails): one of its own imports torch for two seconds."""

    def tell(*arguments, code=0):
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
        monkeypatch.setattr(sys, "argv", ["perdure", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert end.value.code == code, printed
        return printed.err if code and not printed.out else printed.out

    monkeypatch.chdir(folder)
    return tell


def test_from_text_to_text(folder, tell):
    prepare = ["data", "prepare", "text.jsonl", "--out", "data", "--tokenizer", "bytes"]
    output = tell(*prepare, "--field", "body", "--validation-fraction", "0.2")
    assert "from 500 documents; 1 bad records left out" in output
    assert "text.jsonl:4: not JSON" in tell("data", "inspect", "data", "--verify")

    told = sign_of_life(folder, "train", "recipe.yaml", "run.steps=6", "schedule={}", "--dry-run")
    assert "steps: 6" in told
    assert " torch\n" not in told, "a sign of life comes before what takes seconds"
    assert not (folder / "run").exists()
    command = ["train", "recipe.yaml", "run.steps=6", "schedule={}", "checkpoint.every=3"]
    command += ["run.evaluate_every=3"]
    heard: set[str] = set()
    output = perdure(folder, *command, meanwhile=lambda pid: heard.update(listeners(pid)))
    assert heard == {"0100007F"}, "only this machine, 127.0.0.1, can reach a job of this machine"
    assert output.startswith("recipe.yaml: 6 steps, in run; loading PyTorch\n")
    assert "FULL_SHARD over 2 rank(s)" in output
    assert re.search(r"^step 6/6 \| loss .* \| \d\d:\d\d:\d\d$", output, flags=re.M)
    assert "first step after" in output

    listing, tensors, verified, generated = (tell(*command) for command in COMMANDS)
    assert [line.split()[0] for line in listing.splitlines()[1:3]] == [
        "step-00000006",
        "step-00000003",
    ]
    assert "model.layers.1.mlp.down_proj.weight" in tensors
    assert "0 problem(s)" in verified
    assert generated.startswith("Line 7")

    shard = next((folder / "run/checkpoints/step-00000006/optimizer").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    assert shard.name in tell("ckpt", "verify", "run", code=2)


@pytest.mark.parametrize(
    ("safe", "told"),
    [("", "`-m trainer` would run"), pytest.param("1", "no prepared data set", marks=soak)],
)
def test_torchrun_is_told_of_a_folder_in_the_way_at_once(tmp_path, safe, told):
    """`-m trainer` would run it, under any rendezvous; with PYTHONSAFEPATH=1 nothing is in the
    way."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    set_traps(tmp_path)
    command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "1"]
    if safe:
        command += ["--rdzv-backend", "perdure", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "trainer", "recipe.yaml"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    if safe:
        environment["PYTHONSAFEPATH"] = safe
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told in line


def test_version_is_told_without_importing_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    *imports, told = perdure(tmp_path, "--version").splitlines()
    python = platform.python_version()
    assert told == f"perdure {version('perdure')} (Python {python}, torch {version('torch')})"
    imported = [line.rpartition("|")[2].strip() for line in imports]
    assert "argparse" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian", "x.yaml"], "train"),
        (["data", "prepar"], "prepare"),
        (["data", "prepare", "x", "--out", "y", "--split-documents", "windows"], "window"),
    ],
)
def test_a_mistyped_command_is_answered_by_the_one_that_was_meant(tell, arguments, meant):
    assert tell(*arguments, code=2).endswith(f"did you mean '{meant}'?\n")


def test_the_image_has_the_torch_of_make_train():
    found = [
        re.search(r"TORCH( \?)?=\s*(torch==\S+)", (ROOT / name).read_text())[2]
        for name in ("Makefile", "Dockerfile")
    ]
    assert found[0] == found[1]
