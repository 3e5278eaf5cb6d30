"""Flags of CPM-Pretrain and Megatron-LM are translated; one message lists all flags that are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Config
from megatron.config.command_line import HOME, from_file, parse
from megatron.config.defaults import DEFAULTS
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError, flag
from megatron.data.skips import Skips, parse_ranges
from megatron.optim import lr_at
from megatron.tokenizer.hf import find_merges
from megatron_compat.args import Args
from megatron_compat.flags.outcomes import ByValue, NoEffect, Refused, Translated
from megatron_compat.flags.table import FLAGS, ROWS, VALUES
from tests.support import ROOT
from tests.unit import flags_table

# Every flag of CPM-Pretrain's parser, including those that DeepSpeed adds.
CPM_PRETRAIN = """
--num-layers --num-unique-layers --param-sharing-style --hidden-size --kv-hidden-size --ff-hidden-size
--num-attention-heads --max-position-embeddings --make-vocab-size-divisible-by --layernorm-epsilon
--apply-residual-connection-post-layernorm --openai-gelu --onnx-safe
--attention-dropout --hidden-dropout --weight-decay --clip-grad --adam-beta1 --adam-beta2 --adam-eps
--batch-size --gas --checkpoint-activations --distribute-checkpointed-activations --checkpoint-num-layers
--train-iters --log-interval --exit-interval --tensorboard-dir --scaled-upper-triang-masked-softmax-fusion
--scaled-masked-softmax-fusion --bias-gelu-fusion --bias-dropout-fusion --hidden-bias --cpu-optimizer --cpu_torch_adam
--seed --init-method-std --lr --lr-decay-style --lr-decay-iters --min-lr --warmup --override-lr-scheduler
--use-checkpoint-lr-scheduler --save --save-interval --no-save-optim --no-save-rng --load --no-load-optim --no-load-rng
--finetune --fp16 --apply-query-key-layer-scaling --attention-softmax-in-fp32 --fp32-allreduce --hysteresis
--loss-scale --loss-scale-window --min-scale --fp16-lm-cross-entropy --model-parallel-size --pipe-parallel-size
--distributed-backend --DDP-impl --local_rank --lazy-mpu-init --use-cpu-initialization --eval-iters --eval-interval
--data-path --split --vocab-file --merge-file --seq-length --enc-seq-length --dec-seq-length --mask-prob
--short-seq-prob --mmap-warmup --num-workers --tokenizer-type --data-impl --reset-position-ids --reset-attention-mask
--eod-mask-loss --adlr-autoresume --adlr-autoresume-interval --ict-head-size --ict-load --bert-load --titles-data-path
--query-in-block-prob --use-one-sent-docs --report-topk-accuracies --faiss-use-gpu --block-data-path
--indexer-batch-size --indexer-log-interval --zero-stage --zero-reduce-scatter --zero-contigious-gradients
--zero-reduce-bucket-size --zero-allgather-bucket-size --deepspeed-activation-checkpointing --partition-activations
--contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer --profile-backward
--deepspeed --deepspeed_config --deepscale --deepscale_config --deepspeed_mpi
"""

# Flags and values of the commands in CPM-Pretrain's run scripts.
COMMON = """
--model-parallel-size 2 --num-layers 2 --kv-hidden-size 16 --max-position-embeddings 1024 --batch-size 4 --gas 16
--train-iters 320000 --lr-decay-iters 320000 --save checkpoints/a --data-path data/a --data-impl mmap
--vocab-file vocab --split 949,50,1 --distributed-backend nccl --lr 1.5e-4 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 --log-interval 1 --save-interval 500 --eval-interval 100
--eval-iters 10 --fp16 --tensorboard-dir logs/a --deepspeed --deepspeed_config ds_config.json
"""
GPT2 = (
    f"{COMMON} --pipe-parallel-size 2 --hidden-size 256 --num-attention-heads 16 --ff-hidden-size 1024 "
    "--seq-length 1024 --checkpoint-activations --hidden-bias"
)
T5 = (
    f"{COMMON} --pipe-parallel-size 1 --hidden-size 128 --num-attention-heads 8 --ff-hidden-size 256 "
    "--enc-seq-length 1024 --dec-seq-length 384"
)
CHECKPOINTING = (
    "--checkpoint-num-layers 1 --partition-activations --synchronize-each-layer "
    "--contigious-checkpointing --profile-backward"
)
MEGATRON = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 1024
--num-attention-heads 16 --ffn-hidden-size 4096 --micro-batch-size 2 --global-batch-size 16 --seq-length 1024
--max-position-embeddings 1024 --train-samples 1600000 --lr-decay-samples 800000 --lr-warmup-samples 16000 --lr 1.5e-4
--min-lr 1.0e-5 --lr-decay-style cosine --data-path my --vocab-file v/vocab.json --merge-file v/merges.txt
--data-impl mmap --split 949,50,1 --bf16 --accumulate-allreduce-grads-in-fp32 --DDP-impl local --clip-grad 1.0
--num-layers-per-virtual-pipeline-stage 3 --recompute-granularity selective --tokenizer-type GPT2BPETokenizer
--log-interval 10 --save-interval 1000 --eval-interval 100 --eval-iters 10 --exit-interval 500
"""


def taken(line: str, ranks: int = 1) -> tuple[Config, list[str]]:
    notes: list[str] = []
    return parse(line.split(), None, ranks, notes.append), notes


def test_every_flag_of_the_original_is_known() -> None:
    ours = {flag(name) for name in HOME} | {"--no-load-optim", "--no-load-rng", "--local_rank"}
    assert [name for name in CPM_PRETRAIN.split() if name not in ours and name not in FLAGS] == []
    assert ours.isdisjoint(FLAGS)


def test_the_original_run_scripts_start(tmp_path: Path) -> None:
    config, notes = taken(GPT2, 4)
    assert (config.train.precision, config.train.deepspeed_config) == ("fp16", "ds_config.json")
    assert (config.train_batch_size(4), config.model.hidden_bias) == (64, True)
    assert notes == [
        "--data-impl mmap has no effect: .bin and .idx files are always memory-mapped",
        "--distributed-backend nccl has no effect: the device determines the backend, NCCL for GPUs and gloo for CPUs",
        "--fp16 translated to --precision fp16",
        "--deepspeed has no effect: every run uses DeepSpeed",
        "--deepspeed_config ds_config.json translated to --deepspeed-config ds_config.json",
    ]
    fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "initial_scale_power": 16}
    path = tmp_path / "ds_config_t5.json"
    path.write_text(json.dumps({"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "fp16": fp16}))
    config, _ = taken(T5.replace("ds_config.json", str(path)), 4)
    assert (config.data.enc_seq_length, config.data.dec_seq_length) == (1024, 384)
    resolved = resolve(config, 4, fast_bf16=False)
    assert (resolved.precision, resolved.zero_stage, resolved.deepspeed["train_batch_size"]) == ("fp16", 1, 128)


def test_all_that_is_refused_is_said_together() -> None:
    with pytest.raises(ConfigError) as error:
        taken(f"{GPT2} {CHECKPOINTING} --num-unique-layers 1 --hiden-size 3 --xyzzy")
    assert str(error.value).splitlines() == [
        "3 errors in the settings:",
        "  unknown argument --hiden-size; did you mean --hidden-size?",
        "  unknown argument --xyzzy",
        "  --num-unique-layers 1 is not accepted: layers do not share weights",
    ]


def test_megatrons_line_is_ours() -> None:
    found, notes = taken(MEGATRON, 8)
    ours, none = taken(
        "--model-parallel-size 2 --pipe-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
        "--ff-hidden-size 4096 --batch-size 2 --gas 4 --seq-length 1024 --max-position-embeddings 1024 "
        "--train-samples 1600000 --lr-decay-samples 800000 --warmup 0.02 --lr 1.5e-4 --min-lr 1.0e-5 --data-path my "
        "--vocab-file v/vocab.json --split 949,50,1 --precision bf16 --clip-grad 1.0 --pipeline-schedule interleaved "
        "--virtual-pipeline-size 4 --checkpoint-attention --log-interval 10 --save-interval 1000 --eval-interval 100 "
        "--eval-iters 10 --exit-interval 500",
        8,
    )
    assert found.train.train_iters == 100_000
    assert found == ours and none == []
    assert "--global-batch-size 16 translated to --gas 4 (16 = --batch-size 2 x 2 replicas x --gas)" in notes
    assert (
        "--merge-file v/merges.txt has no effect: merges are always read from this file next to --vocab-file" in notes
    )
    assert "--tokenizer-type GPT2BPETokenizer translated to --tokenizer-type auto" in notes


LLAMA = """
--tensor-model-parallel-size 2 --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --kv-channels 64 --ffn-hidden-size 8192 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu
--disable-bias-linear --position-embedding-type rope --use-rotary-position-embeddings --no-position-embedding
--rotary-base 500000 --rotary-percent 1.0 --use-rope-scaling --window-size 4095,0 --qk-layernorm --add-qkv-bias
--seq-length 8192 --max-position-embeddings 8192 --untie-embeddings-and-output-weights --attention-dropout 0.0
--hidden-dropout 0.0 --micro-batch-size 1 --bf16 --use-mcore-models --transformer-impl transformer_engine
--no-bias-swiglu-fusion --no-rope-fusion --attention-softmax-in-fp32
"""


def test_megatrons_llama_is_ours() -> None:
    found, notes = taken(LLAMA, 2)
    ours, none = taken(
        "--model-parallel-size 2 --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --num-key-value-heads 8 "
        "--kv-hidden-size 64 --ff-hidden-size 8192 --normalization rmsnorm --layernorm-epsilon 1e-5 --activation "
        "swiglu "
        "--no-hidden-bias --position-embedding rope --rope-theta 500000 --rope-scaling llama3 --rope-scaling-factor 8 "
        "--rope-original-length 8192 --sliding-window 4096 --qk-norm --qkv-bias --seq-length 8192 "
        "--max-position-embeddings 8192 --no-tie-embeddings --attention-dropout 0 --hidden-dropout 0 --batch-size 1 "
        "--precision bf16"
    )
    assert found == ours and none == []
    assert (
        "--window-size 4095,0 translated to --sliding-window 4096 (--sliding-window also counts the token itself)"
        in notes
    )
    assert "--group-query-attention has no effect: the run uses --num-key-value-heads 8" in notes
    assert taken("--group-query-attention")[0].model.key_value_heads == 1


def test_the_merges_that_the_tokenizer_reads_are_accepted(tmp_path: Path) -> None:
    """They are gpt2-merges.txt beside gpt2-vocab.json, else merges.txt, in any spelling of the path."""
    (tmp_path / "gpt2-vocab.json").touch()
    spelled = f"{tmp_path}/../{tmp_path.name}"
    for other, is_read in (("merges.txt", True), ("gpt2-merges.txt", False)):
        for vocab in (tmp_path, tmp_path / "gpt2-vocab.json"):
            line = f"--vocab-file {vocab} --merge-file {spelled}"
            (tmp_path / other).touch()
            assert find_merges(tmp_path / "gpt2-vocab.json").name == other
            assert "has no effect" in taken(f"{line}/{other}")[1][0]
            if not is_read:
                with pytest.raises(ConfigError, match=f"merges are read from {tmp_path}/{other}; copy"):
                    taken(f"{line}/merges.txt")


@pytest.mark.parametrize(
    "line",
    [
        "--lr-warmup-init 0",
        "--weight-decay-incr-style constant",
        "--start-weight-decay 0.01",
        "--sgd-momentum 0.9",
        "--expert-tensor-parallel-size 1",
    ],
)
def test_the_only_value_of_this_project_is_accepted(line: str) -> None:
    config, notes = taken(line)
    assert config == taken("")[0] and len(notes) == 1 and " has no effect: " in notes[0]


@pytest.mark.parametrize("words", ["2", "[0,1,1,1]", "([0]*1+[1]*3)", "[0]+[1]*3", "([0]+[1])*2"])
def test_layers_with_experts_are_those_of_megatrons_expression(words: str, tmp_path: Path) -> None:
    layers = eval(words)  # as Megatron-LM does
    expected = tuple(map(str, layers)) if isinstance(layers, list) else (words,)
    path = tmp_path / "a.json"
    for value in (words, layers):
        path.write_text(json.dumps({"moe_layer_freq": value}))
        for flags in (f"--moe-layer-freq {words}", f"--config {path}"):
            config, _ = taken(f"--num-layers 4 --num-experts 4 {flags}")
            assert config.model.moe_layer_frequency == expected


def test_groups_count_only_in_grouped_query_attention(tmp_path: Path) -> None:
    """Megatron-LM's arguments of a model without groups have num_query_groups 1, its default."""
    path = tmp_path / "a.json"
    for is_grouped in (False, True):
        path.write_text(json.dumps({"num_query_groups": 1, "group_query_attention": is_grouped}))
        line = f"--group-query-attention {is_grouped} --num-query-groups 1"
        for flags in (line, f"--config {path}"):
            notes: list[str] = []
            config = parse(flags.split(), DEFAULTS["llama"], 1, notes.append)
            assert config.model.key_value_heads == (1 if is_grouped else config.model.num_attention_heads)
            assert any("--num-query-groups has no effect" in note for note in notes) is not is_grouped


@pytest.mark.parametrize("hidden", [64, 768, 2048, 2560, 4096, 5120, 8192])
def test_a_gated_mlp_is_as_wide_as_megatrons(hidden: int) -> None:
    """--swiglu gives the MLP width that Megatron-LM's arguments.py computes, unless a flag gives a width."""
    width = int((4 * hidden * 2 / 3) / 64) * 64
    sizes = f"--hidden-size {hidden} --num-attention-heads 4"
    config, notes = taken(f"--swiglu {sizes}")
    assert (config.model.activation, config.model.ff_size) == ("swiglu", width)
    why = "the MLP width is 8/3 of --hidden-size, rounded down to a multiple of 64, as in Megatron-LM"
    assert notes == [f"--swiglu translated to --activation swiglu --ff-hidden-size {width} ({why})"]
    for given in ("--ffn-hidden-size 640", "--ff-hidden-size 640"):
        config, notes = taken(f"--swiglu {given} {sizes}")
        assert config.model.ff_size == 640 and notes[-1] == "--swiglu translated to --activation swiglu"
    assert taken(f"--swiglu --ff-hidden-size none {sizes}")[0].model.ff_size == 4 * hidden
    assert taken(f"--activation swiglu {sizes}")[0].model.ff_size == 4 * hidden, "our own flag says nothing of widths"


def test_a_width_in_a_file_wins_over_one_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"swiglu": True, "hidden_size": 96}))
    config, notes = taken(f"--config {path}")
    assert config.model.ff_size == 256 and notes[0].startswith(
        f"{path}: --swiglu translated to --activation swiglu --ff-"
    )
    assert from_file(str(path)).model.ff_size == 256
    assert taken(f"--config {path} --hidden-size 192")[0].model.ff_size == 512, "of the width that the run has"
    assert taken(f"--config {path} --ff-hidden-size none")[0].model.ff_size == 384
    config, notes = taken(f"--config {path} --activation gelu")
    assert config.model.ff_size == 384 and notes == [f"{path}: --swiglu translated to --activation swiglu"]
    path.write_text(json.dumps({"ff_hidden_size": 640, "swiglu": True, "hidden_size": "96"}))
    with pytest.raises(ConfigError, match="--hidden-size"):
        taken(f"--config {path}")
    assert taken("--config llama_8b --swiglu")[0].model.ff_size == 14336


def test_megatrons_way_to_llama_3_2() -> None:
    rope = "--position-embedding rope --rope-scaling llama3 --rope-original-length 8192"
    for line, factor in (("", 8), ("--rope-scaling-factor 32", 32), ("--rope-scaling-factor=1", 1)):
        config, _ = taken(f"--use-rotary-position-embeddings --use-rope-scaling {line}")
        assert config == taken(f"{rope} --rope-scaling-factor {factor}")[0]
    assert taken("--use-rope-scaling --rope-scaling-factor 32")[1] == [
        "--use-rope-scaling translated to --rope-scaling llama3 --rope-original-length 8192"
    ]
    assert taken("--config llama_1b --use-rope-scaling")[0].model.rope_scaling_factor == 32
    with pytest.raises(ConfigError, match="--use-rope-scaling.*--rope-scaling"):
        taken("--use-rope-scaling --rope-scaling yarn")


@pytest.mark.parametrize(
    ("line", "ranks", "message"),
    [
        (
            "--micro-batch-size 4 --batch-size 8",
            1,
            "--micro-batch-size 4 means --batch-size 4, but --batch-size 8 is given; leave one of them out",
        ),
        ("--fp16 --bf16", 1, "--bf16 means --precision bf16, but --fp16 is given; leave one of them out"),
        ("--global-batch-size 8 --gas 3", 1, "--global-batch-size 8 means --gas 2, but --gas 3 is given; leave one"),
        ("--global-batch-size 30", 4, "the value must be a multiple of 16 = --batch-size 4 x 4 replicas"),
        ("--global-batch-size 16 --model-parallel-size 2", 3, "3 ranks cannot be divided into replicas"),
        ("--train-samples 3", 1, "--train-samples 3 is less than one global batch of 4 samples"),
        ("--lr-warmup-iters 30 --train-iters 20", 1, "between 0 and the 20 iterations"),
        (
            "--num-layers-per-virtual-pipeline-stage 5 --pipe-parallel-size 2",
            2,
            "--num-layers 12 must be a multiple of --pipe-parallel-size 2 x 5 layers, and larger than this product",
        ),
        ("--data-impl fast", 1, "--data-impl fast is not accepted: choose one of mmap, infer, lazy, cached"),
        ("--merge-file a/b --vocab-file v/vocab.json", 1, "copy the file there"),
        ("--merge-file v/gpt2-merges.txt --vocab-file v/vocab.json", 1, "copy the file there"),
        ("--fp32-allreduce --fp16", 1, '"communication_data_type": "fp32" in --deepspeed-config'),
        ("--sgd-momentum 0.5", 1, "the momentum of --optimizer sgd is always 0.9"),
        ("--lr-warmup-init 1e-7", 1, "always starts from 0"),
        ("--weight-decay-incr-style linear", 1, "--weight-decay is constant"),
        ("--weight-decay 0.1 --end-weight-decay 0.2", 1, "--weight-decay 0.1 is constant"),
        ("--activation-function silu", 1, "this activation is not supported"),
        ("--muon-scale-mode spectral --optimizer muon", 1, "--muon-lr-factor scales both"),
        ("--moe-layer-freq [1]*[1] --num-experts 4", 1, "--moe-layer-frequency [1]*[1] must be numbers"),
        ("--moe-layer-freq exit(1) --num-experts 4", 1, "--moe-layer-frequency exit(1) must be numbers"),
        ("--micro-batch-size x", 1, "argument --micro-batch-size: invalid int value: 'x'"),
        ("--micro-batch-size 0", 1, "--batch-size 0 must be at least 1"),
        ("--qk-layernorm", 1, "use --normalization rmsnorm for all norms"),
        ("--no-position-embedding", 1, "see --position-embedding"),
        ("--window-size 8,8", 1, "only N,0 is supported"),
        ("--window-size (-1,0)", 1, "leave the flag out for full attention"),
        ("--position-embedding-type yarn", 1, "use --position-embedding rope --rope-scaling yarn"),
        ("--position-embedding-type alibi", 1, "choose one of rope, learned_absolute"),
        ("3 --lr 1", 1, "unknown argument 3"),
        ("--hidden-act gelu_pytorch_tanh", 1, "give --activation"),
    ],
)
def test_contradictions_and_remainders_are_refused(line: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        taken(line, ranks)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_both_ways_to_write_a_value_and_the_last_one_wins() -> None:
    assert taken("--micro-batch-size=3")[0] == taken("--micro-batch-size 7 --micro-batch-size 3")[0]
    assert taken("--micro-batch-size 8 --batch-size 8")[0].train.batch_size == 8
    assert taken("--pipeline-model-parallel-size 1")[0].parallel.pipe_parallel_size == 0


@pytest.mark.parametrize("total", [7, 100, 300, 1000])
def test_a_warmup_in_iterations_is_one(total: int) -> None:
    for rising in range(total + 1):
        config, _ = taken(f"--lr-warmup-iters {rising} --lr-decay-iters {total} --lr 1 --lr-decay-style constant")
        rates = [lr_at(i, config) for i in range(total)]
        assert rates == pytest.approx([min(1.0, (i + 1) / rising) if rising else 1.0 for i in range(total)])
        if total > 100 and rising > 50:
            break


@pytest.mark.parametrize("name", ["--train-batch-size", "--global-batch-size"])
@pytest.mark.parametrize(
    ("flags", "setting", "expected"),
    [
        ("--lr-warmup-samples 320 --train-iters 100", "warmup", 320 / (100 * 64)),
        ("--lr-warmup-iters 10 --train-samples 6400", "warmup", 10 / 100),
        (
            "--rampup-batch-size 16 16 3000 --train-samples 10000",
            "batch_size_schedule",
            "0_samples:16 1000_samples:32 2000_samples:48 3000_samples:64",
        ),
    ],
)
def test_other_flags_count_in_the_given_global_batches(flags: str, setting: str, expected: Any, name: str) -> None:
    config, _ = taken(f"{flags} {name} 64 --batch-size 4")
    assert config.train.gas == 16
    assert getattr(config.optim if setting == "warmup" else config.train, setting) == expected


def test_a_file_may_use_the_names_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"fp16": True, "bf16": False, "train": {"micro_batch_size": 2}, "ffn_hidden_size": 96}))
    config, notes = taken(f"--config {path} --gas 2")
    assert (config.train.precision, config.train.batch_size, config.model.ff_hidden_size) == ("fp16", 2, 96)
    assert f"{path}: --micro-batch-size 2 translated to --batch-size 2" in notes
    assert taken(f"--config {path} --batch-size 6")[0].train.batch_size == 6, "a flag wins over a file"
    path.write_text(
        json.dumps({"global_batch_size": 8, "num_unique_layers": 2, "micro_batch_size": 4, "batch_size": 2})
    )
    with pytest.raises(ConfigError) as error:
        taken(f"--config {path}")
    assert [line.split(f"{path}: ")[-1] for line in str(error.value).splitlines()[1:]] == [
        "--num-unique-layers 2 is not accepted: layers do not share weights",
        "--micro-batch-size 4 means --batch-size 4, but --batch-size 2 is given; leave one of them out",
        "--global-batch-size depends on other settings; give it as a flag",
    ]


def test_iterations_of_megatron_count_from_0(tmp_path: Path) -> None:
    config, notes = taken("--iterations-to-skip 0 10 20-29")
    assert parse_ranges(config.train.skip_iterations) == parse_ranges(("1", "11", "21-30"))
    assert notes == [
        "--iterations-to-skip 0 10 20-29 translated to --skip-iterations 1 11 21-30 (Megatron-LM counts iterations "
        "from 0, this project from 1)"
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"iterations_to_skip": [10, 11]}))
    skips = Skips(parse_ranges(taken(f"--config {path}")[0].train.skip_iterations))
    # Megatron-LM counts iterations from 0. With 4 samples each, its iterations 10 and 11 begin at samples 40 and 44.
    assert [n for n in range(0, 80, 4) if skips.should_skip(n // 4 + 1, n, 4)] == [10 * 4, 11 * 4]
    with pytest.raises(ConfigError, match="--skip-iterations"):
        taken("--iterations-to-skip soon")


@pytest.mark.parametrize(
    ("more", "activation"),
    [
        ("", "gelu"),
        ("--openai-gelu", "gelu-tanh"),
        ("--swiglu", "swiglu"),
        ("--activation relu", "relu"),
        ("--activation gelu", "gelu"),
    ],
)
def test_gelu_that_is_not_fused_goes_by_erf(more: str, activation: str) -> None:
    """--no-bias-gelu-fusion selects the exact (erf) GELU, unless another flag sets the activation."""
    config, notes = taken(f"--no-bias-gelu-fusion {more}")
    assert config.model.activation == activation
    taken_for = (
        "translated to --activation gelu (Megatron-LM's fused GELU is the tanh form, its unfused GELU the erf form)"
    )
    assert (
        f"--no-bias-gelu-fusion {f'has no effect: the run uses --activation {activation}' if more else taken_for}"
        in notes
    )


@pytest.mark.parametrize("words", ["--tie-word-embeddings False", "--tie_word_embeddings=false", "FILE"])
def test_a_false_turns_off_what_the_name_turns_on(words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps({"tie_word_embeddings": False, "bf16": False, "deepspeed": False, "checkpoint_attention": True})
    )
    config, notes = taken(words.replace("FILE", f"--config {path}"))
    assert not config.model.tie_embeddings and len(notes) == 1
    assert notes[0].endswith("--tie-word-embeddings False translated to --no-tie-embeddings")
    config, notes = taken(f"--config {path} --recompute-activations False --fp16 False")
    assert not config.model.checkpoint_attention and config.train.precision == Config().train.precision
    assert notes[1:] == ["--recompute-activations False translated to --no-checkpoint-attention"]
    assert taken("--recompute-activations --recompute-activations False")[0] == taken("")[0], "the last one wins"
    with pytest.raises(ConfigError, match="--tie-word-embeddings.*--no-tie-embeddings.*--tie-embeddings"):
        taken("--tie-embeddings --tie-word-embeddings False")


def test_defaults_of_a_script_may_use_the_names_too() -> None:
    notes: list[str] = []
    config = parse(["--gas", "2"], {"tokenizer_type": "GPT2BPETokenizer", "micro_batch_size": 3}, notify=notes.append)
    assert (config.data.tokenizer_type, config.train.batch_size, len(notes)) == ("auto", 3, 2)
    with pytest.raises(ConfigError, match="args_defaults.*hiden_size.*hidden_size"):
        parse([], {"hiden_size": 3})


VALUE = {int: "12", float: "0.9", str: "full", list: "1 2", None: ""}
FITS = {
    "--cp-size": "1",
    "--expert-model-parallel-size": "1",
    "--step-batch-size-schedule": "0:4",
    "--n-positions": "2048",
    "--n-ctx": "2048",
    "--moe-router-topk": "2",
    "--moe-layer-freq": "2",
}


@pytest.mark.parametrize("name", FLAGS)
def test_every_row_does_what_it_says(name: str) -> None:
    row = FLAGS[name]
    values = list(row.outcome.values) if isinstance(row.outcome, ByValue) else [FITS.get(name, VALUE[row.value_type])]
    for value in values:
        outcome = row.outcome.values[value] if isinstance(row.outcome, ByValue) else row.outcome
        notes: list[str] = []
        argv, defaults = [name, *value.split()], {"num_layers": 24, "pipe_parallel_size": 2, "batch_size": 2}
        if name == "--recompute-num-layers":
            defaults["checkpoint_activations"] = True
        if name.startswith("--moe-"):
            defaults |= {"num_experts": 4} | ({"router_balance": "bias"} if "bias" in name else {})
        if name.startswith("--muon-"):
            defaults |= {"optimizer": "muon", "precision": "fp32"}
        if isinstance(outcome, Refused):
            with pytest.raises(ConfigError, match=f"^{name}.* is not accepted: {re.escape(outcome.advice)}$"):
                parse(argv, defaults, 2)
        else:
            try:
                parse(argv, defaults, 2, notes.append)
            except ConfigError as error:
                assert not isinstance(outcome, (Translated, NoEffect)), error
            else:
                named = [note for note in notes if not note.startswith("Megatron-LM")]
                assert len(named) == 1 and named[0].startswith(name)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--moe-router-topk 2", (0.0, True)),
        ("--moe-router-topk 2 --moe-aux-loss-coeff 0.01", (0.01, True)),
        ("--moe-router-topk 2 --router-aux-loss 0.01", (0.01, True)),
        ("--moe-router-load-balancing-type aux_loss", (0.0, True)),
        ("--moe-ffn-hidden-size 16 --moe-z-loss-coeff 0.1", (0.0, True)),
        ("--num-experts none --expert-model-parallel-size 1 --moe-router-topk 2", (0.0, True)),
        ("--moe-router-pre-softmax", (0.0, False)),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", (0.0, True)),
        ("--moe-router-pre-softmax --moe-router-topk 1 --moe-router-score-function sigmoid", (0.0, False)),
        ("FILE", (0.0, False)),
        ("AUX --moe-router-topk 2", (0.01, True)),
        ("--moe-router-score-function sigmoid --moe-router-topk 1", (0.0, False)),
        ("--moe-router-score-function sigmoid --moe-router-topk 1 --normalize-expert-weights", (0.0, True)),
    ],
)
def test_routers_of_megatron(flags: str, found: tuple[float, bool], tmp_path: Path) -> None:
    """The auxiliary loss and the normalization are those of Megatron-LM's router, unless the user gives others."""
    path = tmp_path / "a.json"
    path.write_text('{"moe_router_pre_softmax": true}')
    aux = tmp_path / "aux.json"
    aux.write_text('{"model": {"router_aux_loss": 0.01}}')  # the default, but chosen
    flags = flags.replace("FILE", f"--config {path}").replace("AUX", f"--config {aux}")
    model = taken(f"--num-experts 4 {flags}")[0].model
    assert (model.router_aux_loss, model.normalize_expert_weights) == found


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--moe-router-enable-expert-bias", "bias"),
        ("--moe-router-enable-expert-bias --moe-aux-loss-coeff 0", "bias"),
        ("--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01", "bias-and-aux-loss"),
        ("BIAS aux_loss --moe-aux-loss-coeff 0.02", "bias-and-aux-loss"),
        ("BIAS global_aux_loss --moe-aux-loss-coeff 0.02", "bias-and-aux-loss"),
        ("BIAS aux_loss", "bias"),
        ("BIAS none --moe-aux-loss-coeff 0.02", "bias"),
        ("FILE", "bias-and-aux-loss"),
    ],
)
def test_the_bias_of_megatron_is_added_to_its_auxiliary_loss(flags: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"moe_router_enable_expert_bias": true, "moe_aux_loss_coeff": 0.01}')
    flags = flags.replace("FILE", f"--config {path}")
    flags = flags.replace("BIAS", "--moe-router-enable-expert-bias --moe-router-load-balancing-type")
    assert taken(f"--num-experts 4 {flags}")[0].model.router_balance == found


def test_args_name_the_setting_that_takes_the_place() -> None:
    args = Args(Config())
    with pytest.raises(AttributeError, match="micro_batch_size.*batch_size"):
        _ = args.micro_batch_size
    with pytest.raises(AttributeError, match="deepspeed_configs.*deepspeed_config"):
        _ = args.deepspeed_configs


def test_what_the_table_says_names_our_own_flags() -> None:
    known = {flag(name) for name in HOME} | {"--config", "--no-load-optim"}
    text = "\n".join(flags_table._outcome(row.outcome) for row in ROWS)
    assert {name for name in re.findall(r"--[a-z][a-z0-9-]+", text)} - known <= {
        "--no-hidden-bias",
        "--no-tie-embeddings",
        "--no-normalize-expert-weights",
        "--no-save-at-end",
        "--no-tensorboard",
    }


@pytest.mark.parametrize(("page", "tables"), [("migration.md", "english"), ("migration_zh.md", "chinese")])
def test_the_documents_show_the_tables(page: str, tables: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for table in getattr(flags_table, tables)():
        assert table in text, "python -m tests.unit.flags_table prints the tables"


def test_defaults_in_the_documents_are_ours() -> None:
    """The defaults in the tables of docs/migration.md and migration_zh.md are those of the code."""
    for page in ("migration.md", "migration_zh.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        rows = re.findall(r"^\| `--([a-z-]+)` \| [^|]+ \| `([^`|]+)`", text, flags=re.MULTILINE)
        assert len(rows) >= 10
        for name, ours in rows:
            setting = name.replace("-", "_")
            section = getattr(Config(), HOME[setting])
            assert str(getattr(section, setting)) == ours, name


@pytest.mark.parametrize(("setting", "word"), [(name, word) for name, words in VALUES.items() for word in words])
def test_words_of_other_frameworks_are_translated_without_any_flag_of_theirs(setting: str, word: str) -> None:
    """As with the `args_defaults` of a script, which may name a tokenizer or a norm of Megatron-LM."""
    notes: list[str] = []
    more = {"lr_decay_style": "WSD"} if setting == "lr_wsd_decay_style" else {}
    config = parse(["--vocab-size", "64", "--train-iters", "8"], {**more, setting: word}, 1, notes.append)
    flat = {name: value for section in config.to_dict().values() for name, value in section.items()}
    assert flat[setting] == VALUES[setting][word]


def test_a_setting_may_need_a_flag_that_is_translated_later() -> None:
    """--lr-wsd-decay-samples needs --train-samples, which follows from --train-tokens and --seq-length."""
    flags = "--seq-length 128 --train-tokens 128000 --lr-decay-style WSD --lr-wsd-decay-samples 100"
    config = parse(flags.split())
    assert (config.train.train_samples, config.optim.lr_wsd_decay_samples) == (1000, 100)
    with pytest.raises(ConfigError, match="--lr-wsd-decay-samples"):
        parse(flags.replace("--train-tokens 128000", "--train-tokens 1280").split())  # 10 samples


@pytest.mark.parametrize("stage", ["", "--zero-stage 2 --bf16"])
def test_a_flag_that_is_false_sets_no_number(stage: str) -> None:
    config = parse(f"--use-distributed-optimizer false {stage}".split())
    assert config.parallel.zero_stage == (2 if stage else None)


@pytest.mark.parametrize(
    ("key", "setting"),
    [("untie_embeddings_and_output_weights", "tie_embeddings"), ("disable_bias_linear", "hidden_bias")],
)
def test_a_false_turns_on_what_the_name_turns_off(key: str, setting: str, tmp_path: Path) -> None:
    assert not getattr(parse([], DEFAULTS["llama"]).model, setting)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({key: False}))
    notes: list[str] = []
    config = parse(["--config", str(path)], DEFAULTS["llama"], notify=notes.append)
    assert getattr(config.model, setting) and len(notes) == 1 and flag(setting) in notes[0]


@pytest.mark.parametrize(("family", "has_bias"), [("gpt2", True), ("llama", False)])
def test_a_qkv_bias_that_is_false_leaves_the_bias_to_other_settings(
    family: str, has_bias: bool, tmp_path: Path
) -> None:
    """In Megatron-LM, the QKV projection has a bias if add_qkv_bias or add_bias_linear is True."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"add_qkv_bias": False}))
    model = parse(["--config", str(path)], DEFAULTS[family]).model
    assert (model.qkv_bias, model.has_qkv_bias) == (None, has_bias)
    path.write_text(json.dumps({"add_qkv_bias": False, "disable_bias_linear": False}))
    assert parse(["--config", str(path)], DEFAULTS[family]).model.has_qkv_bias


@pytest.mark.parametrize("start", [0, 0.0])
def test_a_file_may_say_that_the_warmup_starts_from_0(start: float, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"lr_warmup_init": start}))
    config, notes = taken(f"--config {path}")
    assert config == taken("")[0] and len(notes) == 1 and "--lr-warmup-init" in notes[0]
    path.write_text('{"lr_warmup_init": 1e-7}')
    with pytest.raises(ConfigError, match="--lr-warmup-init"):
        taken(f"--config {path}")


@pytest.mark.parametrize(
    ("key", "setting", "values"),
    [
        ("bf16", "precision", {"true": "bf16", "false": "auto"}),
        ("fp16", "precision", {"True": "fp16", "False": "auto"}),
        ("tie_word_embeddings", "tie_embeddings", {"true": True, "false": False}),
        ("disable_bias_linear", "hidden_bias", {"true": False, "false": True}),
    ],
)
def test_a_switch_in_a_file_is_true_or_false_or_refused(
    key: str, setting: str, values: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    for word, expected in values.items():
        path.write_text(json.dumps({key: word}))
        config, _ = taken(f"--config {path}")
        assert getattr(config.train if setting == "precision" else config.model, setting) == expected
    for value in (0, 1, "no"):
        path.write_text(json.dumps({key: value}))
        with pytest.raises(ConfigError, match=f"a.json: --{key.replace('_', '-')} "):
            taken(f"--config {path}")
        with pytest.raises(ConfigError, match=f"args_defaults: --{key.replace('_', '-')} "):
            parse([], {**DEFAULTS["gpt2"], key: value})


def test_a_false_that_is_ignored_gets_a_note_if_the_run_has_what_it_denies(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"swiglu": False, "bf16": False}))
    notes: list[str] = []
    parse(["--config", str(path)], DEFAULTS["llama"], notify=notes.append)
    assert len(notes) == 1 and "--swiglu False" in notes[0] and "--activation swiglu" in notes[0]
    assert taken(f"--config {path}")[1] == []


@pytest.mark.parametrize(
    ("ds_config", "flags", "is_accepted"),
    [
        ({}, "--bf16", True),
        ({"zero_optimization": {"stage": 1}}, "--bf16", True),
        ({"zero_optimization": {"stage": 2}}, "--bf16", False),
        ({"zero_optimization": {"stage": 2}, "communication_data_type": "fp32"}, "--bf16", True),
        ({"communication_data_type": "bf16"}, "--bf16", False),
        ({"communication_data_type": "fp16"}, "--precision fp32", False),
        ({"communication_data_type": "fp32"}, "--fp16", False),
    ],
)
def test_sums_in_fp32_are_accepted_only_if_the_ds_config_leaves_them_in_fp32(
    ds_config: dict[str, Any], flags: str, is_accepted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config))
    line = f"--accumulate-allreduce-grads-in-fp32 {flags} --pipe-parallel-size 0 --deepspeed-config {path}"
    if not is_accepted:
        with pytest.raises(ConfigError, match="--accumulate-allreduce-grads-in-fp32"):
            taken(line, 2)
        return
    resolved = resolve(taken(line, 2)[0], 2, fast_bf16=True)
    assert resolved.deepspeed["communication_data_type"] == "fp32"
    assert resolved.deepspeed["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("key", ["hysteresis", "initial_scale_power"])
@pytest.mark.parametrize("value", [[2], "two", {}], ids=str)
def test_a_value_of_fp16_must_be_a_number_and_the_error_names_the_file(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"fp16": {"enabled": True, key: value}}))
    with pytest.raises(ConfigError, match=f"{path}.*{key}"):
        taken(f"--accumulate-allreduce-grads-in-fp32 --deepspeed-config {path}", 2)
