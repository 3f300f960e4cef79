"""A GPU computes what a CPU does: slice 1 of `benchmarks.gpu`, with models of toy size."""

from importlib import import_module

import pytest
import torch

from benchmarks.gpu.cases import CASES, judge
from benchmarks.gpu.setting import Setting, UnsupportedError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
CORRECT = [case for case in CASES if case.slice == 1]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("case", CORRECT, ids=[case.name for case in CORRECT])
def test_correct(case, data, tmp_path):
    module, _, function = case.function.partition(":")
    setting = Setting(device="cuda", size="toy", scratch=tmp_path, data=data, others={})
    try:
        figures = getattr(import_module(module), function)(setting, **case.options)
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    entry = {"status": "done", "why": "", "figures": figures}
    assert judge(case, entry, {}, {}, "toy") == ("pass", [])
