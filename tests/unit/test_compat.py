"""CPM-Pretrain's imports work or name a counterpart; its attention masks become document ids or are refused."""

import copy
import importlib
import importlib.util
import pickle
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.model.masks import document_mask, no_documents
from megatron.ranks import device as device_module
from megatron.tasks import functions
from megatron.tasks.functions import parse_own_flags
from megatron.timers import Timers
from megatron.training.global_vars import get_args, publish
from megatron.utils import get_ltor_masks_and_position_ids
from megatron_compat import names
from megatron_compat.args import WITHOUT_VALUE, Args
from megatron_compat.fp16 import fp16_to_fp32, fp32_to_fp16
from megatron_compat.masks import (
    T5Masks,
    check_positions,
    decoder_documents,
    get_masks_and_position_ids_for_t5,
    t5_documents,
)
from tests.sentences import SENTENCES
from tests.support import ROOT

NAMES = [line.split() for line in (ROOT / "tests/original/names.txt").read_text().splitlines()]
GONE_FROM_DEEPSPEED = {"tds.utils.distributed init_distributed", "tds.runtime.engine MEMORY_OPT_ALLREDUCE_SIZE"}


def test_every_name_is_here_or_names_its_counterpart() -> None:
    """Each name that CPM-Pretrain's code imports exists, or the ImportError names its documented counterpart."""
    pages = [(ROOT / "docs/reference" / page).read_text(encoding="utf-8") for page in ("imports.md", "imports_zh.md")]
    here = 0
    for module, name in NAMES:
        try:
            exec(f"from {module} import {name}", {})
            here += 1
        except ImportError as error:
            if f"{module} {name}" in GONE_FROM_DEEPSPEED:
                continue
            words = names.COUNTERPARTS.get((module, name)) or next(
                text for gone, text in names.GONE_MODULES.items() if gone in (module, f"{module}.{name}")
            )
            assert words in str(error)
            shown = {f"`{each}`" for each in (name, module, f"{module}.{name}")}
            assert all(any(each in page for each in shown) for page in pages), (module, name)
    assert here > 100


def test_every_setting_that_the_original_reads_has_a_value_or_a_reason() -> None:
    args = Args(parse(["--vocab-size", "3000"]))
    for name in (ROOT / "tests/original/args.txt").read_text().split():
        if name in WITHOUT_VALUE:
            with pytest.raises(AttributeError, match=f"args.{name} of CPM-Pretrain has no value"):
                getattr(args, name)
        else:
            getattr(args, name)
    assert args.args.hidden_size == args.hidden_size
    assert (args.fp16, args.padded_vocab_size, args.data_impl) == (False, 3072, "mmap")
    with pytest.raises(AttributeError, match="num_layers"):
        args.num_layer  # noqa: B018


def test_names_are_found_without_torch() -> None:
    """Importing `megatron` and `megatron_compat.names` does not import torch, which would slow down the data tools."""
    code = "import sys, megatron, megatron_compat.names; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_our_own_modules_are_what_they_were() -> None:
    import megatron.checkpointing as checkpointing
    import megatron.utils as utils

    for module in (checkpointing, utils):
        assert module.__file__ and Path(module.__file__).is_file()
        assert importlib.reload(module) is module
        with pytest.raises(AttributeError):
            module.nonsense  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron.nonsense")
    assert importlib.util.find_spec("megatron.nonsense") is None


def test_submodules_of_tds_are_those_of_deepspeed() -> None:
    import deepspeed

    code = importlib.import_module("tds.runtime.zero.stage3")
    assert code is importlib.import_module("deepspeed.runtime.zero.stage3")
    assert code.__spec__ is not None and code.__spec__.name == "deepspeed.runtime.zero.stage3"
    tds = importlib.import_module("tds")
    assert importlib.import_module("tds.TPipelineEngine").PipelineEngine is tds.PipelineEngine
    assert importlib.import_module("tds.runtime").utils is deepspeed.runtime.utils
    assert importlib.import_module("tds.schedule").__name__ == "tds.schedule", "ours come first"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tds.nonsense")


def test_modules_under_the_name_tds_hold_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.pipe import engine as theirs

    import tds

    ours = importlib.import_module("tds.runtime.pipe.engine")
    assert ours.PipelineEngine is tds.runtime.pipe.engine.PipelineEngine is tds.PipelineEngine
    assert tds.runtime.pipe.PipelineModule is tds.PipelineModule
    assert issubclass(tds.PipelineEngine, tds.DeepSpeedEngine)
    assert issubclass(tds.DeepSpeedEngine, theirs.DeepSpeedEngine)
    names = dict[str, object]()
    exec("from tds.runtime.pipe.engine import *", names)
    assert names["PipelineEngine"] is tds.PipelineEngine and names["p2p"] is theirs.p2p
    assert importlib.import_module("deepspeed.runtime.pipe.engine") is theirs is not ours
    assert theirs.PipelineEngine is not tds.PipelineEngine, "DeepSpeed's own module stays as it is"
    monkeypatch.setattr(ours, "TENSOR_META_SIZE", 512)
    assert theirs.TENSOR_META_SIZE == 512, "a client that sets a name sets DeepSpeed's"
    assert tds.runtime.utils is importlib.import_module("deepspeed.runtime.utils")


def test_casts_go_through_nested_tuples() -> None:
    ids, half, wide = torch.arange(3), torch.ones(2).half(), torch.ones(2)
    mixed = (ids, [wide, half], None)
    found = fp32_to_fp16(mixed)
    assert (found[0].dtype, found[1][0].dtype, found[1][1].dtype, found[2]) == (
        torch.int64,
        torch.float16,
        torch.float16,
        None,
    )
    back = fp16_to_fp32(found)
    assert [t.dtype for t in back[1]] == [torch.float32] * 2


EOD, PAD = 1, 0


def by_loops(tokens: Tensor, eod: int) -> Tensor:
    """Return the causal mask [b, 1, s, s] within documents (True: a query attends to a key), computed in loops."""
    b, s = tokens.shape
    allowed = torch.zeros(b, 1, s, s, dtype=torch.bool)
    for n in range(b):
        for i in range(s):
            for j in range(i, -1, -1):
                if j < i and tokens[n, j] == eod:
                    break
                allowed[n, 0, i, j] = True
    return allowed


@given(st.lists(st.lists(st.integers(1, 4), min_size=9, max_size=9), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=50)
def test_masks_of_documents_are_taken(rows: list[list[int]], reset: bool) -> None:
    tokens = torch.tensor(rows)
    mask, _, _ = get_ltor_masks_and_position_ids(tokens, EOD, reset, reset, False)
    allowed = by_loops(tokens, EOD if reset else -1)
    assert torch.equal(~mask.expand_as(allowed), allowed)
    ids = decoder_documents(mask, tokens)
    if not reset or not (tokens[:, :-1] == EOD).any():
        assert not ids.numel()
    else:
        found = document_mask(ids, causal=True)
        assert found is not None and torch.equal(found, allowed)


def test_other_masks_are_refused_by_place() -> None:
    tokens = torch.full((2, 6), 3)
    mask, _, _ = get_ltor_masks_and_position_ids(tokens, EOD, False, False, False)
    assert not decoder_documents(mask, tokens).numel()
    hole = mask.expand(2, 1, 6, 6).clone()
    hole[1, 0, 4, 2] = True
    with pytest.raises(ValueError, match=SENTENCES["sample_1_token_4_does_not"]):
        decoder_documents(hole, tokens)
    with pytest.raises(ValueError, match=SENTENCES["token_0_attends_to_token_1"]):
        decoder_documents(torch.zeros_like(mask), tokens)
    for wrong in (mask.float(), mask[..., :5], mask.expand(2, 3, 6, 6)):
        with pytest.raises(ValueError, match=SENTENCES["gpt2model_is_bool"]):
            decoder_documents(wrong, tokens)


class Words:
    eod_id, pad_id = EOD, PAD


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_masks_of_a_t5_are_taken(data: st.DataObject) -> None:
    """CPM-Pretrain's T5 masks become document ids that give the same attention, also with padding."""
    b, k, q = 2, 10, 8
    contexts, targets = torch.zeros(b, k, dtype=torch.int64), torch.zeros(b, q, dtype=torch.int64)
    ends, labels = torch.zeros(b, k, dtype=torch.int64), torch.zeros(b, q, dtype=torch.int64)
    of_encoder, of_decoder = torch.zeros_like(contexts), torch.zeros_like(targets)
    for n in range(b):
        documents = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4))
        at = to = 0
        for number, (read, written) in enumerate(documents, 1):
            if at + read > k or to + written > q:
                break
            contexts[n, at : at + read], targets[n, to : to + written] = 5, 6
            labels[n, to : to + written] = 7
            ends[n, at + read - 1], targets[n, to + written - 1] = 1, EOD
            of_encoder[n, at : at + read], of_decoder[n, to : to + written] = number, number
            at, to = at + read, to + written
    reset = data.draw(st.booleans())
    if not reset:
        of_encoder, of_decoder = of_encoder.clamp(max=1), of_decoder.clamp(max=1)
    made = get_masks_and_position_ids_for_t5(None, Words, contexts, targets, labels, ends, reset, reset)
    encoder, enc_positions, decoder, dec_positions, cross, loss_mask = made
    assert torch.equal(loss_mask, ((targets != EOD) & (labels != PAD)).float())
    text = of_decoder > 0
    same = of_decoder.unsqueeze(2) == of_encoder.unsqueeze(1)
    assert torch.equal(cross[:, 0][text], same.float()[text])
    own = (of_encoder.unsqueeze(2) == of_encoder.unsqueeze(1)).float()
    assert torch.equal(encoder[:, 0], own)
    assert torch.equal(decoder[:, 0], (of_decoder.unsqueeze(2) == of_decoder.unsqueeze(1)).float().tril())
    for masks in (T5Masks(encoder, decoder, cross), T5Masks(encoder.half(), decoder.bool(), cross.half())):
        enc_ids, dec_ids = t5_documents(masks)
        if enc_ids.numel():
            again = document_mask(dec_ids, enc_ids)
            assert again is not None and torch.equal(again, cross.bool())
        else:
            assert bool((of_encoder == 1).all()) and bool((of_decoder == 1).all())
    check_positions("encoder", enc_positions, enc_ids, reset)
    check_positions("decoder", dec_positions, dec_ids, reset)


def test_other_masks_and_positions_of_a_t5_are_refused() -> None:
    encoder, decoder, cross = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3).tril(), torch.ones(1, 1, 3, 4)
    assert not t5_documents(T5Masks(encoder, decoder, cross))[0].numel()
    for name, changed in (
        ("encoder mask", T5Masks(encoder.tril(), decoder, cross)),
        ("decoder mask", T5Masks(encoder, torch.ones_like(decoder), cross)),
        ("cross mask", T5Masks(encoder, decoder, cross.tril())),
    ):
        with pytest.raises(ValueError, match=f"the {name} "):
            t5_documents(changed)
    with pytest.raises(ValueError, match="decoder positions"):
        check_positions("decoder", torch.tensor([[0, 1, 3]]), no_documents(torch.device("cpu")), False)


def _add(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group("mine")
    group.add_argument("--head-scale", type=float, default=0.5)
    group.add_argument("--with-head", action="store_true")
    return parser


def test_flags_of_the_script_are_attributes_of_args() -> None:
    words = ["--hidden-size", "24", "--head-scale", "2", "--num-layers", "3", "--with-head", "--split", "9,1,0"]
    own, rest = parse_own_flags(_add, words)
    assert own == {"head_scale": 2.0, "with_head": True}
    assert rest == ["--hidden-size", "24", "--num-layers", "3", "--split", "9,1,0"]
    args = Args(parse(rest), own)
    assert (args.head_scale, args.with_head, args.hidden_size) == (2.0, True, 24)
    assert parse_own_flags(_add, ["--hidden-size", "16"])[0] == {"head_scale": 0.5, "with_head": False}
    with pytest.raises(ConfigError, match="head-scale"):
        parse_own_flags(_add, ["--head-scale", "two"])


def test_help_is_printed_although_a_required_flag_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    own, rest = parse_own_flags(lambda parser: parser.add_argument("--teacher", required=True), ["--help", "data"])
    assert own == {}
    assert rest == ["--help", "data"]
    assert "--teacher" in capsys.readouterr().out


def test_a_provider_of_numbers_of_samples_may_come_with_one_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Any] = []
    monkeypatch.setattr(functions, "run", lambda task, *_, **__: tasks.append(task))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)

    def provide(train_valid_test_num_samples: list[int]) -> Any:
        return tuple(train_valid_test_num_samples)

    def count(batch: Any) -> Tensor:
        return torch.tensor(1)

    functions.pretrain(provide, torch.nn.Identity, argv=[], tokenizer_provider=lambda _, tokenizer: f"own {tokenizer}")
    words = "--train-iters 10 --batch-size 4 --gas 1 --eval-interval 5 --eval-iters 2"
    config = parse(words.split(), {}, 2)
    # 2 replicas: 8 samples a batch. 10 batches, (10 / 5 + 1) evaluations of 2 batches, and 2 batches.
    assert tasks[0].datasets(config, None)[0] == (80, 48, 16)
    assert tasks[0].extended(config, "tokenizer") == "own tokenizer"
    with pytest.raises(ValueError, match="count_targets"):
        functions.pretrain(provide, torch.nn.Identity, argv=[], count_targets=count)


@pytest.mark.parametrize("taken", ["--hidden-size", "--bf16", "--sequence-parallel"])
def test_a_flag_that_this_project_has_is_refused(taken: str) -> None:
    with pytest.raises(ConfigError, match=taken):
        parse_own_flags(lambda parser: parser.add_argument(taken), [])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_args_have_the_format_to_which_the_run_has_resolved_its_precision(precision: str) -> None:
    publish(parse(["--precision", "auto"]), None, Timers(torch.device("cpu")), precision)
    args = get_args()
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert (args.bf16, args.fp16, args.params_dtype) == (precision == "bf16", precision == "fp16", dtypes[precision])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_args_can_be_copied(copied: Callable[[Args], Args]) -> None:
    args = copied(Args(parse(["--hidden-size", "24"]), {"head_scale": 2.0}, "bf16"))
    assert (args.hidden_size, args.head_scale, args.bf16) == (24, 2.0, True)


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl")])
def test_get_args_names_the_backend_of_the_accelerator(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "current_device", lambda: torch.device(kind))
    assert Args(parse([])).distributed_backend == backend
