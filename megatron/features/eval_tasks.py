"""Evaluations on tasks while training (--eval-tasks): cloze files and tasks of lm-eval.

Rank 0 encodes the questions and sends them to all ranks. All ranks score them with the model of the run, in its layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tds import trace

from .. import mpu
from ..model.gpt2 import GPT2Model
from ..model.loss import TokenLoss
from ..model.masks import no_documents
from ..model.pipe import GPT2ModelPipe
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.errors import one_line_error
from ..ranks.objects import broadcast_from_rank_0, gather_objects
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..training.evaluation import perplexity
from ..training.feature import Periodic, Plan
from ..training.run_state import Run
from .harness import LogLikelihoods, evaluate_tasks
from .scoring import Request, Scored
from .task_sets import TaskSet, read_tasks

MIN_MICRO_BATCHES = 8  # smallest number of micro-batches for a call of the engine, so that pipeline stages are busy


def check_scorable(model: nn.Module, flag: str) -> None:
    """Raise ValueError, naming the flag, unless `model` is a GPT-2 or Llama of this project with its loss."""
    fits = isinstance(model, (GPT2Model, GPT2ModelPipe)) and isinstance(model.loss_fn, TokenLoss)
    if not fits:
        raise ValueError(
            f"{flag} needs a GPT2Model or GPT2ModelPipe of megatron.model with the default loss TokenLoss, but "
            f"this task's model is a {type(model).__name__}, perhaps with another loss; leave the flag out"
        )


class RankScorer(LogLikelihoods):
    """Scorer of requests by all ranks of a run. Each replica scores its own micro-batches of requests.

    Rank 0 calls `score` any number of times and then `end`; meanwhile the other ranks run `serve`.
    A request is a sample of --seq-length tokens, padded at its end.
    """

    def __init__(self, run: Run) -> None:
        self.tokenizer = run.tokenizer
        self.max_length = run.config.data.seq_length
        self._engine = run.engine
        self._device = run.device
        self._batch_size = run.config.train.batch_size
        self._loss: TokenLoss = run.engine.deepspeed.module.loss_fn

    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request. Raises ValueError with the first error of a rank."""
        return self._score_on_all_ranks(broadcast_from_rank_0(requests)) if requests else []

    def end(self) -> None:
        """Let the other ranks return from `serve`."""
        broadcast_from_rank_0(None)

    def serve(self) -> None:
        """Take part in each call of `score` on rank 0."""
        # The argument counts only on rank 0, whose `score` sends requests and whose `end` sends None.
        while (requests := broadcast_from_rank_0(None)) is not None:
            self._score_on_all_ranks(requests)

    def _score_on_all_ranks(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request. If a rank fails, rank 0 raises ValueError, and others return [].

        All ranks must call this with the same requests.
        """
        own_scores: dict[int, list[list[float]]] = {}
        problem = None
        batches = [requests[start : start + self._batch_size] for start in range(0, len(requests), self._batch_size)]
        try:
            own_scores = self._score_on_rank(batches)
        except Exception as error:  # a failed evaluation does not end the run, whatever the error
            problem = one_line_error(error)

        # All ranks learn of the failure of any rank, so that they leave together.
        gathered = gather_objects((own_scores, problem))
        for _, problem in gathered:
            if problem is None:
                continue
            if is_rank_0():
                raise ValueError(problem)
            return []

        # Entry 0 of dimension 1 has the losses, entry 1 the numbers of wrong tokens. Context-parallel ranks report sums
        # over their own tokens of the same texts, so the reports are added.
        sums = torch.zeros(len(batches), 2, self._batch_size, dtype=torch.float64)
        for rank_scores, _ in gathered:
            for index, values in rank_scores.items():
                # Higher numbers are the micro-batches of padding with which replicas run equally many.
                if index < len(batches):
                    sums[index] += torch.tensor(values, dtype=torch.float64)

        # From [micro-batches, 2, b] to [2, requests]; the last micro-batch may have rows without a request.
        losses, wrong_tokens = sums.transpose(0, 1).flatten(1)[:, : len(requests)].tolist()
        return [Scored(-loss, greedy=num_wrong == 0) for loss, num_wrong in zip(losses, wrong_tokens, strict=True)]

    def _score_on_rank(self, batches: Sequence[Sequence[Request]]) -> dict[int, list[list[float]]]:
        """Run this rank's micro-batches; return {number of a micro-batch: [2, b]} if this rank is to report them.

        [2, b] are the summed losses and the numbers of wrong tokens. One rank of each model-parallel group of the last
        stage reports; context-parallel ranks report sums over their own tokens.
        """
        mesh = mpu.get_mesh()
        share = mesh.share
        rounds = -(-len(batches) // share.size)  # rounded up, as every replica must run equally many micro-batches
        # With 5 batches and 2 replicas, replica 1 runs the batches 1 and 3, and then number 5, which is only padding.
        batch_numbers = range(share.rank, rounds * share.size, share.size)
        micro_batches = []
        for number in batch_numbers:
            requests = batches[number] if number < len(batches) else ()
            micro_batches.append(self.micro_batch(requests))
        # In a call, stages idle while the pipeline fills and empties, so a call has several micro-batches per stage.
        per_call = max(MIN_MICRO_BATCHES, 4 * mesh.pipe.size)
        # While this list exists, the loss adds the sums of each micro-batch to it.
        self._loss.sample_sums = []
        try:
            for start in range(0, len(micro_batches), per_call):
                self._engine.forward(micro_batches[start : start + per_call])
            samples = self._loss.sample_sums
        finally:
            self._loss.sample_sums = None
        if mesh.model.rank or not samples:  # only the last stage computes losses
            return {}
        return dict(zip(batch_numbers, torch.stack(samples).tolist(), strict=True))

    def micro_batch(self, requests: Sequence[Request]) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Return ((tokens, positions, document ids), (labels, loss mask)) as the task's `batch` does."""
        batch_size = self._batch_size
        length = self.max_length
        text = torch.zeros(batch_size, length + 1, dtype=torch.int64)
        loss_mask = torch.zeros(batch_size, length)
        # Rows after the last request stay padding without targets.
        for row, (ids, num_targets) in enumerate(requests):
            text[row, : len(ids)] = torch.tensor(ids)
            # The labels are the ids shifted by one, so 5 ids have 4 labels. With 2 targets, labels 2 and 3 count.
            num_labels = len(ids) - 1
            loss_mask[row, num_labels - num_targets : num_labels] = 1
        positions = torch.arange(length).repeat(batch_size, 1).to(self._device)
        tokens = self._shard_tokens(text[:, :-1])
        labels = self._shard_tokens(text[:, 1:])
        inputs = (tokens, positions, no_documents(self._device))
        return inputs, (labels, self._shard_tokens(loss_mask))

    def _shard_tokens(self, batch: Tensor) -> Tensor:
        """Return the tokens of this context-parallel rank of x [b, s], on the device."""
        return mpu.shard_sequence(batch, 1, mpu.context_axis()).contiguous().to(self._device)


def evaluate_on_tasks(run: Run, task_sets: Sequence[TaskSet]) -> None:
    """Evaluate on `task_sets`; print and log the results. A failed task gives a warning. All ranks must call this.

    task_sets: the tasks on rank 0; ignored on other ranks.
    """
    scorer = RankScorer(run)
    if not is_rank_0():
        scorer.serve()
        return
    try:
        for each in task_sets:
            _print_and_log(run, each, scorer)
    finally:
        scorer.end()


def _print_and_log(run: Run, tasks: TaskSet, scorer: RankScorer) -> None:
    """Evaluate on the tasks of one word of --eval-tasks, and print and log each row."""
    iteration = run.state.iteration
    try:
        if tasks.requests:
            rows = _evaluate_cloze(tasks, scorer)
        else:
            limit = run.config.train.eval_tasks_limit
            results = evaluate_tasks(scorer, tasks.tasks, limit, tasks.folders, f"--eval-tasks {tasks.word}")
            metrics = {name: _metrics_of(row) for name, row in results.items()}
            # lm-eval also lists groups of tasks, which may have no metric of their own.
            rows = {name: numbers for name, numbers in metrics.items() if numbers}
    except Exception as error:  # lm-eval and the data sets that it loads may raise errors of any class
        print_rank_0(
            f"warning: --eval-tasks {tasks.word} failed at iteration {iteration}, and training continues: "
            f"{one_line_error(error)}"
        )
        return
    for name, numbers in rows.items():
        if run.metrics.has_row(f"eval/{name}", iteration):  # a tag or a group of lm-eval has only rows of its tasks
            continue
        line = " | ".join(f"{key.replace('lm_loss', 'loss')} {value:.4g}" for key, value in numbers.items())
        print_rank_0(f"iteration {iteration:7d} | eval/{name} {line}")
        run.metrics.write({"split": f"eval/{name}", "iteration": iteration, **numbers})


def _evaluate_cloze(tasks: TaskSet, scorer: RankScorer) -> dict[str, dict[str, float]]:
    """Return the metrics of a cloze file under its name; a question counts as right if greedy decoding answers it."""
    scores = scorer.score(tasks.requests)
    num_targets = sum(request.num_targets for request in tasks.requests)
    loss = -sum(score.log_probability for score in scores) / num_targets
    num_right = sum(score.greedy for score in scores)
    numbers = {
        "accuracy": num_right / len(scores),
        "lm_loss": loss,
        "ppl": perplexity(loss),
        "questions": len(scores),
    }
    return {tasks.name: numbers}


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row of lm-eval, whose keys are `METRIC,FILTER`, without standard errors.

    They keep lm-eval's names, except that `acc` becomes `accuracy`.
    """
    metrics = {}
    for key, value in row.items():
        metric, _, filter_name = key.partition(",")
        # lm-eval also has keys without a filter, such as `alias`, and values that are texts.
        is_number = filter_name and isinstance(value, (int, float))
        if not is_number or metric.endswith("_stderr"):
            continue
        if metric == "acc":
            metric = "accuracy"
        if filter_name != "none":
            metric = f"{metric}_{filter_name}"
        metrics[metric] = float(value)
    return metrics


class TaskEvaluations(Periodic):
    """Feature that evaluates on --eval-tasks every --eval-tasks-interval iterations, and after the last iteration."""

    def prepare(self, plan: Plan) -> None:
        """Read the tasks on rank 0."""
        assert plan.tokenizer is not None
        self._task_sets = read_tasks(plan.config, plan.tokenizer) if is_rank_0() else []

    def engine(self, engine: Any, plan: Plan) -> None:
        """Check that the model can score texts."""
        with raise_on_all_ranks():
            check_scorable(engine.module, "--eval-tasks")

    def start(self, run: Run) -> None:
        """Read the interval, by default that of saves."""
        self._run = run
        interval = run.config.train.eval_tasks_interval
        self._interval = run.config.checkpoint.save_interval if interval is None else interval

    def _write(self) -> None:
        with trace.span("evaluation"):
            evaluate_on_tasks(self._run, self._task_sets)

    def end(self) -> None:
        """Evaluate after the last iteration on the tasks whose results metrics.jsonl does not hold yet."""
        run = self._run
        missing = []
        for each in self._task_sets:
            # A cloze file has one name. Of several lm-eval tasks, the first stands for all.
            name = each.name or each.tasks[0]
            if not run.metrics.has_row(f"eval/{name}", run.state.iteration):
                missing.append(each)
        evaluate_on_tasks(run, missing)
