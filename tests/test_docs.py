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
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import save

from benchmarks import published_plans
from docs import api, glossary, included, rooms, schedules, versions, website
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
SHOWN = [(page, block) for page, text in PAGES.items() for block in prose.blocks(text)]
SAID = {command: page for page, text in PAGES.items() for command in prose.typed(text)}
for command in chain(*(block for _, block in SHOWN)):
    SAID.pop(command, None)
BLOCKS = [*SHOWN, *((page, [command]) for command, page in SAID.items())]
"""Commands that are shown together, and each by itself that only a sentence has."""
SCRIPTS = dict.fromkeys(
    "\n".join(LONG[command].get("run", command) for command in block if command in LONG)
    for _, block in BLOCKS
    if set(block) & set(LONG)
)
"""What the soak runs: the long commands of each block, each such script once."""
PYTHON = [(page, block) for page, text in PAGES.items() for block in prose.PYTHON.findall(text)]
ML100K = "recbole/dataset_example/ml-100k/ml-100k"


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    found = prose.sentences(PAGES[page])
    longest = max(found, key=prose.words)
    assert prose.words(longest) <= 35, longest
    assert sum(map(prose.words, found)) / len(found) <= 15


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page):
    """At most 100 columns, outside tables and blocks of code. On the site a list begins only after
    an empty line."""
    found = re.sub(r"^ *\|.*", "|", prose.FENCE.sub("", PAGES[page]), flags=re.M).splitlines()
    assert [line for line in found if len(line) > 100] == []
    item = r"[-*] |\d+\. "
    pairs = [(before, line) for before, line in pairwise(found) if re.match(item, line) and before]
    assert [line for before, line in pairs if not re.match(rf"{item}|  ", before)] == []


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    for link in prose.links((ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in prose.anchors(target.read_text(encoding="utf-8")), link


def test_pages_that_code_names_are_there():
    """With their anchors: in messages, help and comments."""
    files = [ROOT / "Makefile", *(ROOT / "recipes").glob("*.yaml")]
    for folder in (*rooms.PACKAGES, "benchmarks", "examples"):
        files += (ROOT / folder).rglob("*.py")
    for path in files:
        text = path.read_text(encoding="utf-8")
        for page, anchor in re.findall(r"\b(docs/[\w-]+\.md)(?:#([\w-]+))?", text):
            assert page in PAGES, (path, page)
            assert not anchor or anchor in prose.anchors(PAGES[page]), (path, page, anchor)


def test_the_site_has_every_page():
    """`make site` itself needs mkdocs."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = [page for part in nav[1:] for pages in part.values() for page in pages]
    own = [Path(page).name for page in PAGES if page != "README.md"]
    assert nav[0] == {"Perdure": "index.md"}
    assert sorted(shown) == sorted([*own, "CONTRIBUTING.md", "CHANGELOG.md"])


def test_links_of_pages_lead_on_from_their_places_on_the_site():
    """README.md and docs/ are one folder there, and files of code are pages."""
    readme = "[a](docs/elastic.md#limits) ![b](docs/images/c.svg) [d](recipes/dpo.yaml)"
    assert website.linked_as_on_site("README.md", readme) == (
        "[a](elastic.md#limits) ![b](images/c.svg) [d](recipes/dpo.yaml.md)"
    )
    page = "[a](../README.md#b) [c](../trainer/plan/costs.py) [d](#e) [f](https://g)\n```\n](../h)\n```"
    assert website.linked_as_on_site("docs/plan.md", page) == (
        "[a](index.md#b) [c](trainer/plan/costs.py.md) [d](#e) [f](https://g)\n```\n](../h)\n```"
    )
    table = "[a](../../docs/plan.md) [b](optimizers.json)"
    assert website.linked_as_on_site("benchmarks/results/optimizers.md", table) == (
        "[a](../../plan.md) [b](optimizers.json)"
    )
    assert website.with_bars("| `a\\|b` | c \\| d |") == "| `a|b` | c \\| d |"


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


def test_the_glossary_has_the_classes_of_today():
    assert glossary.page() == glossary.PAGE.read_text(encoding="utf-8"), "make docs"


def test_the_table_of_versions_is_what_was_run():
    assert versions.page() == versions.PAGE.read_text(encoding="utf-8"), "make docs"


def test_published_runs_are_beside_what_the_plan_says_today():
    """Those on one node; the table has the others, and the first choices, too."""
    for number, row in enumerate(published_plans.TABLE, start=1):
        if row.gpus == 8:
            blueprint, found = published_plans.estimate(row)
            theirs = published_plans.published_speed(row, blueprint)
            said = published_plans.cell(published_plans.speed_of(found), theirs)
            (shown,) = re.findall(rf"^\| {number}\. .*", PAGES["docs/plan.md"], flags=re.M)
            assert f"| {said} " in shown, "python -m benchmarks.published_plans"


def test_rooms_in_a_circle_are_refused():
    with pytest.raises(ValueError, match="in a circle: a, b"):
        rooms.direct({"a": {"b"}, "b": {"a"}, "c": {"a"}})
    assert rooms.direct({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"}, "b": {"c"}, "c": set(),
    }  # fmt: skip


def test_every_table_of_benchmarks_says_what_was_measured():
    """By which command, when and at which commit, and its output; or it is of the same run."""
    said = re.compile(r"`[^`]+`, \d+ \w+ 20\d\d, commit [0-9a-f]{7} \(\[.*results/")
    above = ""
    for before, line in pairwise(PAGES["docs/benchmarks.md"].splitlines()):
        if line.startswith("|") and not before.startswith("|"):
            assert said.search(above) or "The same run" in above, above + line
        above = "" if line.startswith(("|", "#")) else f"{above} {line}"


def test_readme_shows_figures_of_benchmarks():
    page, rows = PAGES["docs/benchmarks.md"], {}
    for cells in re.findall(r"^\|(.*)\|$", page, flags=re.M):
        fault, *figures = cells.replace("*", "").split(" | ")
        rows.setdefault(fault, figures)
    shown = PAGES["README.md"].partition("## Measured\n")[2].partition("## ")[0]
    for cells in re.findall(r"^\| (a .*)\|$", shown, flags=re.M):
        fault, *figures = cells.replace("*", "").split(" | ")
        pairs = zip(figures, rows[f" {fault}"], strict=False)
        assert all(whole.startswith(part.strip()) for part, whole in pairs), cells
    (source,) = re.findall(r"`python -m benchmarks[^`]*`[^`]*commit \w+", shown)
    assert " ".join(source.split()) in " ".join(page.split())


def test_commits_are_there():
    """Those that pages name."""
    named = set(re.findall(r"commit\s([0-9a-f]{7})", "".join(PAGES.values())))
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    if git(["git", "rev-parse", "--is-shallow-repository"]).stdout.strip() != "false":
        pytest.skip("this checkout has no history")
    found = git(["git", "cat-file", "--batch-check"], input="\n".join(named)).stdout
    assert [line for line in found.splitlines() if " commit " not in line] == []


def test_every_output_is_shown_or_read():
    """`benchmarks/results/` has no others."""
    programs = [ROOT / "Makefile", ROOT / "benchmarks/goodput.py"]
    readers = [*PAGES.values(), *(path.read_text() for path in programs)]
    for path in (ROOT / "benchmarks/results").iterdir():
        assert any(path.name in text or f'"{path.stem}"' in text for text in readers), path


def test_docstrings_stand_alone():
    """Without the line above, or another docstring."""
    for package in (*rooms.PACKAGES, "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            found = re.findall(r'^ *"""(?:Of|The same,) .*', path.read_text(), flags=re.M)
            assert found == [], path


def test_every_command_is_run_somewhere():
    stated = {command for _, block in BLOCKS for command in block}
    known = [*SHORT, *LONG, *ELSEWHERE]
    run = [line for table in (SHORT, LONG) for entry in table.values() for line in lines(entry)]
    benchmarks = [path.stem for path in (ROOT / "benchmarks").glob("*.py")]
    assert [name for name in benchmarks if f"benchmarks.{name} " not in " ".join(run)] == []
    unknown = {one for one in stated - set(known) if not prose.stands_for(one, run)}
    assert unknown == set(), "in no table: nothing runs it"
    assert set(known) - stated == set(), "in no page any more"
    assert len(known) == len(set(known)), "in two tables"


def lines(entry: dict[str, str]) -> list[str]:
    """What is run for a command, one by one."""
    return re.split(r"\n| && ", entry.get("run", entry["command"]))


def test_every_block_of_python_is_run_as_it_stands():
    """Those of examples/ are run by tests of their own."""
    known = [entry["block"] for entry in COMMANDS["python"]]
    assert sorted(known) == sorted(block.partition("\n")[0] for _, block in PYTHON)
    shown = {file for text in PAGES.values() for _, file in included.SHOWN.findall(text)}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert [file for file in shown if Path(file).stem not in tests] == []


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page):
    """Or a command could hide from these tests."""
    languages = {language for language, _ in prose.FENCE.findall(PAGES[page])}
    assert languages <= {"sh", "console", "text", "python", "yaml", "mermaid"}


def test_what_is_run_elsewhere_is_there():
    for command, entry in ELSEWHERE.items():
        where = entry.get("where", entry.get("needs"))
        assert where not in (None, command), entry
        maker, _, target = entry.get("where", "Makefile").partition(" ")
        assert target in TARGETS if maker == "make" else (ROOT / maker).exists(), entry


def test_commands_in_sentences_are_known():
    """Their subcommands, options, targets and modules exist."""
    spans = [(page, span) for page, text in PAGES.items() for span in prose.code(text)]
    for page, span in spans:
        if "commit" in ELSEWHERE.get(span, {}).get("needs", ""):
            continue  # of code that is no more
        if found := re.fullmatch(r"make ([a-z][\w-]*).*", span):
            assert found[1] in TARGETS, (page, span)
        elif found := re.match(r"python -m benchmarks\.(\w+)", span):
            homes = [f"benchmarks/{found[1]}.py", f"benchmarks/{found[1]}/*.py"]
            source = "".join(path.read_text() for home in homes for path in ROOT.glob(home))
            assert source, (page, span)
            shared = (ROOT / "benchmarks/support/__init__.py").read_text()
            for option in re.findall(r" --([a-z][\w-]+)", span):
                name = option.replace("-", "[-_]")
                assert re.search(rf"\b{name}\b", source + shared), (page, span, option)
        elif span.startswith("perdure "):
            names = re.findall(r"[a-z|-]+", span.split(" -")[0])[1:3]
            for last in names[-1].split("|") if names else [""]:
                told = help_of(*names[:-1], *filter(None, [last]))
                for option in re.findall(r"(?<= )--[a-z][\w-]+", span):
                    assert option in told, (page, span)


@cache
def help_of(*names: str) -> str:
    """What `perdure NAMES… --help` prints."""
    printed = io.StringIO()
    command = patch.object(sys, "argv", ["perdure", *names, "--help"])
    environment = patch.dict(os.environ)  # main adds to it
    output, ends = contextlib.redirect_stdout(printed), pytest.raises(SystemExit)
    with command, environment, output, ends as end:
        main()
    assert end.value.code == 0, names
    return printed.getvalue()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A checkout with what the pages speak of, all of it tiny."""
    linked = ("benchmarks", "docs", "examples", "recipes", "tests", "Makefile", "pyproject.toml")
    for name in (*linked, ".venv"):
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
    Path("accelerate.yaml").write_text("{distributed_type: FSDP, num_processes: 16}")
    Path("args.json").write_text('{"learning_rate": 2e-5}')
    for page, block in BLOCKS:
        entries = [SHORT[command] for command in block if set(block) <= set(SHORT)]
        for typed in chain(*map(lines, entries)):
            monkeypatch.setattr(sys, "argv", shlex.split(typed))
            with pytest.raises(SystemExit) as end:
                main()
            printed = capsys.readouterr()
            wrong = "lrr" in typed
            assert end.value.code == (2 if wrong else 0), (page, typed, printed)
            assert not wrong or printed.err in PAGES["README.md"]


WALK = """
import os, sys
from functools import cache
from trainer import run
from trainer.recipe.sections import Recipe
from trainer.run.worker import main

home = os.path.dirname(os.path.dirname(run.__file__))
rooms = []

@cache
def folder_of(file):
    return os.path.relpath(file, home).rpartition("/")[0]

def enter(frame, event, _):
    folder = folder_of(frame.f_code.co_filename) if event == "call" else "."
    if folder.startswith(".") or rooms[-1:] == [folder]:
        return
    if any(isinstance(value, Recipe) for value in frame.f_locals.values()):
        rooms.append(folder)

def leave(code, leave=os._exit):
    sys.setprofile(None)
    print(*rooms)
    sys.stdout.flush()
    leave(code)

os._exit = leave
sys.setprofile(enter)
main(["tiny.yaml", "run.steps=2", "schedule.warmup_steps=0"])
"""


@soak
def test_a_recipe_returns_to_few_rooms(scratch, monkeypatch):
    """From its file to the end of a run of two steps, which hands it from function to function."""
    write_what_readers_have("")
    monkeypatch.delenv("RANK", raising=False)
    command = [sys.executable, "-c", WALK]
    walked = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    walk = walked.splitlines()[-1].split()
    assert {"recipe", "tasks", "run", "parallel", "optim"} <= set(walk)
    assert len({room for n, room in enumerate(walk) if room in walk[:n]}) <= 8, walk


@soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: " ".join(script.split()[:3]))
def test_long_commands(script, scratch):
    write_what_readers_have(script)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bash(script, PORT=str(port))


@soak
@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python(page, block, scratch):
    Path("block.py").write_text(block)
    (entry,) = (one for one in COMMANDS["python"] if block.startswith(one["block"] + "\n"))
    write_what_readers_have(entry["run"])
    bash(entry["run"], BLOCK="block.py")


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
    here = {"CHECKOUT": str(ROOT), "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-euc", script],
        check=False,  # but below, with what was printed
        env={**os.environ, "PATH": path, **here, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
