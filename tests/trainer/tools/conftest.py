"""For tests of the tools: a run with a failure, in a folder whose name HTML must escape; and
`perdure launch`."""

import sys

import pytest

from tests.distributed.jobs import RECIPE
from tests.trainer.tools.a_run import write_run
from trainer.cli.main import main

ODD = "it's $HOME.yaml"
"""Name of a recipe that a shell would read otherwise."""
OVERRIDE = "tracking.name=\"a $(b) 'c'\""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a <run> & more"
    folder.mkdir()
    write_run(folder)
    return folder


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch(kind, *arguments) → what `perdure launch` prints for the recipe ODD."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    (tmp_path / ODD).write_text(RECIPE)

    def run(kind, *arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["perdure", "launch", kind, ODD, OVERRIDE, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert end.value.code == code, out + err
        return err if code else out

    return run
