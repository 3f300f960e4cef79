"""KGAT against its equations, written out one edge and one user at a time."""

import inspect
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from elastic.world import World
from tests.distributed.jobs import ROOT
from tests.graphs import write_graph
from trainer.data.shards import DataError
from trainer.kgat import open_graph
from trainer.kgat.model import KGAT, KgatPropagation, ranking_metrics
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.recipe import RecipeError, load_recipe, resolved
from trainer.recipe.factory import with_defaults
from trainer.run.preflight import check_launch
from trainer.run.provenance import changes, check_resume
from trainer.run.saves import load_beginning
from trainer.tasks.task import bare_model, build_task

RECIPE = """\
run: {{dir: run, steps: 10, evaluate_every: 5, device: cpu}}
model:
  factory: trainer.kgat:KGAT
  factory_options: {{embedding_dim: 6, relation_dim: 5, layers: [4, 3], l2: 0.1, kg_l2: 0.1}}
data:
  factory: trainer.kgat:open_graph
  factory_options: {{path: {path}, triples_per_sample: 2}}
batch: {{global_batch: 16, micro_batch: 16}}
optimizer: {{lr: 0.01}}
precision: {{dtype: fp32}}
"""


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kgat")
    write_graph(folder / "data")
    (folder / "recipe.yaml").write_text(RECIPE.format(path=folder / "data"))
    return folder / "recipe.yaml"


@pytest.fixture(scope="session")
def build(recipe_file):
    """build(*overrides) → (task, model with large random weights, in evaluation mode)."""

    def build(*overrides):
        task = build_task(load_recipe(recipe_file, overrides))
        model = task.model
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name != "attention":
                    tensor.add_(torch.randn(tensor.shape).mul_(0.3))
        return task, model.eval()

    return build


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("model.factory_options.layrs=[4]", "model.factory_options.layrs: unexpected keyword arg"),
        ("model.factory_options.layers=[4,0]", "model.factory_options.layers.1: input should be g"),
        ("model.factory_options.aggregator=sum", "'graphsage', but it is 'sum'"),
        ("model.factory_options.l2=.nan", "model.factory_options.l2: input should be a finite"),
        ("data.factory_options.format=csv", "data.factory_options.format: input should be 'auto'"),
        ("data.factory_options={}", "data.factory_options.path: missing required argument"),
        ("data.factory_options.path=away", "data.factory_options.path: expected one train.txt in"),
        ("data={sources: [{path: x}], seq_len: 8}", "KGAT needs data.factory: trainer.kgat:open_"),
        ("precision.dtype=bf16", "precision.dtype: KGAT computes in fp32 only; set fp32"),
        (
            "strategy.compile=true",
            "strategy.compile: KGAT cannot be compiled; set false",
        ),
        ("run.stop_after=2", "run.stop_after: KGAT has no validation loss; remove it"),
        ("model.init_from=away", "model.init_from: no checkpoint at away"),
    ],
)
def test_what_it_cannot_do_is_told_in_a_line(recipe_file, override, what):
    build = bare_model if "sources" in override else build_task  # these are not there
    with pytest.raises((RecipeError, DataError), match=re.escape(what)) as error:
        build(load_recipe(recipe_file, [override]))
    assert "\n" not in str(error.value)


def test_a_start_is_checked_and_checkpoints_have_its_files(recipe_file):
    recipe = load_recipe(recipe_file)
    assert check_launch(recipe, 2, 2) == [
        "KGAT has no blocks (an nn.ModuleList, nn.Sequential or nn.ModuleDict of modules), so FSDP "
        "gathers all weights at once"
    ]
    task = build_task(recipe)
    assert json.loads(task.files["config.json"])["layers"] == [4, 3]
    assert task.pretrained == ("user_embedding.weight", "entity_embedding.weight")
    assert task.validation.values({"recall@20": 0.5}) == {"recall@20": 0.5}


def test_it_begins_with_the_embeddings_of_another_run(recipe_file, tmp_path):
    drawn = {
        n: t.clone() for n, t in build_task(load_recipe(recipe_file)).model.state_dict().items()
    }
    save_file({name: one + 1 for name, one in drawn.items()}, tmp_path / "model.safetensors")
    recipe = load_recipe(recipe_file, [f"model.init_from={tmp_path}"])
    task, cpu = build_task(recipe), torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(recipe, World(0, 0, 1, 1, 1, 0, 0, None, cpu))
        model = parallelize(task.model, task.blocks, mesh, recipe, cpu, task.fill)
        load_beginning(model, recipe, task)
    finally:
        dist.destroy_process_group()
    loaded = {name for name, one in model.tensors.items() if one.equal(drawn[name] + 1)}
    assert loaded == {"user_embedding.weight", "entity_embedding.weight"}
    rest = drawn.keys() - loaded
    assert all(model.tensors[name].equal(drawn[name]) for name in rest)


def test_a_checkpoint_of_an_older_version_goes_on(recipe_file):
    """It holds `model.kgat` and `data.graph`, with all their defaults."""
    recipe = load_recipe(recipe_file)
    tree, task = resolved(recipe), build_task(recipe)
    for section, key in (("model", "kgat"), ("data", "graph")):
        keys = tree[section]
        options = keys.pop("factory_options")
        tree[section] |= {key: with_defaults(section, keys["factory"], options), "factory": None}
    data = {"seq_len": 1, "fingerprint": task.stream.fingerprint}
    check_resume({"recipe": tree, "data": data, "seed": 0}, recipe, task, "it")
    assert not changes(tree, recipe)
    tree["model"]["kgat"]["aggregator"] = "gcn"
    with pytest.raises(RecipeError, match=r"aggregator \(gcn there, bi-interaction here\)"):
        check_resume({"recipe": tree, "data": data, "seed": 0}, recipe, task, "it")


def test_its_page_has_each_option_and_its_default():
    page = (ROOT / "docs/kgat.md").read_text()
    for factory in (KGAT, open_graph):
        for name, one in inspect.signature(factory).parameters.items():
            shown = "" if one.default is one.empty else f"`{json.dumps(one.default)}`"
            shown = shown.replace('"', "").replace("1e-05", "1.0e-05")
            row = rf"^\| `{name}` \| [^|]+ \| ?{re.escape(shown)} ?\|"
            assert name in ("recipe", "data") or re.search(row, page, re.M), name


def graph_of(model: KGAT):
    """(head, relation, tail) of each edge."""
    graph = model._graph
    kinds = torch.empty_like(graph.heads)
    kinds[graph.by_relation] = torch.arange(graph.relations).repeat_interleave(
        torch.tensor(graph.counts)
    )
    return list(zip(graph.heads.tolist(), kinds.tolist(), graph.tails.tolist(), strict=True))


def parts_of(model: KGAT):
    nodes = torch.cat([model.user_embedding.weight, model.entity_embedding.weight])
    projections = model.relation_projection.weight.view(-1, 6, 5)
    return nodes, projections, model.relation_embedding.weight


def test_propagation_and_its_gradient(build):
    graph = build()[1]._graph
    weights = torch.rand(len(graph.heads), dtype=torch.float64)
    nodes = torch.randn(graph.nodes, 3, dtype=torch.float64, requires_grad=True)
    dense = torch.zeros(graph.nodes, graph.nodes, dtype=torch.float64)
    dense.index_put_((graph.heads, graph.tails), weights, accumulate=True)
    result = KgatPropagation.apply(graph, weights, nodes)
    torch.testing.assert_close(result, dense @ nodes)
    above = torch.randn_like(result)
    (gradient,) = torch.autograd.grad(result, nodes, above)
    torch.testing.assert_close(gradient, dense.T @ above)


def test_attention(build):
    _, model = build()
    nodes, projections, translations = parts_of(model)
    heads = model._graph.heads
    sums = torch.zeros(model._graph.nodes).index_add(0, heads, model.attention)
    torch.testing.assert_close(sums, torch.ones_like(sums))  # at first, every edge alike
    graph = graph_of(model)
    scores = torch.stack(
        [
            (nodes[tail] @ projections[kind])
            @ torch.tanh(nodes[head] @ projections[kind] + translations[kind])
            for head, kind, tail in graph
        ]
    )
    expected = torch.empty_like(scores)
    for head in range(model._graph.nodes):
        own = heads == head
        expected[own] = torch.softmax(scores[own], dim=0)
    torch.testing.assert_close(model(), expected.detach())
    assert model.state_dict()["attention"].equal(model.attention), "it is part of checkpoints"


@pytest.mark.parametrize("aggregator", ["bi-interaction", "gcn", "graphsage"])
def test_interaction_loss(build, aggregator):
    task, model = build(f"model.factory_options.aggregator={aggregator}")
    batch = task.stream.fetch(range(16))
    model()
    nodes = parts_of(model)[0]
    parts = [nodes]
    for layer in model.aggregators.children():
        sent = torch.zeros_like(nodes)
        for number, (head, _, tail) in enumerate(graph_of(model)):
            sent[head] += model.attention[number] * nodes[tail]
        if aggregator == "graphsage":
            new = F.leaky_relu(layer.sum(torch.cat([nodes, sent], 1)), 0.2)
        else:
            new = F.leaky_relu(layer.sum(nodes + sent), 0.2)
        if aggregator == "bi-interaction":
            new = new + F.leaky_relu(layer.product(nodes * sent), 0.2)
        nodes = new
        parts.append(nodes / nodes.norm(dim=1, keepdim=True))
    all_parts = torch.cat(parts, dim=1)
    total = 0.0
    for user, positive, negative in zip(
        *(batch[name].tolist() for name in ("users", "positives", "negatives")), strict=True
    ):
        u, p, n = all_parts[user], all_parts[60 + positive], all_parts[60 + negative]
        total += -F.logsigmoid(u @ p - u @ n) + 0.1 / 2 * (u @ u + p @ p + n @ n)
    torch.testing.assert_close(model(**batch), total / 16)


def test_edge_loss(build):
    task, model = build()
    batch = task.stream.fetch(range(task.stream.sequences - 16, task.stream.sequences))
    nodes, projections, translations = parts_of(model)
    total = 0.0
    names = ("heads", "relations", "tails", "negative_tails")
    for places in zip(*(batch[name].tolist() for name in names), strict=True):
        kind = places[1]
        h, t, n = (nodes[places[place]] @ projections[kind] for place in (0, 2, 3))
        r = translations[kind]
        margin = (h + r - n).square().sum() - (h + r - t).square().sum()
        total += -F.logsigmoid(margin) + 0.1 / 2 * (h @ h + r @ r + t @ t + n @ n)
    assert len(batch["heads"]) == 32
    torch.testing.assert_close(model(**batch), total / 32)
    model(**batch).backward()
    assert all(parameter.grad is None for parameter in model.aggregators.parameters())


def test_dropout_is_that_of_the_step(build):
    """Two micro-batches of a step see the same graph, two steps do not."""
    task, model = build("model.factory_options.node_dropout=0.5")
    model.train()
    first, same, later = (task.stream.fetch([place]) for place in (0, 1, 16))
    same |= {name: first[name] for name in ("users", "positives", "negatives")}
    later |= {name: first[name] for name in ("users", "positives", "negatives")}
    assert model(**first) == model(**same)
    assert model(**first) != model(**later)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), items=st.integers(3, 300))
def test_recall_and_ndcg(seed, items):
    random = np.random.default_rng(seed)
    users = 4
    scores = random.permutation(users * items).reshape(users, items).astype(np.float32)
    known = np.full((users, items), items)
    wanted = np.full((users, items), items)
    recalls, ndcgs = [], []
    for user in range(users):
        shuffled = random.permutation(items)
        first = int(random.integers(1, items))
        second = int(random.integers(0, items - first))
        wanted[user, :first] = shuffled[:first]
        known[user, :second] = shuffled[first : first + second]
        ranked = [i for i in np.argsort(-scores[user]) if i not in set(known[user].tolist())]
        hits = [int(item in set(wanted[user].tolist())) for item in ranked[:100]]
        recalls.append(sum(hits[:20]) / first)
        best = sum(h / math.log2(2 + n) for n, h in enumerate(sorted(hits, reverse=True)[:20]))
        gain = sum(h / math.log2(2 + n) for n, h in enumerate(hits[:20]))
        ndcgs.append(gain / best if best else 0.0)
    result = ranking_metrics(*map(torch.from_numpy, (scores, known, wanted)))
    assert result.tolist() == pytest.approx([np.mean(recalls), np.mean(ndcgs)], abs=1e-6)
