"""Attention inside documents: every way against a dense reference, and what none of them holds."""

import copy
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.data.packing import cu_seqlens_of
from trainer.models import Decoder, attention
from trainer.models.attention import AttentionDocuments, attend, choose_attention, locate
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.recipe.architecture import Architecture

B, T, N, K, H = 2, 40, 6, 2, 8
# float32 rounds each product to 6e-8; measured at most 4e-7 in the output and 2e-6 in gradients.
TOLERANCE = 1e-5


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Every score, in float64; documents are runs of equal ids."""
    runs = torch.cat([torch.zeros_like(ids[:, :1]), ids.diff() != 0], dim=1).cumsum(1)
    seen = (runs[:, None, :, None] == runs[:, None, None, :]).tril()
    places = torch.arange(ids.shape[1])
    seen &= places[:, None] - places < (window or ids.shape[1])
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(N // K, dim=1) for x in (k, v))
    scores = (q @ k.mT / H**0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        of_sinks = sinks.double()[:, None, None].expand(B, N, T, 1)
        scores = torch.cat([scores, of_sinks], dim=-1)
    return (scores.softmax(-1)[..., :T] @ v).transpose(1, 2)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, T, heads, H) for heads in (N, K, K)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


# The ids go on from row to row: a document that ends a row is not that which begins the next.
many_ids = st.lists(st.integers(0, 3), min_size=B * T, max_size=B * T)
few_documents = st.lists(st.integers(0, B * T), max_size=5).map(
    lambda cuts: [sum(cut <= n for cut in cuts) for n in range(B * T)]
)


@given(many_ids | few_documents)
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize(("way", "window"), [("varlen", None), ("sdpa", None), ("sdpa", 7)])
def test_each_way_is_attention_inside_documents(
    way: Any, window: int | None, ids: list[int]
) -> None:
    documents = torch.tensor(ids).view(B, T)
    where = locate(cu_seqlens_of(documents), (B, T), torch.float32, H, way, window)
    given, exact = inputs(), inputs()
    ours, theirs = attend(*given, where), reference(*exact, documents, window)
    torch.testing.assert_close(ours, theirs.float(), atol=TOLERANCE, rtol=0)
    upstream = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    gradients = torch.autograd.grad(ours, given, upstream)
    expected = torch.autograd.grad(theirs, exact, upstream.double())
    torch.testing.assert_close(gradients, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as it is written, and as it is differentiated: its kernels are not for CPUs,
    and torch lets no gradient through there, though what stands for the kernels has one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    eager = (flex.flex_attention, flex.create_block_mask)
    monkeypatch.setattr(attention, "flex_kernels", lambda: eager)
    monkeypatch.setattr(attention, "capability", lambda _: (8, 0))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7])
def test_flex_is_attention_inside_documents(
    flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    ids = torch.tensor([n // 13 for n in range(B * T)]).view(B, T)
    where = locate(cu_seqlens_of(ids), (B, T), torch.float32, H, "auto", window)  # in float32
    assert where.way == "flex"
    given, exact = inputs(), inputs()
    ours, theirs = attend(*given, where), reference(*exact, ids, window)
    torch.testing.assert_close(ours, theirs.float(), atol=TOLERANCE, rtol=0)
    upstream = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    gradients = torch.autograd.grad(ours, given, upstream)
    expected = torch.autograd.grad(theirs, exact, upstream.double())
    torch.testing.assert_close(gradients, expected, atol=TOLERANCE, rtol=0)
    monkeypatch.undo()
    if window:
        return
    loop = attend(*(again := inputs()), AttentionDocuments("varlen", cu_seqlens_of(ids)))
    loops = torch.autograd.grad(loop, again, upstream)
    torch.testing.assert_close(gradients, loops, atol=TOLERANCE, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("way", "window"), [("sdpa", None), ("sdpa", 7), ("flex", 7)])
def test_a_sink_takes_part_in_the_softmax_of_its_head(
    request: pytest.FixtureRequest, way: str, window: int | None
) -> None:
    if way == "flex":
        request.getfixturevalue("flex_on_cpu")
    ids = torch.tensor([n // 13 for n in range(B * T)]).view(B, T)
    where = locate(cu_seqlens_of(ids), (B, T), torch.float32, H, "auto", window, sinks=True)
    assert where.way == way
    scores = torch.linspace(-1, 3, N)
    given, exact = ([*inputs(), scores.clone().requires_grad_()] for _ in range(2))
    q, k, v, sinks = exact
    ours = attend(*given[:3], where, given[3])
    theirs = reference(q, k, v, ids, window, sinks)
    torch.testing.assert_close(ours, theirs.float(), atol=TOLERANCE, rtol=0)
    upstream = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    gradients = torch.autograd.grad(ours, given, upstream)
    expected = torch.autograd.grad(theirs, exact, upstream.double())
    assert expected[3].abs().min() > 0.05
    torch.testing.assert_close(gradients, expected, atol=TOLERANCE, rtol=0)


def test_kernels_without_sinks_are_not_taken() -> None:
    ids = torch.zeros(B, T, dtype=torch.int64)
    for capability, way in ((None, "sdpa"), ((9, 0), "flex"), ((6, 1), "sdpa")):
        assert choose_attention("auto", BF16, 64, capability, T, sinks=True) == way
    with pytest.raises(ValueError, match="varlen cannot work: its kernels have no attention sinks"):
        locate(cu_seqlens_of(ids), (B, T), torch.float32, H, "varlen", sinks=True)
    where = locate(cu_seqlens_of(ids), (B, T), torch.float32, H, "varlen")
    for documents in (None, where):
        with pytest.raises(ValueError, match=r"need documents from locate\(…, sinks=True\)"):
            attend(*inputs(), documents, torch.zeros(N))


class Operators(TorchDispatchMode):
    """Notes what is called, with what, and the most elements of any result."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.largest = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.calls.append((str(operator), args))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result

    def count(self, name: str) -> int:
        """Calls of an operator."""
        return sum(called == name for called, _ in self.calls)


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, 7)]
)
def test_a_gpu_is_given_boundaries_and_shared_heads(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None
) -> None:
    monkeypatch.setattr(attention, "capability", lambda _: (8, 0))
    with FakeTensorMode(), Operators() as seen:
        q, k, v = (torch.empty(B, T, heads, H, dtype=dtype) for heads in (N, K, K))
        for x in (q, k, v):
            x.requires_grad_()
        ends = torch.empty(9, dtype=torch.int32)
        out = attend(q, k, v, locate(ends, q.shape[:2], q.dtype, H, "auto", window))
        out.sum().backward()
    assert out.shape == q.shape
    (given,) = (args for name, args in seen.calls if name == "torch_attn._varlen_attn.default")
    assert [tuple(x.shape) for x in given[:3]] == [(B * T, N, H), (B * T, K, H), (B * T, K, H)]
    assert given[3] is given[4] is ends
    # The window of the kernel does not count the token itself.
    assert given[5:10] == ((T, T, False, None, [6, 0]) if window else (T, T, True, None, [-1, 0]))
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on
    assert given[10:11] == ((True,) if told else ())
    assert seen.count("torch_attn._varlen_attn_backward.default") == 1
    assert [tuple(x.grad.shape[2:]) for x in (q, k, v) if x.grad is not None] == [
        (N, H), (K, H), (K, H),
    ]  # fmt: skip


def test_a_gpu_s_attention_is_compiled_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *_: (torch.zeros(B, T, N, H),)

    monkeypatch.setattr(attention, "capability", attention._constant(lambda _: (8, 0)))
    ends = torch.empty(9, dtype=torch.int32)
    torch.compile(attend, backend=compiler)(
        *inputs(torch.bfloat16), AttentionDocuments("varlen", ends)
    )
    (graph,) = graphs
    assert "torch_attn._varlen_attn" in str(graph.code)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("asked", "dtype", "head_dim", "capability", "way"),
    [
        ("auto", BF16, 128, (9, 0), "varlen"),
        ("auto", BF16, 64, None, "sdpa"),
        ("auto", torch.half, 64, None, "varlen"),
        ("auto", FP32, 128, (9, 0), "flex"),
        ("auto", BF16, 12, (9, 0), "flex"),
        ("auto", BF16, 512, (9, 0), "flex"),
        ("auto", torch.half, 64, (7, 5), "flex"),
        ("auto", torch.half, 64, (6, 0), "sdpa"),
        ("auto", FP32, 12, None, "varlen"),
        ("sdpa", BF16, 128, (9, 0), "sdpa"),
        ("varlen", FP32, 128, (9, 0), "takes bf16 and fp16, not torch.float32; use auto"),
        ("varlen", BF16, 12, (9, 0), "but it is 12"),
        ("varlen", torch.half, 64, (7, 5), "but this one has 7.5"),
        ("flex", FP32, 64, None, "no backward pass on the CPU"),
    ],
)
def test_the_first_way_that_works_is_taken(
    asked: Any, dtype: torch.dtype, head_dim: int, capability: Any, way: str
) -> None:
    if way in ("varlen", "flex", "sdpa"):
        assert choose_attention(asked, dtype, head_dim, capability, 256) == way
    else:
        with pytest.raises(ValueError, match=way):
            choose_attention(asked, dtype, head_dim, capability, 256)


def test_a_longer_sequence_on_the_cpu_has_no_mask_without_a_window() -> None:
    assert choose_attention("auto", BF16, 64, None, 257) == "varlen"
    assert choose_attention("auto", FP32, 64, None, 257, window=True) == "sdpa"
    with pytest.raises(ValueError, match="no sliding window; use auto"):
        choose_attention("varlen", FP32, 64, None, 257, window=True)


def packed(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and document ids of one sequence."""
    tokens = torch.randint(0, 131, (1, length + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:], torch.arange(length)[None] // 100


def test_nothing_of_the_square_of_the_length_is_made(decoder: Decoder) -> None:
    length = 640
    with Operators() as seen:
        decoder(*packed(length)).backward()
    assert seen.largest < length * length / 2  # the logits are the largest


def test_a_mask_is_made_once_for_all_layers(architecture: Architecture) -> None:
    decoder, length = Decoder(architecture, "sdpa"), 640
    kept = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        decoder(*packed(length)).backward()
    squares = [x.untyped_storage().data_ptr() for x in kept if x.numel() >= length * length]
    assert len(squares) == architecture.num_hidden_layers
    assert len(set(squares)) == 1


@pytest.mark.parametrize(("mode", "times"), [("full", 2), ("selective", 1)])
def test_attention_is_kept_by_selective_recomputation(
    decoder: Decoder, mode: Any, times: int
) -> None:
    layers = apply_activation_checkpointing(decoder, list(decoder.blocks), mode)
    with Operators() as seen:
        decoder(*packed(64)).backward()
    assert seen.count("perdure.varlen_attention.default") == times * len(layers)


def test_selective_recomputation_serves_several_backward_passes(decoder: Decoder) -> None:
    """Such as those of zero bubble: of what a stage is given, and of its weights."""
    twin = copy.deepcopy(decoder)
    several = slice(0, None, 5)  # of each block, and of what is around them
    expected = torch.autograd.grad(twin(*packed(64)), list(twin.parameters())[several])
    apply_activation_checkpointing(decoder, list(decoder.blocks), "selective", again=True)
    loss = decoder(*packed(64))
    with Operators() as seen:
        parameters = list(decoder.parameters())[several]
        assert len(parameters) > 4
        for parameter, gradient in zip(parameters, expected, strict=True):
            (found,) = torch.autograd.grad(loss, [parameter], retain_graph=True)
            assert torch.equal(found, gradient)
    assert not seen.count("perdure.varlen_attention.default"), "it is kept"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("mode", "times"), [("full", 2), ("selective", 1)])
def test_flex_too_is_kept(
    flex_on_cpu: None, architecture: Architecture, mode: Any, times: int
) -> None:
    decoder = Decoder(architecture, "flex")
    layers = apply_activation_checkpointing(decoder, list(decoder.blocks), mode)
    with Operators() as seen:
        decoder(*packed(128)).backward()
    assert seen.count("flex_attention") == times * len(layers)
    assert seen.count("flex_attention_backward") == len(layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_residual_stream_has_its_dtype(
    decoder: Decoder, dtype: torch.dtype
) -> None:
    found = []
    for block in decoder.blocks:
        block.register_forward_hook(lambda _module, given, out: found.append((given[0], out)))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        decoder(*packed(64))
    assert {x.dtype for pair in found for x in pair} == {dtype}
