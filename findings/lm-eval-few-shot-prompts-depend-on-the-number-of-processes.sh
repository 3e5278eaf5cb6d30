#!/usr/bin/env bash
# Surprise: lm-eval draws the few-shot examples of a document from a generator that advances from document to document, and each
#   process of a data-parallel evaluation starts the same generator for its own share of the documents. So the number of
#   processes decides which examples a document gets: with 4 processes instead of 1, 399 of 400 prompts are others, and the accuracy
#   of a model that always gives the same answer to the same prompt changes. Documents that are neighbours on different processes
#   also share one set of examples: 400 documents have 400 different sets with one process and 100 with four. The seeds and
#   all settings are equal, and nothing is reported. Prompts without examples are the same.
# Versions: lm-eval 0.4.13 (the newest release), datasets 5.2.0, torch 2.13.0. Date: 2026-11-29.
# Belief: with fixed seeds, the prompt of a document, and so the score, does not depend on the number of processes.
# Source: lm-eval's README (data-parallel evaluation: each GPU loads a separate full copy of the model) and the docstring of
#   simple_evaluate (fewshot_random_seed: random seed for the fewshot sampler random generator).
# Cause: Task.build_all_requests in lm_eval/api/task.py gives each rank every n-th document, and ContextSampler.sample in
#   lm_eval/api/samplers.py takes the next numbers of one generator per process. A comment there asks for an offset by rank. An
#   issue of 2024 (1719) reports scores that differ with the number of GPUs.
# Depends on: nothing of the machine. The program starts up to four processes on one machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 lm-eval==0.4.13 datasets==5.2.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import json
import logging
import os
import sys

os.environ["HF_HOME"] = os.path.join(sys.path[0], "cache")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

logging.disable(logging.WARNING)
import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

DOCUMENTS = 400
TASK = """
task: numbers
dataset_path: json
dataset_kwargs:
  data_files: {train: train.jsonl, test: test.jsonl}
training_split: train
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{number}} is"
doc_to_target: label
doc_to_choice: ["low", "high"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


class Nearest(LM):
    """A model without randomness: it repeats the label of the example whose number is nearest to the question."""

    def __init__(self, rank, ranks):
        super().__init__()
        self._rank, self._world_size = rank, ranks

    def loglikelihood(self, requests):
        return [(0.0 if answer.strip() == self.answer(prompt) else -1.0, False)
                for prompt, answer in (request.args for request in requests)]

    @staticmethod
    def answer(prompt):
        *examples, question = prompt.split("\n\n")
        number = int(question.split()[0])
        pairs = [(abs(int(text.split()[0]) - number), text.split()[2]) for text in examples]
        return min(pairs)[1] if pairs else "low"

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError

    def all_gather(self, tensor):
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def gather_object(self, thing, dst=0):
        if self.world_size == 1:
            return [thing]
        parts = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(thing, parts, dst=dst)
        return parts

    def barrier(self):
        if self.world_size > 1:
            dist.barrier()


def evaluate(rank, ranks, answers):
    """Evaluate the task on this rank; rank 0 reports accuracy, standard error and the prompt of each document."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.path[0]}/store{ranks}", rank=rank, world_size=ranks)
    for shots in (0, 3):
        results = lm_eval.simple_evaluate(
            model=Nearest(rank, ranks), tasks=["numbers"], num_fewshot=shots, log_samples=True,
            task_manager=TaskManager(include_path=sys.path[0], include_defaults=False),
        )
        if rank == 0:
            scores = results["results"]["numbers"]
            prompts = {sample["doc"]["number"]: sample["arguments"][0][0] for sample in results["samples"]["numbers"]}
            answers.put((shots, scores["acc,none"], scores["acc_stderr,none"], prompts))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    print("lm-eval", version("lm-eval"), "datasets", version("datasets"), "torch", torch.__version__)
    for name, first in (("train", 0), ("test", 1)):
        with open(name + ".jsonl", "w") as file:
            for number in range(first, 2 * DOCUMENTS, 2):
                file.write(json.dumps({"number": number, "label": int(number % 400 >= 200)}) + "\n")
    with open("numbers.yaml", "w") as file:
        file.write(TASK)
    import datasets

    datasets.load_dataset("json", data_files={"train": "train.jsonl", "test": "test.jsonl"})
    seen = {}
    for ranks in (1, 2, 4):
        answers = mp.get_context("fork").SimpleQueue()
        context = mp.start_processes(evaluate, (ranks, answers), nprocs=ranks, join=False, start_method="fork")
        for _ in range(2):
            shots, accuracy, error, prompts = answers.get()
            assert len(prompts) == DOCUMENTS
            other = sum(prompts[number] != seen[shots, 1][1][number] for number in prompts) if ranks > 1 else 0
            sets = len({prompt.rsplit("\n\n", 1)[0] for prompt in prompts.values()}) if shots else 1
            seen[shots, ranks] = (accuracy, prompts, other, sets)
            print(f"{ranks} process(es), {shots} examples: accuracy {accuracy:.4f} (standard error {error:.4f}), "
                  f"{other} of {DOCUMENTS} prompts are not those of one process, {sets} different sets of examples")
        while not context.join():
            pass
    print("belief: the same prompts and one accuracy; seen:", [round(seen[3, ranks][0], 4) for ranks in (1, 2, 4)])
    holds = all(seen[0, ranks][0] == seen[0, 1][0] and seen[0, ranks][2] == 0 for ranks in (2, 4))
    holds = holds and all(seen[3, ranks][2] > 390 and seen[3, ranks][3] == DOCUMENTS // ranks for ranks in (2, 4))
    holds = holds and seen[3, 1][3] == DOCUMENTS and len({seen[3, ranks][0] for ranks in (1, 2, 4)}) == 3
    print("HOLDS: another number of processes gives other few-shot prompts" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py 2> messages || { cat messages; exit 1; }
