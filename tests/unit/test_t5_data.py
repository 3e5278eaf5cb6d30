"""T5's masked spans lose no text, fit into encoder and decoder, and have the formats of T5 and CPM."""

import time
from pathlib import Path

import numpy as np
import pytest

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.config.command_line import parse
from megatron.data import corpus_paths, cpm_masking, cpm_triples
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.spans import SpanPlan, draw_lengths, draw_spans_to_document_ends, plan_spans
from megatron.data.t5_dataset import Objective, Specials, T5Dataset, build_train_valid_test_datasets
from megatron.model.work import sample_lengths
from megatron.tasks import TASKS
from megatron.tokenizer import load_tokenizer
from tests.sentences import SENTENCES
from tests.support import covering

EOD, TEXT, COUNT = 3, 1000, 120
T5 = Specials(EOD, TEXT, tuple(range(TEXT + COUNT, TEXT, -1)))
CPM = Specials(EOD, TEXT, tuple(range(TEXT + 1, TEXT + COUNT + 1)))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path prefix of a corpus with documents of 2 to 400 tokens, each ended by EOD."""
    path = str(tmp_path_factory.mktemp("t5") / "corpus")
    rng = np.random.default_rng(2)
    with IndexedDatasetBuilder(path, np.uint16) as builder:
        for size in [*rng.integers(20, 400, 150), *rng.integers(1, 12, 60)]:
            builder.add_document(np.append(rng.integers(4, TEXT, size), EOD))
    return path


def dataset(prefix: str, convention: str, name: str = "span-corruption", encoder: int = 128, **more: int) -> T5Dataset:
    specials = T5 if convention == "t5" else CPM
    objective = Objective(name, convention)
    (train, _, _), _ = build_train_valid_test_datasets(
        prefix, "1", objective, encoder, more.get("decoder"), specials, more.get("seed", 1), TEXT
    )
    assert isinstance(train, T5Dataset)
    return train


def numbers(sample: dict[str, object], key: str) -> list[int]:
    return sample[key].tolist()  # type: ignore[attr-defined, no-any-return]


def put_together(encoder: list[int], written: list[int], sentinels: tuple[int, ...]) -> list[int]:
    """Return the text: the encoder's tokens with each sentinel replaced by its span in the decoder's tokens."""
    spans: dict[int, list[int]] = {}
    for token in written:
        if token in sentinels:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    return [piece for token in encoder for piece in (spans[token] if token in sentinels else [token])]


@pytest.mark.parametrize("n", range(0, 400, 37))
def test_t5_samples_hold_their_text_between_start_and_end(prefix: str, n: int) -> None:
    data = dataset(prefix, "t5")
    sample, (text, _) = data[n], data.window(n)
    encoder, decoder, labels = (numbers(sample, key) for key in ("encoder", "decoder", "labels"))
    assert len(encoder) == 128 == data.plan.encoder
    assert encoder[-1] == labels[-1] == EOD
    assert decoder[0] == TEXT  # the pad token, with which T5's decoder starts
    assert decoder[1:] == labels[:-1]
    used = [t for t in encoder if t in T5.sentinels]
    assert used == list(range(TEXT + COUNT, TEXT + COUNT - data.plan.spans, -1)), "descending from the end"
    assert put_together(encoder[:-1], labels[:-1], T5.sentinels) == text.tolist()
    assert sum(numbers(sample, "loss_mask")) == len(labels)


@pytest.mark.parametrize("n", range(0, 400, 37))
def test_cpm_samples_end_every_document_in_a_span(prefix: str, n: int) -> None:
    data = dataset(prefix, "cpm")
    sample, (text, _) = data[n], data.window(n)
    mask = np.array(numbers(sample, "loss_mask"), dtype=bool)
    encoder = [t for t, d in zip(numbers(sample, "encoder"), numbers(sample, "encoder_document_ids"), strict=True) if d]
    decoder, labels = (np.array(numbers(sample, key))[mask].tolist() for key in ("decoder", "labels"))
    assert EOD not in encoder
    assert decoder[0] == CPM.sentinels[0]
    assert decoder[1:] == labels[:-1]
    used = [t for t in encoder if t in CPM.sentinels]
    assert used == list(CPM.sentinels[: len(used)]), "ascending from the first"
    assert labels[-1] == CPM.sentinels[len(used)], "a closing sentinel"
    found = put_together(encoder, decoder, CPM.sentinels)
    assert found == text[: len(found)].tolist()
    for at, token in enumerate(decoder):
        if token == EOD:
            assert at == len(decoder) - 1 or decoder[at + 1] in CPM.sentinels


@pytest.mark.parametrize("convention", ["t5", "cpm"])
def test_documents_are_told_apart_alike_on_both_sides(prefix: str, convention: str) -> None:
    data = dataset(prefix, convention)
    specials = T5 if convention == "t5" else CPM
    for n in range(60):
        sample = data[n]
        encoder_ids = dict(zip(numbers(sample, "encoder"), numbers(sample, "encoder_document_ids"), strict=True))
        decoder_ids = dict(zip(numbers(sample, "decoder"), numbers(sample, "decoder_document_ids"), strict=True))
        for sentinel in set(specials.sentinels) & encoder_ids.keys() & decoder_ids.keys():
            assert encoder_ids[sentinel] == decoder_ids[sentinel]


@pytest.mark.parametrize("convention", ["t5", "cpm"])
def test_prefix_lm_goes_on_where_the_encoder_stops(prefix: str, convention: str) -> None:
    data = dataset(prefix, convention, "prefix-lm", encoder=64, decoder=20)
    sample, (text, _) = data[5], data.window(5)
    encoder, decoder, labels = (numbers(sample, key) for key in ("encoder", "decoder", "labels"))
    assert (len(encoder), len(decoder), len(labels)) == (64, 20, 20)
    seen = encoder[:-1] if convention == "t5" else encoder
    assert seen + labels[:-1] == text.tolist()
    assert decoder[0] == (TEXT if convention == "t5" else CPM.sentinels[0])
    assert labels[-1] == (EOD if convention == "t5" else CPM.sentinels[1])


def test_lengths_are_those_of_t5() -> None:
    """568 tokens give 512 encoder and 114 decoder tokens with 15% masked and spans of 3, as published for T5."""
    assert plan_spans(512, None, 0.15, 3.0, 100, True) == SpanPlan(568, 85, 28, 512, 114)


@pytest.mark.parametrize(
    "flags",
    ["", "--dec-seq-length 512", "--dec-seq-length 32", "--noise-density 0.5 --dec-seq-length 64 --mean-span-length 8"],
)
def test_the_planner_counts_the_tokens_of_a_sample(flags: str) -> None:
    config = parse(f"--family t5 --enc-seq-length 512 {flags}".split())
    data = config.data
    objective = Objective("span-corruption", "t5", data.noise_density, data.mean_span_length)
    plan = objective.plan(512, data.dec_seq_length, 100)
    assert sample_lengths(config) == pytest.approx((plan.encoder, plan.decoder), abs=1)


@pytest.mark.parametrize("position", ["learned", "relative"])
def test_the_decoder_of_a_prefix_lm_has_a_quarter_of_the_encoders_tokens(
    tiny_data: str, vocab_file: str, position: str
) -> None:
    flags = f"--family t5 --enc-seq-length 32 --objective prefix-lm --position-embedding {position} --split 1"
    config = parse(f"{flags} --data-path {tiny_data} --vocab-file {vocab_file}".split())
    task = TASKS["t5"]()
    (train, _, _), _ = task.datasets(config, task.extended(config, load_tokenizer(vocab_file)))
    assert (len(train[0]["encoder"]), len(train[0]["decoder"])) == sample_lengths(config) == (32, 8)


@pytest.mark.parametrize("decoder", [None, 20, 40])
@pytest.mark.parametrize("encoder", [16, 63, 128, 300])
@pytest.mark.parametrize("ends", [True, False])
def test_lengths_fit(encoder: int, decoder: int | None, ends: bool) -> None:
    plan = plan_spans(encoder, decoder, 0.15, 3.0, 100, ends)
    assert plan.encoder <= encoder
    assert decoder is None or plan.decoder <= decoder
    assert plan.tokens - plan.noise + plan.spans + ends == plan.encoder
    if decoder is None:
        assert plan.encoder >= encoder - 1  # at most one position of the encoder is unused


def test_too_few_sentinels_are_refused_with_the_knobs() -> None:
    with pytest.raises(DatasetError, match="--num-sentinels"):
        plan_spans(512, None, 0.15, 3.0, 20, True)


def test_spans_are_as_long_as_asked_and_anywhere(prefix: str) -> None:
    data = dataset(prefix, "t5", encoder=512)
    hidden = np.zeros(data.plan.tokens)
    for n in range(300):
        text, sample = data.window(n)[0], data[n]
        kept = np.array(numbers(sample, "encoder")[:-1])
        assert np.isin(kept, T5.sentinels).sum() == 28
        at = 0
        for token in kept:  # `hidden` counts how often a position is masked
            if token in T5.sentinels:
                span = numbers(sample, "labels")
                begin = span.index(int(token)) + 1
                end = next(i for i in range(begin, len(span)) if span[i] in T5.sentinels or i == len(span) - 1)
                hidden[at : at + end - begin] += 1
                at += end - begin
            else:
                assert token == text[at]
                at += 1
    share = hidden.reshape(8, -1).mean(1) / 300
    assert abs(hidden.mean() / 300 - 85 / 568) < 1e-9
    assert share.min() > 0.1
    assert share.max() < 0.2


def test_compositions_are_even() -> None:
    """`draw_lengths` is uniform: the 6 ways to write 5 as an ordered sum of 3 positive integers are equally likely."""
    rng = np.random.default_rng(0)
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(6000):
        found = tuple(draw_lengths(rng, 5, 3).tolist())
        seen[found] = seen.get(found, 0) + 1
    assert len(seen) == 6
    assert min(seen.values()) > 850


@pytest.mark.parametrize("density", [0.15, 0.5])
@pytest.mark.parametrize("length", [128, 24])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 17, 200])
def test_borders_of_any_density_fit(every: int, length: int, density: float) -> None:
    """CPM's random spans fit into encoder and decoder and mask each document's end, even in documents of one token."""
    plan = plan_spans(length, None, density, 3.0, 100, False)
    ends = np.zeros(plan.tokens, dtype=bool)
    ends[min(every, 3) - 1 :: every] = True
    for seed in range(20):
        masked, first, used = draw_spans_to_document_ends(np.random.default_rng(seed), plan, ends)
        noise, spans = int(masked[:used].sum()), int(first[:used].sum())
        assert used - noise + spans <= plan.encoder
        assert noise + spans <= plan.decoder
        assert masked[:used][ends[:used]].all()
        assert (masked | ~first).all()
        after = np.flatnonzero(ends[: used - 1]) + 1  # first tokens of documents; spans end before these
        assert (~masked[after] | first[after]).all()


def lines(folder: Path, mean: int) -> str:
    """Write a corpus of documents with about `mean` tokens, and five of 100 to 300 tokens; return its path prefix."""
    rng = np.random.default_rng(mean)
    with IndexedDatasetBuilder(folder / f"lines{mean}", np.uint16) as builder:
        for size in [*rng.poisson(mean - 2, 60_000 // mean) + 1, *rng.integers(100, 300, 5)]:
            builder.add_document(np.append(rng.integers(4, TEXT, size), EOD))
    return str(folder / f"lines{mean}")


SHORT = [(mean, decoder) for mean in (3, 8, 14, 40) for decoder in (None, 60)]
IN_CI = [(3, 60), (8, None), (14, 60), (40, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "decoder"), covering(SHORT, IN_CI.__contains__, several=True))
def test_nothing_of_short_documents_is_left_out(tmp_path: Path, mean: int, decoder: int | None) -> None:
    """An epoch of short documents contains 99.8% of the corpus's tokens.

    15% of the tokens are masked. If more than 15% of the tokens are document ends, all document ends are masked.
    """
    path = lines(tmp_path, mean)
    (data, _, _), notes = build_train_valid_test_datasets(
        path, "1", Objective(convention="cpm"), 256, decoder, CPM, 1, TEXT
    )
    assert isinstance(data, T5Dataset)
    kept = hidden = ends = 0
    for n in range(data.samples_per_epoch):
        sample, (text, _) = data[n], data.window(n)
        mask = np.array(numbers(sample, "loss_mask"), dtype=bool)
        encoder = [
            t for t, d in zip(numbers(sample, "encoder"), numbers(sample, "encoder_document_ids"), strict=True) if d
        ]
        written = np.array(numbers(sample, "decoder"))[mask].tolist()
        found = put_together(encoder, written, CPM.sentinels)
        assert found == text[: len(found)].tolist()
        kept += len(found)
        hidden += sum(t not in CPM.sentinels for t in written)
        ends += found.count(EOD)
        assert decoder is None or len(written) <= decoder
    assert kept > 0.998 * data.samples_per_epoch * data.plan.tokens
    assert hidden <= 1.02 * max(0.15 * kept, ends)
    said = [note for note in notes if "documents are short" in note]
    assert bool(said) == (mean < 40)
    assert not said or "of the text" in said[0]


@pytest.mark.parametrize("sentences", [1, 2])
def test_documents_without_end_tokens_end_in_a_span(tmp_path: Path, sentences: int) -> None:
    """With and without end-of-document tokens, the same tokens are masked. In some windows the last document ends."""
    encoded = {EOD: tmp_path / "with", TEXT - 1: tmp_path / "without"}
    for last, path in encoded.items():
        rng = np.random.default_rng(0)
        with IndexedDatasetBuilder(path, np.uint16) as builder:
            for size in rng.integers(5, 30, 400):
                ids = np.append(rng.integers(4, TEXT - 1, size), last)
                cut = [len(ids)] if sentences == 1 else [3, len(ids) - 3]
                builder.add_document(ids, cut)
    expected, found = (
        build_train_valid_test_datasets(str(path), "1", Objective(convention="cpm"), 64, None, CPM, 1, TEXT)[0][0]
        for path in encoded.values()
    )
    ends_with_window = 0
    for n in range(expected.samples_per_epoch):
        ends_with_window += expected.window(n)[0][-1] == EOD
        for name, values in expected[n].items():
            if name in ("encoder", "decoder", "labels"):
                values[values == EOD] = TEXT - 1
            assert values.tolist() == found[n][name].tolist(), name
    assert ends_with_window


def test_two_sentinels_suffice_for_documents_of_one_token(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "ends", np.uint16) as builder:
        for _ in range(100):
            builder.add_document(np.array([EOD]))
    first, last = TEXT + 1, TEXT + 2
    (data, _, _), notes = build_train_valid_test_datasets(
        str(tmp_path / "ends"), "1", Objective(convention="cpm"), 8, None, Specials(EOD, TEXT, (first, last)), 1, TEXT
    )
    sample = data[3]
    assert numbers(sample, "encoder")[0] == numbers(sample, "decoder")[0] == first
    assert [*numbers(sample, "decoder")[1:2], *numbers(sample, "labels")[:2]] == [EOD, EOD, last]
    assert any("50.0% of the text is still dropped" in note for note in notes)


def test_ordinary_documents_have_the_plan_of_t5(prefix: str) -> None:
    """Documents of ordinary length have T5's counts of tokens and spans, so older runs resume with equal samples."""
    assert dataset(prefix, "cpm", encoder=512).plan == plan_spans(512, None, 0.15, 3.0, COUNT, False)


def test_a_sample_is_a_pure_function_of_its_number_and_epochs_differ(prefix: str) -> None:
    one, two = dataset(prefix, "t5"), dataset(prefix, "t5")
    two[500]
    assert all(numbers(one[7], key) == numbers(two[7], key) for key in ("encoder", "decoder", "labels"))
    assert numbers(one[7], "encoder") != numbers(one[7 + one.samples_per_epoch], "encoder")
    assert numbers(dataset(prefix, "t5", seed=2)[7], "encoder") != numbers(one[7], "encoder")


def test_reading_is_not_the_bottleneck(prefix: str) -> None:
    """T5Dataset makes more than 1,000 samples of 512 tokens per second of CPU time, a loose bound for slow machines."""
    data = dataset(prefix, "t5", encoder=512)
    data[0]
    begin = time.process_time()
    for n in range(500):
        data[n]
    assert 500 / (time.process_time() - begin) > 1000


def test_damaged_corpora_are_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=SENTENCES["outside_the_vocabulary_of_500"]):
        build_train_valid_test_datasets(prefix, "1", Objective(), 64, None, T5, 1, 500)
    assert IndexedDataset(prefix).num_documents == 210


def write_triple(prefix: str, folder: Path, limit: int = 40) -> str:
    """Write the first `limit` documents as CPM's three files of pre-masked text; return their common path prefix."""
    source, path = IndexedDataset(prefix), str(folder / "triple")
    ends = source.document_ends()
    builders = [IndexedDatasetBuilder(f"{path}_{name}", np.int32) for name in corpus_paths.TRIPLE_PARTS]
    for document in range(limit):
        ids = source.tokens[ends[document - 1] if document else 0 : ends[document]]
        for builder, part in zip(builders, cpm_masking.mask_document(ids, TEXT, 0.15, 3.0, (1, document)), strict=True):
            builder.add_document(part)
    for builder in builders:
        builder.finalize()
    return path


def test_triples_hold_each_document_and_mask_its_end(prefix: str, tmp_path: Path) -> None:
    """CPM's three files context, target and target_offset contain each document, with a masked document end.

    The id of sentinel j is vocabulary size + j. For each span, target_offset has its offset in target and its length.
    """
    path, source = write_triple(prefix, tmp_path), IndexedDataset(prefix)
    parts = [IndexedDataset(f"{path}_{name}") for name in ("context", "target", "target_offset")]
    for document in range(40):
        context, target, offset = (np.array(part[document]).tolist() for part in parts)
        assert EOD not in context
        assert target[-1] == EOD
        whole: list[int] = []
        for token in context:
            if token < TEXT:
                whole.append(token)
            else:
                begin, length = offset[2 * (token - TEXT) : 2 * (token - TEXT) + 2]
                assert target[begin] == token
                whole += target[begin + 1 : begin + length]
        assert whole == np.array(source[document]).tolist()


@pytest.mark.parametrize("decoder", [20, 60])
def test_triples_are_read_as_cpm_does(prefix: str, tmp_path: Path, decoder: int) -> None:
    """Samples of CPM's pre-masked files are read as in CPM.

    Sentinels are renumbered, and a closing sentinel is added. Padding replaces a span that exceeds the decoder length.
    """
    path = write_triple(prefix, tmp_path)
    (data, _, _), notes = cpm_triples.build_train_valid_test_datasets(path, "1", 100, decoder, CPM, 1, TEXT)
    assert data is not None
    assert "--noise-density and --mean-span-length have no effect" in notes[0]
    assert len(notes) == 1 + (decoder == 20)
    assert decoder > 20 or "of the text is dropped" in notes[1]
    seen = set()
    for n in range(data.samples_per_epoch):
        sample = data[n]
        kept = np.array(numbers(sample, "loss_mask"), dtype=bool)
        context = np.array(numbers(sample, "encoder"))[np.array(numbers(sample, "encoder_document_ids")) > 0].tolist()
        written, labels = (np.array(numbers(sample, key))[kept].tolist() for key in ("decoder", "labels"))
        assert written[1:] == labels[:-1]
        used = [t for t in context if t > TEXT]
        assert used == list(CPM.sentinels[: len(used)])
        assert [t for t in written if t > TEXT] == used or not used
        assert labels[-1] == CPM.sentinels[max(len(used), 1)]
        assert len(context) == 100 or len(written) > decoder - 60
        seen.add(len(context) == 100)
        assert TEXT not in context
    assert True in seen


def test_triples_that_cannot_be_read_are_refused(prefix: str, tmp_path: Path) -> None:
    path = write_triple(prefix, tmp_path)
    for ending in ("bin", "idx"):
        Path(f"{path}_target.{ending}").write_bytes(Path(f"{prefix}.{ending}").read_bytes())
    with pytest.raises(DatasetError, match=SENTENCES["do_not_match_they_contain"]):
        cpm_triples.build_train_valid_test_datasets(path, "1", 100, 60, CPM, 1, TEXT)


@pytest.mark.parametrize("size", [TEXT - 100, TEXT + 100])
def test_triples_of_a_tokenizer_of_another_size_are_refused(prefix: str, tmp_path: Path, size: int) -> None:
    path = write_triple(prefix, tmp_path)
    specials = Specials(EOD, size, tuple(range(size + 1, size + COUNT + 1)))
    with pytest.raises(DatasetError, match=f"{size}"):
        cpm_triples.build_train_valid_test_datasets(path, "1", 100, 60, specials, 1, size)


@pytest.mark.parametrize(
    "flags",
    [
        "--dec-seq-length 60",
        "--dec-seq-length 60 --span-convention cpm --objective prefix-lm",
        "--enc-seq-length 60 --span-convention cpm",
    ],
)
def test_triples_have_only_the_format_of_cpm(flags: str, prefix: str, tmp_path: Path, vocab_file: str) -> None:
    path = write_triple(prefix, tmp_path)
    config = parse([*f"--family t5 {flags} --data-path".split(), path])
    task = TASKS["t5"]()
    with pytest.raises(DatasetError, match="--objective span-corruption, --span-convention cpm and --dec-seq-length"):
        task.datasets(config, task.extended(config, load_tokenizer(vocab_file)))


@pytest.mark.parametrize("position_embedding", ["learned", "relative"])
def test_the_decoder_has_no_more_tokens_than_learned_positions(
    position_embedding: str, tiny_data: str, vocab_file: str
) -> None:
    """With short spans and much noise, the decoder reads more tokens than the encoder."""
    flags = (
        "--family t5 --seq-length 32 --enc-seq-length 32 --noise-density 0.7 --mean-span-length 1 "
        f"--position-embedding {position_embedding} --data-path {tiny_data} --vocab-file {vocab_file} --split 1 "
        "--span-convention t5"
    )
    config = parse(flags.split())
    task = TASKS["t5"]()
    (train, _, _), _ = task.datasets(config, task.extended(config, load_tokenizer(vocab_file)))
    assert train.plan.decoder == len(train[0]["decoder"])
    assert (train.plan.decoder <= 32) == (position_embedding == "learned")
