"""Reading of the flag --eval-tasks: cloze files and tasks of lm-eval."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..config import Config
from ..config.fields import ConfigError
from ..tokenizer import Tokenizer
from .harness import local_tasks, task_manager
from .scoring import Request, read_cloze


class TaskSet(NamedTuple):
    """The tasks of one word of --eval-tasks.

    name: name of a cloze file's results. requests: questions of a cloze file. tasks: names of lm-eval tasks.
    folders: folders with custom tasks.
    """

    word: str
    name: str = ""
    requests: Sequence[Request] = ()
    tasks: Sequence[str] = ()
    folders: Sequence[str] = ()


def read_tasks(config: Config, tokenizer: Tokenizer) -> list[TaskSet]:
    """Return the tasks of --eval-tasks. Raises ValueError for invalid words and files, and without lm-eval."""
    task_sets = [_read_word(word, config, tokenizer) for word in config.train.eval_tasks or ()]
    names = set()
    for each in task_sets:
        # The set of a cloze file has a name and no tasks, any other has the names of its lm-eval tasks.
        for name in (each.name, *each.tasks):
            if name in names:
                raise ValueError(
                    f"--eval-tasks has two tasks {name}; name a cloze file with NAME=FILE, or leave one out"
                )
            if name:  # all sets of lm-eval tasks have the name ""
                names.add(name)
    return task_sets


def split_word(word: str) -> tuple[str, Path]:
    """Return the name before the `=` of a word, "" if it has none, and the file or lm-eval task after it.

    Raises ConfigError for a file that does not exist.
    """
    name = ""
    file = word
    if "=" in word and not Path(word).exists():  # a file in a folder such as lang=en has no name
        name, file = word.split("=", 1)
    path = Path(file)
    if path.suffix == ".yml":
        raise ConfigError(f"--eval-tasks {word}: lm-eval reads only files that end in .yaml: rename {file}")
    if path.suffix in (".jsonl", ".yaml") and not path.is_file():
        raise ConfigError(f"--eval-tasks {word}: there is no file {file}")
    return name, path


def _read_word(word: str, config: Config, tokenizer: Tokenizer) -> TaskSet:
    """Return the tasks of one word: FILE, NAME=FILE or an lm-eval task. Raises ValueError for an invalid one."""
    flag = f"--eval-tasks {word}"
    name, path = split_word(word)
    if path.suffix == ".jsonl":
        requests = read_cloze(str(path), tokenizer, config.data.seq_length)
        return TaskSet(word, name or path.stem, requests[: config.train.eval_tasks_limit])
    tasks = [word]
    folders = []
    if path.exists():
        if name:
            raise ValueError(f"{flag}: only a cloze file (.jsonl) takes a name such as {name}=: leave it out")
        tasks = local_tasks(path)
        folders = [str(path if path.is_dir() else path.parent)]
    task_manager(tasks, folders, flag)  # only for its errors: it refuses unknown tasks before the run begins
    return TaskSet(word, tasks=tasks, folders=folders)
