"""What holds of the decoder without comparing it to anyone else's."""

import pytest
import torch
import torch.nn.functional as F

from trainer.models import Decoder, init_parameter
from trainer.models.attention import attend
from trainer.models.decoder import RMSNorm
from trainer.models.loss import mean_cross_entropy
from trainer.recipe.architecture import Architecture

# float32 rounding: a document's angles are taken at other positions, its sums in other blocks.
TOLERANCE = 1e-5

FIRST_ROW = [-0.187937, -0.539403, 0.753980, -0.407761]  # of a 4 x 4 embedding, seed 0, in std


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(decoder: Decoder) -> None:
    tokens = random_tokens(2, 60)
    lengths = [[1, 19, 40], [33, 20, 7]]
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]).int()
    packed = decoder(tokens, document_ids=ids)
    for row, row_lengths in enumerate(lengths):
        pieces = tokens[row].split(row_lengths)
        alone = torch.cat([decoder(piece[None])[0] for piece in pieces])
        torch.testing.assert_close(packed[row], alone, atol=TOLERANCE, rtol=0)
    one_document = decoder(tokens, document_ids=torch.full((2, 60), 9))
    torch.testing.assert_close(one_document, decoder(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("capability", "key_heads"), [((7, 5), 4), ((8, 0), 2)])
def test_heads_are_repeated_where_no_kernel_groups_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], key_heads: int, compiled: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    seen = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: bool) -> torch.Tensor:
        seen.append((k.shape[1], v.shape[1], how["enable_gqa"]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    q, k = (torch.empty(1, 8, heads, 16, dtype=torch.half, device="meta") for heads in (4, 2))
    torch.compiler.reset()  # what was compiled for another capability
    torch.compile(attend, fullgraph=True, backend="eager", disable=not compiled)(q, k, k, None)
    assert seen == [(key_heads, key_heads, key_heads == 2)]


@torch.no_grad()
def test_the_future_is_not_seen(decoder: Decoder) -> None:
    tokens = random_tokens(1, 40)
    changed = tokens.clone()
    changed[0, 30:] = (tokens[0, 30:] + 1) % 131
    for ids in (None, torch.zeros(1, 40)):
        before, after = decoder(tokens, None, ids), decoder(changed, None, ids)
        assert torch.equal(before[0, :30], after[0, :30])
        assert not torch.equal(before[0, 30], after[0, 30])


@pytest.mark.parametrize("way", ["parameters", "autocast"])
def test_bf16_is_close_and_its_loss_is_float32(decoder: Decoder, way: str) -> None:
    tokens = random_tokens(2, 65)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        exact = decoder(inputs, labels)
    if way == "parameters":
        decoder.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        assert decoder(inputs).dtype == torch.bfloat16
        loss = decoder(inputs, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    # bf16 keeps 8 bits of every activation; their errors average out: measured at most 0.05 %.
    torch.testing.assert_close(loss.detach(), exact, rtol=0.002, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


@torch.no_grad()
def test_norm_sums_in_float32_and_returns_the_dtype_of_its_input() -> None:
    x = (100 * torch.randn(4, 512, generator=torch.Generator().manual_seed(0))).bfloat16()
    norm = RMSNorm(512, eps=1e-6)  # float32 weights and bf16 input, as under autocast
    expected = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(norm(x), expected.bfloat16())
    assert torch.equal(norm.bfloat16()(x), expected.bfloat16())


@torch.no_grad()
def test_meta_build_is_complete_once_its_parameters_are_filled(architecture: Architecture) -> None:
    with torch.device("meta"):
        late = Decoder(architecture)
    late.to_empty(device="cpu")
    direct = Decoder(architecture)
    for decoder in (late, direct):
        for name, parameter in decoder.named_parameters():
            parameter.copy_(init_parameter(name, tuple(parameter.shape), architecture, 0))
    assert not list(late.buffers())
    tokens = random_tokens(1, 20)
    assert torch.equal(late(tokens), direct(tokens))


def test_initial_weights_depend_on_seed_and_name_alone(architecture: Architecture) -> None:
    shapes = {name: tuple(p.shape) for name, p in Decoder(architecture).named_parameters()}
    forward = {name: init_parameter(name, shapes[name], architecture, 7) for name in shapes}
    torch.manual_seed(123)
    backward = {
        name: init_parameter(name, shapes[name], architecture, 7) for name in reversed(shapes)
    }
    for name, tensor in forward.items():
        assert torch.equal(tensor, backward[name])
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
        if "norm" in name:
            assert torch.equal(tensor, torch.ones(shapes[name]))
        else:
            other_seed = init_parameter(name, shapes[name], architecture, 8)
            assert not torch.equal(tensor, other_seed)
            assert tensor.std().item() == pytest.approx(architecture.initializer_range, rel=0.1)
    q, o = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    assert not torch.equal(forward[q], forward[o])


def test_initial_weights_are_frozen(architecture: Architecture) -> None:
    """The same recipe starts from the same weights in every version of this code."""
    drawn = init_parameter("model.embed_tokens.weight", (4, 4), architecture, 0)
    expected = architecture.initializer_range * torch.tensor(FIRST_ROW)
    torch.testing.assert_close(drawn[0], expected)


def test_tied_weight_appears_once_and_learns_from_both_ends(
    decoder: Decoder, architecture: Architecture
) -> None:
    names = [name for name, _ in decoder.named_parameters()]
    tied = architecture.tie_word_embeddings
    assert ("lm_head.weight" in names) == ("lm_head.weight" in decoder.state_dict()) == (not tied)
    unused = 130
    decoder(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).backward()
    gradient = decoder.model.embed_tokens.weight.grad
    assert gradient is not None
    assert gradient[unused].any() == tied  # only the softmax reaches a token that is no input


def test_loss_is_the_mean_over_labels_that_count() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([[4, -100, 0], [-100, -100, 2]])
    picked = [logits.log_softmax(-1)[b, t, labels[b, t]] for b, t in ((0, 0), (0, 2), (1, 2))]
    torch.testing.assert_close(mean_cross_entropy(logits, labels), -sum(picked) / 3)
    none = mean_cross_entropy(logits, torch.full((2, 3), -100))
    (gradient,) = torch.autograd.grad(none, logits)
    assert none.item() == 0
    assert not gradient.any()
