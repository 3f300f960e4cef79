"""For tests of the tools: a run with a failure, in a folder whose name HTML must escape."""

import pytest

from tests.trainer.tools.a_run import write_run


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a <run> & more"
    folder.mkdir()
    write_run(folder)
    return folder
