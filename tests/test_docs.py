"""README and docs: every command is run, every link and path leads somewhere, sentences are short,
and the picture of the rooms is that of the imports."""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save

from docs import api, included, rooms, schedules
from tests import prose
from tests.checkpointing.stored import write_checkpoint
from tests.distributed.jobs import RECIPE, soak
from trainer.cli.main import main
from trainer.data.prepare.prepare import prepare
from trainer.run.train import train

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}

COMMANDS = yaml.safe_load((ROOT / "tests/doc_commands.yaml").read_text(encoding="utf-8"))
SHORT, LONG, ELSEWHERE = (
    {entry["command"]: entry for entry in COMMANDS[table]}
    for table in ("short", "long", "elsewhere")
)
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
BLOCKS = [(page, block) for page, text in PAGES.items() for block in prose.blocks(text)]
SCRIPTS = dict.fromkeys(
    "\n".join(LONG[command].get("run", command) for command in block if command in LONG)
    for _, block in BLOCKS
    if set(block) & set(LONG)
)
"""What the soak runs: the long commands of each block, each such script once."""
ML100K = "recbole/dataset_example/ml-100k/ml-100k"


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    found = prose.sentences(PAGES[page])
    longest = max(found, key=prose.words)
    assert prose.words(longest) <= (35 if page == "README.md" else 40), longest
    assert sum(map(prose.words, found)) / len(found) <= 18


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in prose.links(PAGES[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in prose.anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    """Those of files of this repository, also without the name of their package."""
    for path in prose.paths(PAGES[page]):
        bases = [ROOT, *(ROOT / package for package in rooms.PACKAGES)]
        homes = [base for base in bases if (base / path.split("/")[0]).is_dir()]
        assert not homes or any((home / path).exists() for home in homes), path


def test_the_picture_of_the_rooms_is_of_today():
    page = PAGES["docs/design.md"]
    assert rooms.with_picture(page) == page, "make docs"


def test_rooms_stay_small():
    most = {"trainer": 6, "elastic": 8, "checkpointing": 8}
    files = {name: list((ROOT / name).glob("*.py")) for name in most}
    assert all(len(found) <= most[name] for name, found in files.items()), files
    assert len(inspect.getsourcelines(train)[0]) <= 80


def test_the_picture_of_the_schedules_is_what_the_simulator_says():
    assert schedules.picture() == schedules.IMAGE.read_text(encoding="utf-8"), "make docs"


@pytest.mark.parametrize("page", PAGES)
def test_examples_are_shown_as_they_are(page):
    assert included.with_examples(PAGES[page]) == PAGES[page], "make docs"


def test_the_public_names_are_those_of_today():
    assert api.page() == api.PAGE.read_text(encoding="utf-8"), "make docs"


def test_rooms_in_a_circle_are_refused():
    with pytest.raises(ValueError, match="in a circle: a, b"):
        rooms.direct({"a": {"b"}, "b": {"a"}, "c": {"a"}})
    assert rooms.direct({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"}, "b": {"c"}, "c": set(),
    }  # fmt: skip


def test_every_command_is_run_somewhere():
    stated = [command for _, block in BLOCKS for command in block]
    known = [entry["command"] for table in COMMANDS.values() for entry in table]
    assert set(stated) - set(known) == set(), "in no table: nothing runs it"
    assert set(known) - set(stated) == set(), "in no page any more"
    assert len(known) == len(set(known)), "in two tables"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page):
    """Or a command could hide from these tests."""
    languages = {language for language, _ in prose.FENCE.findall(PAGES[page])}
    assert languages <= {"sh", "console", "text", "python", "yaml", "mermaid"}


def test_what_is_run_elsewhere_is_there():
    for entry in ELSEWHERE.values():
        maker, _, target = entry["where"].partition(" ")
        assert target in TARGETS if maker == "make" else (ROOT / maker).exists(), entry


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_are_known(page):
    """Their subcommands, options, targets and modules exist."""
    for span in prose.code(PAGES[page]):
        if found := re.fullmatch(r"make ([a-z][\w-]*).*", span):
            assert found[1] in TARGETS, span
        elif found := re.match(r"python -m benchmarks\.(\w+)", span):
            homes = [f"benchmarks/{found[1]}.py", f"benchmarks/{found[1]}/*.py"]
            source = "".join(path.read_text() for home in homes for path in ROOT.glob(home))
            assert source, span
            shared = (ROOT / "benchmarks/support/__init__.py").read_text()
            for option in re.findall(r" --([a-z][\w-]+)", span):
                name = option.replace("-", "[-_]")
                assert re.search(rf"\b{name}\b", source + shared), (span, option)
        elif span.startswith("perdure "):
            names = re.findall(r"[a-z|-]+", span.split(" -")[0])[1:3]
            for last in names[-1].split("|") if names else [""]:
                told = help_of([*names[:-1], *filter(None, [last])])
                for option in re.findall(r"(?<= )--[a-z][\w-]+", span):
                    assert option in told, span


def help_of(names: list[str]) -> str:
    """What `perdure NAMES… --help` prints."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, ["perdure", *names, "--help"]
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    assert end.value.code == 0, names
    return printed.getvalue()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A checkout with what the pages speak of, all of it tiny."""
    for name in ("examples", "recipes", "tests", "Makefile", "pyproject.toml", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    texts = [{"text": f"Number {n} of the texts about a river. " * 20} for n in range(300)]
    Path("texts").mkdir()
    Path("texts/a.jsonl").write_text("\n".join(map(json.dumps, texts)))
    prepare(["texts"], "data/wikipedia", train_bpe=300)
    return tmp_path


def test_short_commands(scratch, monkeypatch, capsys):
    shutil.copy("data/wikipedia/tokenizer.json", ".")
    model = {"model.norm.weight": torch.ones(4)}
    files = {"config.json": b"{}", "model.safetensors": save(model)}
    Path("Qwen3-0.6B").mkdir()
    for name, data in files.items():
        Path("Qwen3-0.6B", name).write_bytes(data)
    for step in (200, 300):
        path = Path(f"runs/quickstart/checkpoints/step-{step:08}")
        write_checkpoint(path, step, model, state={"recipe": {"checkpoint": {"keep": 2}}})
    Path("ds_config.json").write_text('{"train_batch_size": 64, "bf16": {"enabled": true}}')
    for page, block in BLOCKS:
        for command in block if set(block) <= set(SHORT) else []:
            typed = SHORT[command].get("run", command)
            monkeypatch.setattr(sys, "argv", shlex.split(typed))
            with pytest.raises(SystemExit) as end:
                main()
            printed = capsys.readouterr()
            wrong = "lrr" in command
            assert end.value.code == (2 if wrong else 0), (page, command, printed)
            assert not wrong or printed.err in PAGES[page]


@soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: " ".join(script.split()[:3]))
def test_long_commands(script, scratch):
    write_what_readers_have(script)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bash(script, PORT=str(port))


@soak
def test_python_of_the_plan_s_page(scratch):
    (block,) = re.findall(r"```python\n(.*?)```", PAGES["docs/plan.md"], flags=re.S)
    bash(f"python -c {shlex.quote(block)}")


def write_what_readers_have(script: str) -> None:
    """What the commands take that a reader writes or downloads, tiny; in the working directory."""
    Path("tiny.yaml").write_text(RECIPE.replace("path: data", "path: data/tiny"))
    prepare(["texts"], "data/tiny", tokenizer="bytes")
    if "mine.yaml" in script:
        (mine,) = re.findall(r"```yaml\n(run: .*?)```", PAGES["docs/quickstart.md"], flags=re.S)
        Path("mine.yaml").write_text(mine)
        bash("perdure train tiny.yaml run.steps=1 schedule.warmup_steps=0")
        bash("perdure ckpt export run Qwen3-0.6B")
    pairs = [(user, (user + 3 * n) % 40) for user in range(60) for n in range(12)]
    links = "".join(f"{item}\t{item}\n" for item in range(40))
    graph = "".join(f"{item}\t0\t{40 + item % 4}\n" for item in range(40))
    if "KGCN" in script:
        folder = Path("KGCN/data/music")
        folder.mkdir(parents=True)
        folder.joinpath("item_index2entity_id.txt").write_text(links)
        folder.joinpath("kg.txt").write_text(graph)
        heard = "".join(f"{user}\t{item}\t1\n" for user, item in pairs)
        folder.joinpath("user_artists.dat").write_text("userID\tartistID\tweight\n" + heard)
    if "recbole" in script or "ml100k" in script:
        rated = "".join(f"{user}\t{item}\n" for user, item in pairs)
        with zipfile.ZipFile("data/recbole-1.2.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{ML100K}.inter", "user_id:token\titem_id:token\n" + rated)
            wheel.writestr(f"{ML100K}.link", "item_id:token\tentity_id:token\n" + links)
            columns = "head_id:token\trelation_id:token\ttail_id:token\n"
            wheel.writestr(f"{ML100K}.kg", columns + graph)
    if "ml100k" in script:
        bash("unzip -jo data/recbole-1.2.1-*.whl -d data/ml-100k")


def bash(script: str, **environment: str) -> None:
    """Run it with this environment's commands first on the path; it must end well."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euc", script],
        check=False,  # but below, with what was printed
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
