"""Users' models: examples/pretrain_decoder.py has equal losses in every layout; unusual models train and resume."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.pretrain_decoder import layer_list
from megatron import get_args, mpu
from megatron.checkpointing import CheckpointReader, find_checkpoint
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.tokenizer import load_tokenizer
from megatron.training import pretrain
from tds.pipe import LayerSpec, PipelineModule, SequentialModule, StockPipelineModule, seeded_layers
from tests.checkpoints.runs import whole_tensors
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, RankFailure, command, covering, losses, on_ranks, train

SHAPE = {"--num-layers": 3, "--hidden-size": 16, "--num-attention-heads": 2, "--seq-length": 16}
# (number of ranks, number of stages, tensor-parallel size, --gas, further flags)
LAYOUTS = [
    (1, 0, 1, 4, ""),
    (2, 0, 1, 2, "--zero-stage 2"),
    (2, 0, 2, 4, ""),
    (4, 2, 2, 4, ""),
    (4, 2, 1, 2, "--zero-stage 1"),
    (2, 2, 1, 4, "--pipeline-schedule zb-h1"),
]


def _flags(data: str, vocab: str, stages: int, model: int, gas: int, iterations: int, more: str = "") -> list[str]:
    shape = [str(word) for item in SHAPE.items() for word in item]
    given = (
        f"--batch-size 2 --gas {gas} --lr 0.01 --lr-decay-iters 6 --train-iters {iterations} --save-interval 3 "
        "--log-interval 1 "
        f"--split 90,10,0 --precision fp32 --eval-iters 1 --pipe-parallel-size {stages} --model-parallel-size "
        f"{model} {more}"
    )
    return ["--data-path", data, "--vocab-file", vocab, *shape, *given.split()]


def _train(folder: Path, layout: tuple[int, int, int, int, str], iterations: int, *given: str) -> list[float]:
    ranks, *rest, more = layout
    rows = train("examples.pretrain_decoder", ranks, folder, *_flags(*given, *rest, iterations, more))  # type: ignore[arg-type]
    return losses(rows)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("decoder")
    return folder, _train(folder, (1, 1, 1, 4, ""), 6, tiny_data, vocab_file)


@FULL
def test_muon_has_to_know_the_hidden_matrices(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Muon is refused for a model of custom layers if no weight has the attribute use_muon."""
    with pytest.raises(RankFailure, match="--optimizer muon.*use_muon"):
        _train(tmp_path, (1, 0, 1, 4, "--optimizer muon"), 1, tiny_data, vocab_file)


def _by_plain_torch(weights: dict[str, Tensor], text: Tensor, heads: int) -> Tensor:
    """Return the mean loss, a scalar, of text [b, s + 1], computed by plain torch."""
    tokens, labels = text[:, :-1], text[:, 1:]
    words = weights["tied_modules.embedding.word_embeddings.weight"]
    hidden = words[tokens] + weights["tied_modules.embedding.position_embeddings"][: tokens.shape[1]]
    b, s, h = hidden.shape

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (h,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    for i in range(1, SHAPE["--num-layers"] + 1):
        mixed = linear(f"{i}.attention.query_key_value", norm(f"{i}.input_layernorm", hidden))
        query, key, value = mixed.view(b, s, heads, 3, h // heads).permute(3, 0, 2, 1, 4)
        scores = query @ key.transpose(-1, -2) / (h // heads) ** 0.5
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(b, s, h)
        hidden = hidden + linear(f"{i}.attention.dense", context)
        inner = F.gelu(linear(f"{i}.mlp.dense_h_to_4h", norm(f"{i}.post_attention_layernorm", hidden)))
        hidden = hidden + linear(f"{i}.mlp.dense_4h_to_h", inner)
    logits = norm(str(SHAPE["--num-layers"] + 1), hidden) @ words.T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_first_loss_is_that_of_plain_torch(
    expected: tuple[Path, list[float]], tiny_data: str, vocab_file: str
) -> None:
    size = load_tokenizer(vocab_file).vocab_size
    length = SHAPE["--seq-length"]
    (samples, _, _), _ = build_train_valid_test_datasets([tiny_data], "90,10,0", length, 1234, size)
    text = torch.stack([torch.as_tensor(samples[i]["text"]) for i in range(8)]).long()
    with seeded_layers(1234):
        model = SequentialModule(layer_list(size, SHAPE["--hidden-size"], 2, SHAPE["--num-layers"], length))
    weights = {name: p.detach()[:size] if "word" in name else p.detach() for name, p in model.named_parameters()}
    assert expected[1][0] == pytest.approx(_by_plain_torch(weights, text, 2).item(), rel=1e-6)
    assert expected[1][-1] < expected[1][0] - 0.2


@pytest.mark.parametrize("layout", covering(LAYOUTS, lambda layout: layout[:3] != (2, 0, 2)), ids=str)
def test_every_layout_has_the_same_losses(
    layout: tuple[int, int, int, int, str],
    expected: tuple[Path, list[float]],
    tmp_path: Path,
    tiny_data: str,
    vocab_file: str,
) -> None:
    assert _train(tmp_path, layout, 6, tiny_data, vocab_file) == pytest.approx(expected[1], rel=1e-5)


def test_saved_on_one_layout_and_resumed_on_another(
    expected: tuple[Path, list[float]], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = _train(tmp_path, (4, 2, 2, 4, ""), 3, tiny_data, vocab_file)
    for layout, iterations in (((2, 0, 1, 2, "--zero-stage 2"), 4), ((2, 2, 1, 4, ""), 5), ((1, 0, 1, 4, ""), 6)):
        found = _train(tmp_path, layout, iterations, tiny_data, vocab_file)
    assert found == pytest.approx(expected[1], rel=1e-5)


def test_it_writes(expected: tuple[Path, list[float]]) -> None:
    done = command("python", "examples/write_with_decoder.py", str(expected[0]), "春天")
    assert done.returncode == 0, done.stderr
    assert re.findall("^春天.+", done.stdout, flags=re.MULTILINE)
    done = command("python", "examples/write_with_decoder.py", str(expected[0]), "春天" * 20)
    assert re.search(r"^the prompt has \d+ tokens, but the model reads at most 15", done.stderr, re.MULTILINE)
    done = command("python", "examples/write_with_decoder.py", str(expected[0] / "nowhere"), "春天")
    assert (
        done.returncode == 1
        and SENTENCES["nowhere_holds_no_checkpoint"] in done.stderr
        and "Traceback" not in done.stderr
    )


# ------------------------------------------------------------------ unusual models


def _first_values(stock: bool, stages: int) -> dict[str, Tensor]:
    import torch.distributed as dist

    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    with seeded_layers(7):
        kind: Any = StockPipelineModule if stock else PipelineModule
        model = kind(specs, num_stages=stages, partition_method="uniform")
    assert dist.get_world_size() == stages
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stock", [False, True], ids=["tds", "deepspeed"])
def test_layers_of_torch_begin_the_same_on_any_stage(stock: bool) -> None:
    (whole,) = on_ranks(1, _first_values, stock, 1)
    parts = on_ranks(2, _first_values, stock, 2)
    together = {name: value for part in parts for name, value in part.items()}
    assert sorted(together) == sorted(whole) and len(parts[0]) == 4
    assert all(torch.equal(together[name], whole[name]) for name in whole)
    assert not torch.equal(whole["0.weight"], whole["2.weight"])


class _Odd(nn.Module):
    """A model with a frozen layer, an unused layer and a parameter with one element."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(8, vocab_size)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        hidden: Tensor = self.out(self.factor * self.frozen(self.table(inputs[0].t())))
        return hidden


class _Still(_Odd):
    """A model whose output and gradients are all zero."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        del self.unused
        self.frozen.weight.data.zero_(), self.table.weight.data.zero_()
        self.out.requires_grad_(False)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return super().forward(inputs) * 0.0


def _run(kind: type[nn.Module], argv: list[str]) -> None:
    import examples.pretrain_decoder as entry

    pretrain(
        entry.train_valid_test_datasets_provider,
        lambda: kind(get_args().vocab_size),
        entry.forward_step,
        name="odd",
        argv=argv,
        exit=False,
    )


def _losses_of(kind: type[nn.Module], argv: list[str]) -> tuple[str, list[float]]:
    import contextlib
    import io
    import json

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _run(kind, argv)
    rows = Path(argv[argv.index("--run-dir") + 1], "metrics.jsonl").read_text().splitlines()
    return said.getvalue(), losses([json.loads(row) for row in rows])


@pytest.mark.parametrize("more", ["", "--zero-stage 1", "--zero-stage 3"], ids=["plain", "ZeRO 1", "ZeRO 3"])
def test_frozen_and_unused_weights_are_saved_and_resumed(
    more: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    def flags(name: str, iterations: int) -> list[str]:
        return ["--run-dir", str(tmp_path / name), *_flags(tiny_data, vocab_file, 0, 1, 4, iterations, more)]

    ((said, whole),) = on_ranks(1, _losses_of, _Odd, flags("whole", 6))
    assert "warning: no gradient reaches unused.weight, unused.bias: the loss does not depend on these" in said
    on_ranks(1, _losses_of, _Odd, flags("halves", 3))
    ((_, resumed),) = on_ranks(1, _losses_of, _Odd, flags("halves", 6))
    assert resumed == whole


def test_a_gradient_of_zero_is_said(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    argv = ["--run-dir", str(tmp_path), *_flags(tiny_data, vocab_file, 0, 1, 4, 3)]
    ((said, _),) = on_ranks(1, _losses_of, _Still, argv)
    assert said.count("warning: the gradient of every parameter is 0, so no parameter is trained") == 1


class _Counting(_Odd):
    """A model with three buffers: a call counter, a constant, and one that is not persistent."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        del self.unused
        for name in ("calls", "constant", "scratch"):
            self.register_buffer(name, torch.zeros(1), persistent=name != "scratch")

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        self.calls += 1
        self.scratch += 1
        return super().forward(inputs) + self.constant


def test_buffers_are_saved_and_resumed(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    def flags(iterations: int) -> list[str]:
        return ["--run-dir", str(tmp_path), *_flags(tiny_data, vocab_file, 0, 1, 4, iterations)]

    ((said, _),) = on_ranks(1, _losses_of, _Counting, flags(2))
    assert "warning" not in said
    on_ranks(1, _losses_of, _Counting, flags(4))
    reader = CheckpointReader(find_checkpoint(str(tmp_path)))
    assert reader.read("buffer.calls", 0, 0, 1).item() >= 4  # 4 iterations; evaluations may add calls
    assert "buffer.scratch" not in reader.tensors


class _Dropping(nn.Module):
    """A model with nn.Dropout, whose masks must be equal on all tensor-parallel ranks."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table, self.dropout = mpu.VocabParallelEmbedding(vocab_size, 16), nn.Dropout(0.5)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.table.logits(self.dropout(self.table(inputs[0].t())))


def test_dropout_of_torch_is_that_of_all_ranks_and_goes_on_after_a_resume(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    def flags(name: str, ranks: int, iterations: int) -> list[str]:
        return ["--run-dir", str(tmp_path / name), *_flags(tiny_data, vocab_file, 0, ranks, 4, iterations)]

    ((_, alone),) = on_ranks(1, _losses_of, _Dropping, flags("alone", 1, 6))
    (_, found), _ = on_ranks(2, _losses_of, _Dropping, flags("two", 2, 3))
    assert found == pytest.approx(alone[:3], rel=1e-6)
    ((_, resumed),) = on_ranks(1, _losses_of, _Dropping, flags("two", 1, 6))
    assert resumed == pytest.approx(alone, rel=1e-6)


# Wrong line of code that a script executes before pretrain() -> (stages, ranks, pattern of the error message).
MISTAKES = {
    "loss_of = lambda v: lambda logits, targets: sum(a for a, b, c in [targets])": (
        0,
        1,
        r"^own.py: not enough values to unpack \(expected 3, got 2\) \(.*own.py, line \d+, in <genexpr>\)$",
    ),
    "forward_step = lambda batches, model: torch.zeros(())": (
        0,
        1,
        r"forward_step returns a tensor of shape \[\]: return \(loss, anything\), for example `return loss, \{\}`",
    ),
    "forward_step = lambda batches, model: (torch.zeros(3), None)": (
        0,
        1,
        r"forward_step returns a tensor of shape \[3\] as the loss: return a tensor of one number",
    ),
    "inner = get_batch_pipe; get_batch_pipe = lambda data: (*inner(data), None)": (
        1,
        1,
        r"a batch is \(inputs, labels\), each a tensor or a tuple, not 3 values; convert what the iterator returns "
        r"in model._megatron_batch_fn",
    ),
    "get_batch_pipe = None": (
        1,
        1,
        r"not dict; convert what the iterator returns in model._megatron_batch_fn or engine.set_batch_fn",
    ),
    "get_topology = mpu.get_topology; Module = PipelineModule; PipelineModule = lambda layers, topology, loss_fn: "
    "Module(layers, num_stages=1, loss_fn=loss_fn)": (
        1,
        2,
        r"topology does not match --model-parallel-size 2: build it with topology=mpu.get_topology\(\), not num_stages",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_script_is_named(mistake: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    stages, ranks, message = MISTAKES[mistake]
    text = (ROOT / "examples" / "pretrain_decoder.py").read_text().replace("resolve().parent.parent", "parent")
    script = tmp_path / "own.py"
    script.write_text(text.replace('if __name__ == "__main__":\n', f'if __name__ == "__main__":\n    {mistake}\n'))
    flags = ["--run-dir", str(tmp_path), *_flags(tiny_data, vocab_file, stages, ranks, 4, 3)]
    launch = ["tools/launch.py", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = command("python", *launch, str(script), *flags, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert re.search(message, done.stderr, flags=re.MULTILINE), done.stderr


class _Scalar(_Odd):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.factor = nn.Parameter(torch.tensor(1.0))


NUMBERS = [
    "",
    "--zero-stage 1",
    "--zero-stage 1 --no-overlap-grad-reduce",
    "--zero-stage 2",
    "--precision bf16",
    "--optimizer sgd",
    "--async-save --ema-decay 0.5 --skip-step-sigma 9",
]


@pytest.mark.parametrize("more", covering(NUMBERS, ["", "--zero-stage 1"].__contains__))
def test_a_weight_without_dimensions_is_trained_and_resumed(
    more: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """The losses are those of the same model with a weight of one element, also after a resume."""

    def flags(name: str, iterations: int) -> list[str]:
        return ["--run-dir", str(tmp_path / name), *_flags(tiny_data, vocab_file, 0, 1, 2, iterations, more)]

    expected = on_ranks(2, _losses_of, _Odd, flags("expected", 6))[0][1]
    on_ranks(2, _losses_of, _Scalar, flags("number", 3))
    assert on_ranks(2, _losses_of, _Scalar, flags("number", 6))[0][1] == pytest.approx(expected, rel=1e-6)
    wanted = whole_tensors(tmp_path / "expected/checkpoints/iter_0000006")
    found = whole_tensors(tmp_path / "number/checkpoints/iter_0000006")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-7, err_msg=key)
    assert found["weight.factor"].shape == (1,) and found["weight.factor"] != 1.0


def test_zero_3_refuses_a_weight_without_dimensions(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    argv = ["--run-dir", str(tmp_path), *_flags(tiny_data, vocab_file, 0, 1, 4, 3, "--zero-stage 3")]
    with pytest.raises(RankFailure, match="factor.*ZeRO 0, 1 or 2"):
        on_ranks(1, _losses_of, _Scalar, argv)
