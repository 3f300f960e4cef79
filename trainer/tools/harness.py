"""Evaluates checkpoints on tasks of lm-evaluation-harness. Needs the package lm-eval, an extra.

Texts are tokenized as the harness does for transformers models, so that scores are comparable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence

from trainer.data.tokenizer import special_variables
from trainer.tools.eval_lines import LineSubject
from trainer.tools.generate import GenerateError, GenerationModel, GenerationSampling, open_model

ROWS = 8  # texts per forward pass


def find_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    given = str(include_path) if include_path else None
    # If the directory has all tasks, those of the harness need not be indexed, which takes seconds.
    manager = TaskManager(include_path=given, include_defaults=not given)
    if given and set(names) - set(manager.all_tasks):
        manager = TaskManager(include_path=given)
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise GenerateError(
            f"--tasks: lm-eval knows no {', '.join(unknown)}; `lm-eval ls tasks` lists those that "
            "it has, --include-path DIR adds tasks of your own"
        )
    return manager


def results(
    manager: TaskManager, device: str, family: str | None = None
) -> Callable[[Path, Sequence[LineSubject]], Iterator[dict[str, Any]]]:
    """Return `make` of `add_lines` for tasks. It adds `results`: task → metric → value."""

    def make(path: Path, wanted: Sequence[LineSubject]) -> Iterator[dict[str, Any]]:
        model = _HarnessModel(open_model(path, device=device, family=family))
        for item in wanted:
            try:
                found = simple_evaluate(
                    model,
                    tasks=[item["task"]],
                    task_manager=manager,
                    limit=item["limit"],
                    log_samples=False,
                    bootstrap_iters=1000,  # for errors of metrics that have no formula for it
                )
            except (OSError, ValueError) as error:
                raise GenerateError(f"--tasks {item['task']}: {error}") from error
            scores = found["results"].items()
            yield {"results": {name: _numbers(values) for name, values in scores}}

    return make


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
    return {k: float(v) for k, v in numbers.items() if not isinstance(v, bool)}


class _HarnessModel(TemplateLM):
    eot_token_id = 0  # set by the constructor: the token before texts without a context

    def __init__(self, opened: GenerationModel) -> None:
        super().__init__()
        self._opened = opened
        begin = special_variables(opened.directory).get("bos_token")
        begin_id = opened.tokenizer.token_to_id(begin) if begin else None
        known = [token for token in (begin_id, *opened.eos_ids) if token is not None]
        if not known:
            raise GenerateError(
                f"{opened.directory}: has no token to begin a text with; set bos_token in "
                "tokenizer_config.json, or eos_token_id in config.json"
            )
        self.eot_token_id = known[0]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        sums = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.eot_token_id, self._opened.limit, context_len=1
            )
            scored = [(text, *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(scored)))
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        return [self._continued(*request.args) for request in requests]

    def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
        return self._opened.tokenizer.encode(string, add_special_tokens=False).ids

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the second tokens, whether they are the likeliest) of each request,
        after the first tokens."""
        model, limit = self._opened.model, self._opened.limit
        device = next(model.parameters()).device
        rows = [(before + after)[-limit - 1 :] for _, before, after in requests]
        results = [(0.0, True)] * len(rows)
        # rows of similar length share a batch, which needs less padding
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        for first in range(0, len(order), ROWS):
            batch = order[first : first + ROWS]
            # padding on the right, where causal attention never sees it from a scored token
            ids = pad_sequence([torch.tensor(rows[n][:-1]) for n in batch], batch_first=True)
            hidden = model.hidden(ids.to(device))
            for states, number in zip(hidden, batch, strict=True):
                row = rows[number]
                count = min(len(requests[number][2]), len(row) - 1)
                target = torch.tensor(row[-count:], device=device)
                # logits of the scored positions only: those of a whole batch would take gigabytes
                logits = model.head(states[len(row) - 1 - count : len(row) - 1]).float()
                likely = logits.log_softmax(1)
                value = likely.gather(1, target[:, None]).sum().item()
                results[number] = value, bool((likely.argmax(1) == target).all())
        return results

    def _continued(self, context: str, options: Mapping[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        temperature = float(options.get("temperature", 0)) if options.get("do_sample") else 0.0
        sampling = GenerationSampling(int(options.get("max_gen_toks", 256)), temperature)
        room = max(1, self._opened.limit - sampling.max_new_tokens)
        # keeps the end of a long context, and leaves room for the answer
        ids = self.tok_encode(context)[-room:] or [self.eot_token_id]
        new: list[int] = []
        text = ""
        for token in self._opened.new_ids(ids, sampling):
            new.append(token)
            text = self._opened.tokenizer.decode(new)
            if any(stop in text for stop in stops):
                break
        ends = [text.find(stop) for stop in stops if stop in text]
        return text[: min(ends, default=None)]
