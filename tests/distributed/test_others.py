"""Trainers of other libraries in examples/, on ranks and nodes that come and go: each goes on in
the processes that are left, and takes each sample once."""

import difflib
import importlib.util
import random
import re
import time

import pytest
import torch
from safetensors.torch import load_file

import elastic
from elastic.node.progress import NodeProgressPage
from tests.distributed.jobs import EXAMPLES, Job, soak
from tests.distributed.test_elastic_library import kill_rank, losses
from tests.elastic.test_job import job_of

LIBRARIES = {
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
    "lightning_trainer": "pytorch_lightning",
}
STEPS = 60
MANY = 500
SLOW = """\
begin = elastic.Job.begin_step


def begin_step(job, *of):
    __import__("time").sleep(0.15 * (job.world.world_size < 4))
    begin(job, *of)


elastic.Job.begin_step = begin_step
"""
"""While a node is away, the others do not get to the end."""

DIES = """\
        if (step, job.world.rank, job.world.generation) == (14, 1, 0):
            import os, pathlib, checkpointing
            while not checkpointing.newest_checkpoint(pathlib.Path("checkpoints")):
                pass
            os.kill(os.getpid(), 9)
"""
"""Rank 1 is killed in step 14, once step 10 is saved: another process might come too late."""


@pytest.mark.parametrize("name", LIBRARIES)
def test_ten_lines_change(name):
    """Added, removed or altered, empty ones aside."""
    plain, changed = (
        [line for line in (EXAMPLES / f"{name}{kind}.py").read_text().splitlines() if line]
        for kind in ("", "_elastic")
    )
    blocks = difflib.SequenceMatcher(None, plain, changed, autojunk=False).get_opcodes()
    lines = sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")
    assert 0 < lines <= 10


def loop_by_hand(steps):
    """Losses by step of the loop of accelerate, in this process and without accelerate."""
    spec = importlib.util.spec_from_file_location("loop", EXAMPLES / "accelerate_loop.py")
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    data, model = loop.samples(), loop.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order, found = elastic.sampler(data, loop.GLOBAL_BATCH), {}
    for step in range(1, steps + 1):
        (rows,) = order.step(step)
        x, y = data[rows]
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[step] = loss.item()
    return found


def test_a_loop_of_accelerate_keeps_its_process(cluster, tmp_path):
    """That of the rank which is left; it goes on from the copy in memory that it held itself."""
    pytest.importorskip("accelerate")
    nodes = cluster("accelerate_loop_elastic", "1", ranks=2)
    loop = tmp_path / "accelerate_loop_elastic.py"
    main, step = "def main(job):\n", "        x, y = "
    # One write a line, by one rank: parts of two ranks' lines would mix in the pipe.
    pid = '__import__("os").getpid()'
    said = f'    job.world.rank or print("pid %d\\n" % {pid}, end="", flush=True)\n'
    text = loop.read_text().replace(main, main + said).replace(step, DIES + step)
    loop.write_text(text)
    node = nodes.add()
    assert node.process.wait(90) == 0, node.text()
    text = node.text()
    assert losses(text) == pytest.approx(loop_by_hand(STEPS), abs=1e-5)
    assert "restored step 10 from memory" in text
    first, then = re.findall(r"pid \d+", text)
    assert first == then


def progress(node):
    """Steps that the host of rank 0 has printed in the generation that is under way. The Trainer of
    Hugging Face prints losses without a step."""
    text = node.text()[node.seen :]
    return len(losses(text)) or text.count("{'loss'")


def wait_for_steps(nodes, count):
    """Until the host of rank 0 has done so many in the generation that is under way."""
    deadline = time.monotonic() + 120
    while max(map(progress, nodes)) < count:
        assert time.monotonic() < deadline, nodes[0].text()
        assert not any(node.process.poll() for node in nodes), nodes[0].text()
        time.sleep(0.01)


def weights(folder):
    """Those of the last step."""
    step = folder / "checkpoints" / f"step-{MANY:08}"
    return load_file(step / "model-00001-of-00001.safetensors")


@soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LIBRARIES)
def test_twenty_kills_a_lost_node_and_a_join(cluster, tmp_path, tmp_path_factory, name):
    """On two nodes of two ranks. What was trained is what one process trains undisturbed."""
    pytest.importorskip(LIBRARIES[name])
    script = f"{name}_elastic"
    nodes = cluster(script, "1:2", ranks=2)
    text = (tmp_path / f"{script}.py").read_text()
    text = text.replace(f"STEPS, GLOBAL_BATCH = {STEPS}", f"STEPS, GLOBAL_BATCH = {MANY}")
    alone = tmp_path_factory.mktemp("alone")
    (alone / f"{script}.py").write_text(text)
    (tmp_path / f"{script}.py").write_text(text.replace("def main(", f"{SLOW}\n\ndef main("))
    first, second = nodes.add(), nodes.add()
    draw, seconds, kept = random.Random(name), [], 0
    for node in nodes.nodes:
        node.seen = 0
    for kill in range(20):
        wait_for_steps(nodes.nodes, 11)  # one of these is saved
        if kill == 10:
            second.kill()
            first.seen = len(first.text())
            wait_for_steps([first], 3)
            nodes.restart(second)
            while len(second.trainers()) < 2:
                time.sleep(0.05)
            first.seen = second.seen = len(first.text())
            wait_for_steps(nodes.nodes, 11)
        before = {*first.trainers(), *second.trainers()}
        victim = draw.choice([first, second])
        began = time.monotonic()
        kill_rank(victim, draw.randrange(2))
        after = before
        while after == before or len(after) < 4:
            after = {*first.trainers(), *second.trainers()}
            time.sleep(0.005)
        for node in nodes.nodes:
            node.seen = len(node.text())
        wait_for_steps(nodes.nodes, 1)
        seconds.append(time.monotonic() - began)
        kept += len(before & {*first.trainers(), *second.trainers()})
    assert nodes.wait(300) == [0, 0], first.text()
    print(name, "seconds to the next step:", sorted(round(one, 1) for one in seconds))
    print(name, "processes kept:", kept, "of", 20 * 3)
    assert kept >= 50, "a few may be stuck in a collective, and are forked anew"
    if name == "hf_trainer":
        code, output = Job(alone, 1, program=[script]).wait()
        assert code == 0, output
        torch.testing.assert_close(weights(tmp_path), weights(alone), atol=2e-4, rtol=0)
        return
    expected = loop_by_hand(MANY)  # the module of Lightning is the same model
    assert losses(first.text() + second.text()) == pytest.approx(expected, abs=1e-5)


class Mean(torch.nn.Linear):
    """Its loss is the mean over the rows that it is given."""

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(super().forward(x), labels)}


@soak
def test_a_trainer_that_does_not_fit_is_refused(tmp_path):
    """Seven rows in passes of three are passes of three, two and two."""
    transformers = pytest.importorskip("transformers")
    lightning = pytest.importorskip("pytorch_lightning")
    from elastic.adapters.hugging_face import make_elastic
    from elastic.adapters.lightning import ElasticCallback

    job, rows = (
        job_of(0, 1, NodeProgressPage.make()),
        torch.utils.data.TensorDataset(torch.ones(70, 2)),
    )

    def trainer(**options):
        of_all = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 3}
        arguments = transformers.TrainingArguments(str(tmp_path), **of_all, **options)
        return transformers.Trainer(Mean(2, 2), arguments, train_dataset=rows)

    with pytest.raises(ValueError, match="needs max_steps"):
        make_elastic(trainer(), job, 6)
    with pytest.raises(ValueError, match="unequal parts of 7 samples"):
        make_elastic(trainer(max_steps=2), job, 7)
    assert make_elastic(trainer(max_steps=2), job, 6).passes == 2

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch, _):
            return self.net(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(batches, loader, **options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        saves = lightning.callbacks.ModelCheckpoint(tmp_path / "saves", every_n_train_steps=9)
        callbacks = [ElasticCallback(job, batches), saves]
        lightning.Trainer(accelerator="cpu", callbacks=callbacks, **quiet, **options).fit(
            Module(), loader
        )

    batches = elastic.sampler(rows, 6)
    with pytest.raises(ValueError, match="with the sampler of its ElasticCallback"):
        fit(batches, torch.utils.data.DataLoader(rows, 6), max_steps=2)
    passes = elastic.sampler(rows, 6, micro_batch=3)
    loader = torch.utils.data.DataLoader(rows, batch_sampler=passes)
    with pytest.raises(ValueError, match="accumulate_grad_batches is 1, and a step of the"):
        fit(passes, loader, max_steps=2)
    passes.done = 1
    with pytest.raises(ValueError, match="checkpoint of step 0 has no state of ElasticCallback"):
        fit(passes, loader, max_steps=2, accumulate_grad_batches=2)
