"""Checks of the input files of a run.

All missing files are reported at once, before the ranks connect. The content of corpora is checked afterwards.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..atomic import process_name
from ..checkpointing.lookup import is_own_folder, latest_name
from ..config import Config
from ..config.fields import ConfigError
from ..config.messages import format_problems
from ..data.corpus_paths import is_triple, prefixes_of, whole_of
from ..data.damage import find_problems
from ..data.fingerprints import content_fingerprint, corpus_fingerprint, made_with
from ..data.indexed_dataset import DatasetError
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.rank_0 import print_notes
from ..storage import RemotePath, StorageError, is_url, to_path
from ..tokenizer import Tokenizer
from ..tokenizer.base import TokenizerError, eod_mismatch
from ..tokenizer.load import find_vocab_file
from .remote_datasets import stage_begins
from .run_folder import save_dir_of
from .task import Task

if TYPE_CHECKING:
    from ..checkpointing.resume import Start

# Blocks of a file, of 64 MiB by default, that are compared with the checksums of its sidecar at the start of a run.
BLOCKS_AT_START = 4


class MissingInputs(ConfigError):
    """Error for files and folders that the settings require but that do not exist."""


def require_inputs(task: Task, config: Config) -> None:
    """Raise MissingInputs with a line for each tokenizer, corpus, checkpoint or JSON file that does not exist.

    Only rank 0 checks the corpora, because it always reads data. Other machines may lack the corpora if their ranks
    read no data.
    """
    problems = []
    if config.data.vocab_file is None:
        problems.append("no tokenizer: give --vocab-file; tools/train_tokenizer.py makes one")
    else:
        try:
            find_vocab_file(config.data.vocab_file)
        except TokenizerError as error:
            problems.append(str(error))
    if os.environ.get("RANK", "0") == "0":
        problems += _corpus_problems(task, config)
        problems += _save_problems(config)
    ds_file = config.train.deepspeed_config
    problems += load_problems(config)
    # `resolve` in config/ds_config.py reports a missing file of --deepspeed-config. It is named here only beside other
    # problems, so that the user sees all of them at once.
    if problems and ds_file is not None and not Path(ds_file).exists():
        problems.append(f"there is no file {ds_file}, which --deepspeed-config names")
    if problems:
        raise MissingInputs(format_problems(problems, "inputs are missing or cannot be read"))


def reads_corpora(task: Task) -> bool:
    """Return whether a task reads .bin/.idx pairs, as the tasks of this project do; others may read anything."""
    return type(task).datasets.__module__.startswith("megatron.tasks.")


def load_problems(config: Config) -> Iterator[str]:
    """Yield a message if --load names no folder, unless the run does not need it."""
    load = config.checkpoint.load
    if load is None:
        return
    run_dir = config.log.run_dir
    save_dir = save_dir_of(config, Path(run_dir)) if run_dir else config.checkpoint.save
    try:
        # Scripts for Megatron-LM pass the same folder to --save and --load. At the first start, it does not exist.
        if is_own_folder(load, config, save_dir) or to_path(load).exists():
            return
        # A run that resumes from its own checkpoint does not use --load. Without --run-dir and --save, the run gets a
        # new directory under runs/.
        has_begun = save_dir is not None and latest_name(to_path(save_dir))
        if not has_begun:
            yield f"--load {load} holds no checkpoint: there is no such folder"
    except StorageError as error:
        yield f"--load {load}: {error}"


def _save_problems(config: Config) -> Iterator[str]:
    """Yield a message if --save names a place in object storage where this process cannot write."""
    save = config.checkpoint.save
    if save is None or not is_url(save):
        return
    probe = RemotePath(save) / f"write-test-{process_name()}"
    try:
        probe.write_bytes(b"a run tests whether it can save here\n")
        probe.unlink()
    except OSError as error:
        yield f"--save {save}: {error}"


def _corpus_problems(task: Task, config: Config) -> Iterator[str]:
    """Yield a message for each missing .bin/.idx pair, but nothing for custom tasks, which may read other formats."""
    if not reads_corpora(task):
        return
    try:
        prefixes = prefixes_of(config.data.paths)
    except (ConfigError, DatasetError) as error:
        yield str(error)
        return
    for prefix in prefixes:
        files = [f"{prefix}.idx", f"{prefix}.bin"]
        try:
            absent = [file for file in files if not to_path(file).is_file()]
            # PREFIX may also name the three pairs PREFIX_context, PREFIX_target and PREFIX_target_offset.
            is_masked_corpus = bool(absent) and is_triple(prefix)
            whole = whole_of(prefix)  # the corpus if PREFIX names only one of its pairs, else None
        except StorageError as error:
            yield f"--data-path {prefix}: {error}"
            continue
        if absent and not is_masked_corpus:
            yield (
                f"there is no {' and no '.join(absent)}; tools/preprocess_data.py writes the .bin and .idx of a corpus"
                f"{_suggest_prefix(prefix)}"
            )
        if whole:
            yield f"{prefix} is only a part of the corpus {whole}; name {whole} instead"


def _suggest_prefix(prefix: str) -> str:
    """Return a "did you mean" clause if `prefix` begins the name of exactly one `.idx` file, else an empty string.

    For example, the clause for `data/zh` suggests `data/zh_text_document`.
    """
    path = to_path(prefix)
    try:
        if not path.name or not path.parent.is_dir():
            return ""
        # `prefix` itself is no suggestion: its .idx may exist without its .bin.
        matches = sorted(path.parent.glob(f"{path.name}?*.idx"))
    except StorageError:  # the credentials may allow reading, but not listing
        return ""
    return f"; did you mean {matches[0].with_suffix('')}?" if len(matches) == 1 else ""


def corpora_of_run(config: Config) -> list[str]:
    """Return the prefixes of the run's `.bin/.idx` pairs, or [] if no flag names corpora."""
    return prefixes_of(config.data.paths) if config.data.names_corpora else []


def local_corpora(config: Config) -> list[str]:
    """Return those prefixes of `corpora_of_run` whose files are on this machine, not in object storage."""
    return [prefix for prefix in corpora_of_run(config) if not is_url(prefix)]


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a corpus's metadata shows another tokenizer, or another or no end-of-document token.

    Print a note if flags separate documents at this token, but a corpus without metadata seems to lack it.
    """
    for path in corpora_of_run(config):
        metadata = made_with(path)
        if metadata is None:
            continue
        if metadata.get("fingerprint") != tokenizer.fingerprint:
            raise ValueError(
                f"{path}.bin was made with another tokenizer ({metadata.get('tokenizer')}, SHA-256 "
                f"{str(metadata.get('fingerprint'))[:12]}) "
                f"than {config.data.vocab_file} ({tokenizer.name}, {tokenizer.fingerprint[:12]})"
            )
        if mismatch := eod_mismatch(metadata, tokenizer, config.data.vocab_file):
            raise ValueError(f"{path}.bin {mismatch}: pass the tokenizer of the corpus, or preprocess the text again")
        if note := note_on_objective(metadata, config):
            print_notes([f"{path} {note}"])
    data = config.data
    if data.reset_attention_mask or data.reset_position_ids:
        from ..data.document_ends import notes_on_ends

        print_notes(notes_on_ends(corpora_of_run(config), tokenizer.eod, config))


def note_on_objective(metadata: Mapping[str, Any], config: Config) -> str | None:
    """Return a note on a corpus of conversations, whose loss mask another objective does not read, else None."""
    if metadata.get("objective") != "sft" or config.objective == "sft":
        return None
    return (
        f"contains conversations, but --objective {config.objective} also learns prompts and templates; pass "
        "--objective sft to learn answers only"
    )


def check_corpora(config: Config) -> None:
    """Raise ValueError if a bounded look at the corpora on this machine finds damaged blocks or holes."""
    blocks = blocks_at_start(config)
    for prefix in local_corpora(config):
        for problem in find_problems(prefix, blocks):
            raise ValueError(problem)  # the first problem is enough


def blocks_at_start(config: Config) -> int:
    """Return how many blocks of each local file of a corpus are compared with their checksums before the run begins.

    `megatron/features/corpus_checks.py` compares the others while the run trains.
    """
    # At least one block of each corpus, and no more in all than those of four corpora if there are many: 4 for each of
    # up to 4 corpora, 16 // 8 = 2 for each of 8.
    share = 4 * BLOCKS_AT_START // max(len(local_corpora(config)), 1)
    return min(BLOCKS_AT_START, max(1, share))


def check_stages(dataset: Any, config: Config, start: "Start") -> None:
    """Raise RunError on every rank if a data stage begins after the last sample of the run. All ranks must call this.

    start: the checkpoint from which the run resumes, which may have consumed batches of another size.
    """
    from ..checkpointing.resume import resumed_position

    begins = list(filter(None, stage_begins(dataset)))  # the stage at sample 0 is never late
    if not begins:
        return
    iteration, consumed = resumed_position(start)
    with raise_on_all_ranks():
        ranks = dist.get_world_size()
        # With --train-samples, the number of iterations follows from the batch sizes that lie ahead.
        train = config.with_derived_iters(ranks, iteration, consumed).train
        remaining_iterations = max(train.train_iters - iteration, 0)
        total = config.batch_schedule(ranks).advance(consumed, remaining_iterations)
        for begin in begins:
            if begin >= total:
                flag = "--train-samples" if train.train_samples else "--train-iters"
                raise ValueError(
                    f"--data-stages: the stage at sample {begin} begins after the last of the {total} samples of "
                    f"{flag} {train.train_samples or train.train_iters}; raise {flag} or leave the stage out"
                )


def corpus_fingerprints(config: Config) -> dict[str, str]:
    """Return a fingerprint of each corpus, so that ranks can detect nodes with different files.

    All nodes see the same object in object storage, so few requests are enough there.
    """
    fingerprints = {}
    for path in corpora_of_run(config):
        fingerprint = corpus_fingerprint if is_url(path) else content_fingerprint
        fingerprints[f"the fingerprint of {path}"] = fingerprint(path)
    return fingerprints
