"""What the benchmark programs share."""

import sys

from benchmarks.support import ROOT, python_path, run


def test_a_job_finds_what_was_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "from_a_wheel.py").write_text("here = 'here'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "carried"))
    seen = "import from_a_wheel, trainer; print(from_a_wheel.here)"
    assert run([sys.executable, "-c", seen], tmp_path) == "here\n"
    assert python_path(ROOT, "data") == f"{ROOT}:data:{tmp_path / 'carried'}"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path(ROOT) == str(ROOT)
