"""Evaluates checkpoints on tasks of lm-evaluation-harness. Needs the package lm-eval, an extra.

[Note: harness] A task requests log-probabilities of texts after contexts, or continuations. The
model is loaded as by `perdure generate`, so adapters are merged as they were trained, over nf4 too,
and every family of Perdure can be evaluated. Texts are tokenized as in the harness's own class for
transformers models, so that scores are comparable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trainer.data.prepare.template import special_variables
from trainer.tools.eval_lines import LineSubject
from trainer.tools.generate import GenerateError, OpenedModel, Sampling, open_model

ROWS = 8
"""Texts per forward pass."""
RESAMPLED = 1000
"""Number of bootstrap draws for the standard error of a metric without a formula for it."""
USUAL_NEW_TOKENS = 256
"""Largest number of tokens of a continuation, if the task sets no limit."""


def find_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return a task manager that has the named tasks.

    Args:
        names: tasks, or groups of tasks.
        include_path: directory of additional tasks; if it has all of `names`, the harness's own
            tasks are not indexed.

    Raises:
        GenerateError: a name is unknown.
    """
    given = {"include_path": str(include_path)} if include_path else {}
    manager = TaskManager(**given, include_defaults=False) if include_path else TaskManager()
    if include_path and set(names) - set(manager.all_tasks):
        manager = TaskManager(**given)
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise GenerateError(
            f"--tasks: lm-eval knows no {', '.join(unknown)}; `lm-eval ls tasks` lists those that "
            "it has, --include-path DIR adds tasks of your own"
        )
    return manager


def results(
    manager: TaskManager, device: str, family: str | None = None
) -> Callable[[Path, Sequence[LineSubject]], Iterator[dict[str, Any]]]:
    """Return the argument `make` of `add_lines` for tasks. It adds `results`: task → metric →
    value, under the harness's names."""

    def make(path: Path, wanted: Sequence[LineSubject]) -> Iterator[dict[str, Any]]:
        model = _HarnessModel(open_model(path, device=device, family=family))
        for item in wanted:
            try:
                scores = simple_evaluate(
                    model=model,
                    tasks=[item["task"]],
                    task_manager=manager,
                    limit=item["limit"],
                    log_samples=False,
                    bootstrap_iters=RESAMPLED,
                )["results"]
            except (OSError, ValueError, ConnectionError) as error:
                raise GenerateError(f"--tasks {item['task']}: {error}") from error
            yield {"results": {name: _numbers(values) for name, values in scores.items()}}

    return make


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class _HarnessModel(LM):
    """An opened model with the harness's interface."""

    def __init__(self, opened: OpenedModel) -> None:
        super().__init__()
        self._opened = opened
        begin = special_variables(opened.directory).get("bos_token")
        begin_id = opened.tokenizer.token_to_id(begin) if begin else None
        known = [*([begin_id] if begin_id is not None else []), *opened.eos_ids]
        if not known:
            raise GenerateError(
                f"{opened.directory}: has no token to begin a text with; set bos_token in "
                "tokenizer_config.json, or eos_token_id in config.json"
            )
        self._prefix = known[0]

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation after its context, whether its tokens are the
        likeliest) of each request."""
        return self._log_probs([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Log-probability of each whole text, with as much context as the model takes."""
        sums = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self._encode(text), self._prefix, self._opened.limit, context_len=1
            )
            pairs = [make_disjoint_window(window) for window in windows]
            sums.append(sum(value for value, _ in self._log_probs(pairs)))
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continue each context up to the first of its request's stop texts."""
        return [self._continued(*request.args) for request in requests]

    def _encode(self, text: str) -> list[int]:
        return self._opened.tokenizer.encode(text, add_special_tokens=False).ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize both texts. Spaces between them go to the continuation, because tokens begin
        with spaces."""
        if not context:
            return [self._prefix], self._encode(continuation)
        bare = context.rstrip()
        before = self._encode(bare)
        return before, self._encode(context + continuation)[len(before) :]

    @torch.inference_mode()
    def _log_probs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return (log-probability of the second tokens after the first, whether they are the
        likeliest) of each pair. A text longer than the context loses its beginning."""
        model, limit = self._opened.model, self._opened.limit
        device = next(model.parameters()).device
        # one token more than the limit: the last token is only predicted
        rows = [(before + after)[-limit - 1 :] for before, after in pairs]
        results = [(0.0, True)] * len(rows)
        # rows of similar length share a batch, which needs less padding
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        for first in range(0, len(order), ROWS):
            batch = order[first : first + ROWS]
            # padding on the right, where causal attention never sees it from a scored token
            ids = torch.zeros(len(batch), max(len(rows[n]) for n in batch) - 1, dtype=torch.int64)
            for row, number in zip(ids, batch, strict=True):
                row[: len(rows[number]) - 1] = torch.tensor(rows[number][:-1])
            hidden = model.hidden(ids.to(device))
            for states, number in zip(hidden, batch, strict=True):
                row = rows[number]
                count = min(len(pairs[number][1]), len(row) - 1)
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
        sampling = Sampling(int(options.get("max_gen_toks", USUAL_NEW_TOKENS)), temperature)
        room = max(1, self._opened.limit - sampling.max_new_tokens)
        # keeps the end of a long context, and leaves room for the answer
        ids = self._encode(context)[-room:] or [self._prefix]
        new: list[int] = []
        text = ""
        for token in self._opened.new_ids(ids, sampling):
            new.append(token)
            text = self._opened.tokenizer.decode(new)
            if any(stop in text for stop in stops):
                break
        return text[: min((text.find(stop) for stop in stops if stop in text), default=None)]
