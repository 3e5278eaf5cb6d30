"""Schedules of the global batch size, compared with a simulation that counts samples step by step."""

import argparse
import itertools
import random
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpointing import resume
from megatron.config import Config
from megatron.config.batches import BatchSchedule, Consumed, parse_batch_schedule, parse_entries, schedule_in_samples
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.config.sections import TrainConfig
from megatron.data.sampler import ConsecutiveSampler
from megatron.optim import lr_at
from megatron.optim.resumed_lr import describe, resolve_lr_schedule
from megatron_compat.script import numbers_of_samples
from megatron_tools.plan import plan
from megatron_tools.report.facts import layout_label
from megatron_tools.report.runs import RunData

SEQ = "--seq-length 1000 --batch-size 2"


def config_of(line: str, ranks: int = 1, notes: list[str] | None = None) -> Config:
    return parse(shlex.split(line), None, ranks, (notes if notes is not None else []).append)


def steps(starts: tuple[int, ...], sizes: tuple[int, ...], first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first sample, number of samples) of each iteration, by a search through the whole schedule."""
    while True:
        size = [size for start, size in zip(starts, sizes, strict=True) if start <= first][-1]
        yield first, size
        first += size


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_those_of_counting(seed: int) -> None:
    draw = random.Random(seed)
    starts = (0, *sorted(draw.sample(range(1, 100), draw.randrange(9))))  # an iteration may pass several starts
    schedule = BatchSchedule(starts, tuple(4 * draw.randrange(1, 9) for _ in starts))
    begin = draw.randrange(50)
    expected = list(itertools.islice(steps(*schedule, begin), 60))
    for number, (first, size) in enumerate(expected):
        assert (schedule.advance(begin, number), schedule.size_at(first)) == (first, size)
        assert schedule.iterations_between(begin, first) == number
        assert schedule.iterations_between(begin, first + size - 1) == number


@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (1, 2), (2, 2), (4, 1)])
def test_a_step_has_the_same_samples_in_every_layout(ranks: int, batch: int) -> None:
    schedule = BatchSchedule((0, 10, 40), (4, 12, 8))

    def gas(first: int) -> int:
        return schedule.size_at(first) // (batch * ranks)

    for begin in (0, 8, 36):
        readers = [iter(ConsecutiveSampler(batch, gas, rank, ranks, begin)) for rank in range(ranks)]
        for first, size in itertools.islice(steps((0, 10, 40), (4, 12, 8), begin), 8):
            found = [n for reader in readers for _ in range(size // batch // ranks) for n in next(reader)]
            assert found == list(range(first, first + size))


def test_a_skipped_step_has_the_size_of_the_schedule() -> None:
    schedule = BatchSchedule((0, 8), (4, 8))
    sampler = ConsecutiveSampler(4, lambda n: schedule.size_at(n) // 4, 0, 1, 0, lambda n: n in (4, 16))
    assert [each[0] for each in itertools.islice(sampler, 5)] == [0, 8, 12, 24, 28]


@pytest.mark.parametrize(
    ("text", "starts", "sizes"),
    [
        ("0:8", (0,), (8,)),
        ("0:8 20K:16", (0, 20), (8, 16)),
        ("0:8,20500:16 1.5m_tokens:32 3K_samples:64", (0, 20, 1500, 3000), (8, 16, 32, 64)),
        ("0:8 1e6:1K", (0, 1000), (8, 1000)),
    ],
)
def test_starts_are_tokens_or_samples(text: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    config = config_of(f"{SEQ} --batch-size-schedule '{text}'", 4)
    assert config.batch_schedule(4) == BatchSchedule(starts, sizes)
    assert config.train_batch_size(4) == max(sizes)
    assert config_of(f"{SEQ} --step-batch-size-schedule '{text}'", 4) == config


@pytest.mark.parametrize(
    ("line", "ranks", "words"),
    [
        ("--batch-size-schedule '0:8 5:x'", 1, "--batch-size-schedule 0:8 5:x must be a list of START:SIZE"),
        ("--batch-size-schedule '5:8'", 1, "with starts from 0 on"),
        ("--batch-size-schedule '0:0'", 1, "must be a list of START:SIZE"),
        ("--batch-size-schedule ''", 1, "must be a list of START:SIZE"),
        ("--batch-size-schedule '0:8 2K:16 2500:32'", 1, "they are 0, 2, 2"),
        ("--batch-size-schedule '0:8 9K:12'", 4, "the size 12 is not a multiple of 8 = --batch-size 2 x 4 replicas"),
        ("--batch-size-schedule '0:8 9K:16' --family t5", 1, "count samples instead"),
        ("--train-samples 7 --batch-size-schedule '0:8'", 1, "less than one global batch of 8 samples"),
        ("--lr-decay-iters 5 --lr-decay-samples 5", 1, "leave one of them out"),
        ("--train-samples 80 --lr-decay-style wsd --lr-wsd-decay-iters 2", 1, "give --lr-wsd-decay-samples instead"),
        ("--lr-decay-style wsd --lr-wsd-decay-samples 2", 1, "give --lr-wsd-decay-iters instead"),
        ("--train-samples 80 --lr-decay-style wsd --lr-wsd-decay-samples 81", 1, "the 80 of --lr-decay-samples"),
        ("--rampup-batch-size 8 3 100 --global-batch-size 16", 1, "must be a multiple of the increment"),
        ("--rampup-batch-size 8 4", 1, "give three whole numbers"),
        ("--train-tokens 999", 1, "less than one sample of --seq-length 1000 tokens"),
    ],
)
def test_what_cannot_be_is_refused(line: str, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(f"{SEQ} {line}", ranks)
    assert words in str(error.value)


def test_what_is_set_otherwise_is_told() -> None:
    notes: list[str] = []
    config = config_of(f"{SEQ} --gas 3 --train-iters 9 --batch-size-schedule '0:8' --train-samples 80", 2, notes)
    assert (config.train.gas, config.train.train_iters) == (2, 10)
    assert notes == [
        "--gas 3 has no effect: --batch-size-schedule 0:8 is given",
        "--train-iters 9 has no effect: --train-samples 80 is given",
    ]


@pytest.mark.parametrize(("start", "increment", "samples", "size"), [(8, 8, 100, 64), (16, 16, 7, 64), (4, 4, 0, 8)])
def test_a_rampup_has_megatrons_sizes(start: int, increment: int, samples: int, size: int) -> None:
    config = config_of(f"{SEQ} --rampup-batch-size {start} {increment} {samples} --global-batch-size {size}", 2)
    batches, each = config.batch_schedule(2), samples / ((size - start) // increment)
    for consumed in range(1, samples + 50):
        grown = size if consumed > samples else start + int(consumed / each) * increment
        assert batches.size_at(consumed) == grown, consumed
    assert config.train_batch_size(2) == size


def test_numbers_of_a_rampup_may_have_underscores() -> None:
    line = f"{SEQ} --global-batch-size 64 --rampup-batch-size 8 8"
    assert config_of(f"{line} 1_000", 2) == config_of(f"{line} 1000", 2)


def test_a_run_ends_with_its_samples() -> None:
    line = f"{SEQ} --batch-size-schedule '0:8 20_samples:16'"
    config = config_of(f"{line} --train-samples 100", 2)
    assert config.train.train_iters == 7  # 8, 16, 24, 40, 56, 72, 88; the next iteration would end at 104
    assert config_of(f"{line} --train-tokens 100000", 2) == config
    assert numbers_of_samples(config, 2)[0] == 88
    # A run that has done 3 iterations of 16 samples ends at the same sample or before it.
    assert config.with_derived_iters(2, 3, 48).train.train_iters == 6
    constant = config_of(f"{SEQ} --gas 4 --train-samples 100", 2)
    assert constant.train == TrainConfig(batch_size=2, gas=4, train_iters=6, train_samples=100)


def rates(config: Config, ranks: int = 2) -> list[tuple[int, float]]:
    """Return (last sample + 1, learning rate) of each iteration of a run."""
    batches, found = config.batch_schedule(ranks), []
    for number in range(config.train.train_iters):
        done, following = (batches.advance(0, number + more) for more in (1, 2))
        found.append((done, lr_at(number, config, (done, following))))
    return found


@pytest.mark.parametrize("more", ["", "--lr-decay-samples 1000", "--lr-decay-tokens 1000000"])
def test_the_learning_rate_follows_samples(more: str) -> None:
    line = (
        f"{SEQ} --batch-size-schedule '0:8 120_samples:32 300_samples:64' --lr 1 --min-lr 0.1 --lr-decay-style linear"
    )
    config = config_of(f"{line} --train-samples 1000 --lr-warmup-samples 100 {more}", 2)
    *before, last = rates(config)
    assert config_of(f"{line} --train-samples 1000 --lr-warmup-tokens 100000 {more}", 2) == config
    assert last[1] == pytest.approx(0.1)
    for done, rate in before:
        expected = done / 100 if done <= 100 else 0.1 + 0.9 * (1000 - done) / 900
        assert rate == pytest.approx(min(expected, 1.0)), done


@pytest.mark.parametrize("end", ["--train-iters 33", "--train-samples 1000", "--train-samples 300"])
def test_wsd_ends_with_the_run(end: str) -> None:
    line = f"{SEQ} --batch-size-schedule '0:8 120_samples:32 300_samples:64' --lr 1 --min-lr 0.1 --lr-decay-style wsd"
    found = [rate for _, rate in rates(config_of(f"{line} {end}", 2))]
    assert found[-1] == pytest.approx(0.1) and found[-2] > 0.1


def test_iterations_stay_the_unit_of_the_learning_rate() -> None:
    line = f"{SEQ} --lr 1 --train-iters 40 --warmup 0.2"
    with_sizes = config_of(f"{line} --batch-size-schedule '0:8 120_samples:32'", 2)
    assert [lr_at(n, with_sizes) for n in range(40)] == [lr_at(n, config_of(line)) for n in range(40)]
    with pytest.raises(ValueError, match="follows samples"):
        lr_at(0, config_of(f"{line} --lr-decay-samples 9"))


def test_a_checkpoints_learning_rate_stays_in_samples() -> None:
    line = f"{SEQ} --batch-size-schedule '0:8 120_samples:32' --lr 1 --lr-decay-style wsd"
    saved, longer = (config_of(f"{line} --train-samples {samples}", 2) for samples in (400, 800))
    kept, note = resolve_lr_schedule(longer, saved)
    assert note and describe(saved) in note and "constant until sample 360, minus-sqrt to 0 at sample 400" in note
    assert rates(kept)[: saved.train.train_iters] == rates(saved)
    assert resolve_lr_schedule(kept, saved) == (kept, None)
    by_iterations = config_of(f"{line} --train-iters 30 --lr-wsd-decay-iters 4", 2)
    kept, _ = resolve_lr_schedule(longer, by_iterations)
    assert kept.lr_decay_samples is None
    assert [lr_at(n, kept) for n in range(30)] == [lr_at(n, by_iterations) for n in range(30)]


def test_a_resumed_run_says_which_size_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume.dist, "get_world_size", lambda: 2)
    saved, same, later = (
        config_of(f"{SEQ} {flags}", 2) for flags in ("", "--batch-size 1", "--batch-size-schedule '0:8 120_samples:32'")
    )
    assert resume._batch_schedule_note(saved, same, 120) is None
    words = "--batch-size-schedule is 0:8 120_samples:32, but was not given in the checkpoint; only the position in "
    found = resume._batch_schedule_note(saved, later, 120)
    assert found == f"{words}samples counts: from sample 120 on, an iteration has 32 samples"
    assert "an iteration has 8 samples" in (resume._batch_schedule_note(saved, later, 119) or "")
    without_past = config_of(f"{SEQ} --batch-size-schedule 0:32", 2)
    assert resume._batch_schedule_note(later, without_past, 120) is None
    assert resume._batch_schedule_note(later, without_past, 119) is not None


def test_starts_in_tokens_count_the_consumed_tokens() -> None:
    """A run reads 15 samples of 24 tokens and then samples of 48; the size follows the tokens, counted one by one."""
    text, sizes = "0:2 240:4 480:8 1200:16", {0: 2, 240: 4, 480: 8, 1200: 16}
    consumed = Consumed(15, 360)
    schedule = parse_batch_schedule(schedule_in_samples(text, 48, consumed), 48)
    assert schedule.starts[1] == 10, "the first 240 tokens were those of 10 samples"
    first, tokens = consumed
    for _ in range(10):
        expected = [size for start, size in sizes.items() if start <= tokens][-1]
        assert schedule.size_at(first) == expected
        first += expected
        tokens += 48 * expected
    unchanged = parse_batch_schedule(schedule_in_samples(text, 24, consumed), 24)
    assert unchanged == parse_batch_schedule(text, 24)


def test_tools_take_the_largest_size() -> None:
    config = config_of(f"{SEQ} --batch-size-schedule '0:8 20_samples:16'", 2)
    row = {"split": "train", "iteration": 1, "consumed_samples": 8}
    assert "data 2" in layout_label(RunData("a", Path(), config, config, [row]))
    with pytest.raises(ValueError, match="--batch-size-schedule.*--global-batch-size"):
        plan.run_settings(argparse.Namespace(model=[], flags=["--batch-size-schedule", "0:8"], devices=2), None)  # type: ignore[arg-type]


def test_decimal_starts_are_exact() -> None:
    """As floats, 4.1 x 10**6 and 0.29 x 10**3 lie just below the whole number."""
    entries = parse_entries("0:1 0.29k:2 4.1M:3 1.001B:4 9007199254740993:5")
    assert [entry.start for entry in entries] == [0, 290, 4_100_000, 1_001_000_000, 9007199254740993]
    with pytest.raises(ValueError):
        parse_entries("0:1 1e999999999:2")
