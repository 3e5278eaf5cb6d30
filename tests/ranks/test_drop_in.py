"""Scripts written for DeepSpeed have the same losses with `tds`, with DeepSpeed, and in one process of plain torch."""

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.sentences import SENTENCES
from tests.support import RankFailure, covering, on_ranks

STEPS, MICROS, ROWS = 4, 4, 4


def engines(name: str) -> Any:
    """Return the module `name`, tds or deepspeed, whose engines can train on CPUs."""
    import tds

    assert tds  # importing tds patches DeepSpeed for training on CPUs
    return importlib.import_module(name)


# ------------------------------------------------------------ the AlexNet tutorial


def alexnet() -> list[Any]:
    """Return the layers of a small AlexNet, as in DeepSpeed's tutorial, with in-place ReLU and without dropout."""
    torch.manual_seed(1)
    relu = lambda: nn.ReLU(inplace=True)  # noqa: E731
    features = [
        nn.Conv2d(3, 8, 3, padding=1),
        relu(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        relu(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1),
        relu(),
        nn.Conv2d(16, 12, 3, padding=1),
        relu(),
        nn.Conv2d(12, 12, 3, padding=1),
        relu(),
        nn.MaxPool2d(2),
    ]
    classifier = [
        nn.Dropout(0.0),
        nn.Linear(12, 32),
        relu(),
        nn.Dropout(0.0),
        nn.Linear(32, 32),
        relu(),
        nn.Linear(32, 4),
    ]
    return [*features, nn.AdaptiveAvgPool2d(1), lambda x: torch.flatten(x, 1), *classifier]


def pictures() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(MICROS * ROWS) % 4
    inputs = torch.randn(len(labels), 3, 8, 8, generator=generator) * 0.3 + labels.view(-1, 1, 1, 1)
    return list(zip(inputs.split(ROWS), labels.split(ROWS), strict=True))


def _tutorial(name: str, stages: int, method: str) -> list[float]:
    engine_of = engines(name)
    more = {"example": pictures()[0][0]} if method == "balanced" else {}
    net = engine_of.pipe.PipelineModule(
        layers=alexnet(), loss_fn=nn.CrossEntropyLoss(), num_stages=stages, partition_method=method,
        activation_checkpoint_interval=0, **more,
    )  # fmt: skip
    parameters = [p for p in net.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    engine, *_ = engine_of.initialize(
        model=net, optimizer=torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        config={"train_batch_size": ROWS * MICROS, "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0,
                "steps_per_print": 10**9},
    )  # fmt: skip
    data = pictures()  # reused in every step, so an engine that changes them gives wrong losses
    return [engine.train_batch(iter(data)).item() for _ in range(STEPS)]


def _learn(losses: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Make an optimizer step in plain torch on the mean of `losses`, the micro-batches' losses; return the mean."""
    total = torch.stack(losses).mean()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    return total.item()


def one_process() -> list[float]:
    layers = alexnet()
    optimizer = torch.optim.SGD(
        [p for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()], lr=0.1, momentum=0.9
    )
    found = []
    for _ in range(STEPS):
        losses = []
        for x, y in pictures():
            for layer in layers:
                x = layer(x)
            losses.append(nn.functional.cross_entropy(x, y))
        found.append(_learn(losses, optimizer))
    return found


METHODS = ["uniform", "parameters", "type:conv|linear", "0,1,2,21,22", "balanced"]
NETS = list(itertools.product([2, 4], METHODS))


@pytest.mark.parametrize(
    "net", covering(NETS, {(2, "uniform"), (4, "uniform"), (4, "parameters")}.__contains__), ids=str
)
def test_the_alexnet_tutorial_with_every_way_to_cut(net: tuple[int, str]) -> None:
    stages, method = net
    if method[0] == "0" and stages == 2:
        method = "0,4,22"
    expected = one_process()
    assert expected[-1] < expected[0]
    ours = on_ranks(stages, _tutorial, "tds", stages, method)
    assert ours == [pytest.approx(expected, rel=1e-5)] * stages
    if method != "balanced" and method[0] != "0":  # DeepSpeed lacks "balanced" and lists of layer indices
        assert on_ranks(stages, _tutorial, "deepspeed", stages, method)[0] == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------ a GPT-NeoX-style script

VOCAB, HIDDEN, LENGTH = 17, 8, 6


class EmbeddingPipe(nn.Module):
    """Embedding layer: (tokens [b, s], mask) -> (hidden [b, s, h], mask)."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, inputs: Any) -> Any:
        tokens, mask = inputs
        return self.word_embeddings(tokens), mask


class ParallelTransformerLayerPipe(nn.Module):
    """Transformer layer: (hidden [b, s, h], mask) -> (hidden, mask); the mask is True where attention is forbidden."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.dense = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, inputs: Any) -> Any:
        hidden, mask = inputs
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / HIDDEN**0.5).masked_fill(mask, -1e4)
        hidden = hidden + self.dense(scores.softmax(-1) @ v)
        return hidden + self.mlp(hidden), mask


class NormPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, inputs: Any) -> Tensor:
        return self.norm(inputs[0] if isinstance(inputs, tuple) else inputs)  # type: ignore[no-any-return]


def logits_of(embedding: EmbeddingPipe, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, embedding.word_embeddings.weight)


def cross_entropy(logits: Tensor, labels: Any) -> Tensor:
    labels, mask = labels
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def _batch(tokens: Tensor) -> Any:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(len(tokens), -1, -1)
    return (tokens[:, :-1], mask), (tokens[:, 1:], torch.ones(len(tokens), LENGTH))


def _texts() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        yield {"text": torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)}


def _neox(
    name: str, stages: int, tensor: int, replicas: int, checkpoint: bool
) -> tuple[list[float], list[list[int]] | None]:
    engine_of = engines(name)
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=replicas)
    if checkpoint:
        engine_of.checkpointing.configure(None, partition_activations=True, num_checkpoints=4)
    else:
        engine_of.checkpointing.configure(None, partition_activations=False)
    torch.manual_seed(5)
    tie = {"tied_weight_attr": ["word_embeddings.weight"]}
    built = [EmbeddingPipe(), *(ParallelTransformerLayerPipe() for _ in range(4)), NormPipe()]
    specs = [
        TiedLayerSpec("embed", _Same, built[0], **tie),
        *(LayerSpec(ParallelTransformerLayerPipe) for _ in range(4)),
        LayerSpec(NormPipe),
        TiedLayerSpec("embed", _Same, built[0], forward_fn=logits_of, **tie),
    ]
    model = PipelineModule(
        layers=specs,
        topology=topology,
        loss_fn=cross_entropy,
        partition_method="type:transformer|mlp",
        activation_checkpoint_interval=1 if checkpoint else 0,
    )
    _same_weights(model, built)
    engine, *_ = engine_of.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0,
                "steps_per_print": 10**9, "pipeline": {"use_reentrant": False}},
    )  # fmt: skip
    engine.set_batch_fn(lambda batch: _batch(batch["text"]))
    found = [engine.train_batch(data_iter=_texts()).item() for _ in range(STEPS)]
    return found, _generate(engine)


class _Same(nn.Module):
    def __new__(cls, module: nn.Module) -> nn.Module:  # type: ignore[misc]
        return module


def _same_weights(model: Any, built: list[nn.Module]) -> None:
    """Copy the weights of `built`, all layers of the model, into the layers of this stage."""
    for index, call in zip(range(model._local_start, model._local_stop), model.forward_funcs, strict=True):
        if 0 < index < len(built):
            call.load_state_dict(built[index].state_dict())


def _generate(engine: Any) -> list[list[int]] | None:
    """Return greedily generated tokens; as in GPT-NeoX, each new token takes one eval_batch with one micro-batch."""
    engine.micro_batches = 1
    text = torch.zeros(2, LENGTH + 1, dtype=torch.int64)
    for place in range(1, LENGTH):
        _, logits = engine.eval_batch(iter([{"text": text}]), return_logits=True)
        following = logits[:, place - 1].argmax(-1) if logits is not None else torch.zeros(2, dtype=torch.int64)
        source = engine.grid.stage_to_global(engine.num_stages - 1)
        dist.broadcast(following, source, group=engine.grid.get_pipe_parallel_group())
        text[:, place] = following
    return text.tolist()


def neox_reference() -> list[float]:
    torch.manual_seed(5)
    built: list[Any] = [EmbeddingPipe(), *(ParallelTransformerLayerPipe() for _ in range(4)), NormPipe()]
    optimizer = torch.optim.SGD([p for layer in built for p in layer.parameters()], lr=0.3)
    found = []
    for _ in range(STEPS):
        losses = []
        for text in itertools.islice(_texts(), 4):
            hidden, labels = _batch(text["text"])
            for layer in built:
                hidden = layer(hidden)
            losses.append(cross_entropy(logits_of(built[0], hidden), labels))
        found.append(_learn(losses, optimizer))
    return found


@pytest.mark.parametrize(("stages", "tensor", "replicas"), [(2, 1, 1), (2, 1, 2)])
def test_a_script_in_the_manner_of_gpt_neox(stages: int, tensor: int, replicas: int) -> None:
    """A script in the style of GPT-NeoX has the same losses as one process, and all ranks generate the same text.

    There is no comparison with DeepSpeed's pipeline, which sends a bool mask only if the model's class has the name
    `GPT2ModelPipe`.
    """
    world, expected = stages * tensor * replicas, pytest.approx(neox_reference(), rel=1e-5)
    plain = on_ranks(world, _neox, "tds", stages, tensor, replicas, False)
    again = on_ranks(world, _neox, "tds", stages, tensor, replicas, True)
    assert [losses for losses, _ in plain] == [expected] * world
    assert [losses for losses, _ in again] == [expected] * world
    texts = [text for _, text in [*plain, *again]]
    assert all(text == texts[0] for text in texts)


# ------------------------------------------------------------------- checkpoints


def _small(count: int = 5) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


def _vectors() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        x, y = torch.randn(2, ROWS, 6, generator=generator)
        yield x, y


def _engine(name: str, stages: int, zero: int) -> Any:
    engine_of = engines(name)
    model = engine_of.pipe.PipelineModule(_small(), num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = {
        "train_batch_size": ROWS * MICROS,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return engine_of.initialize(model=model, optimizer=optimizer, config=config)[0]


def _save(name: str, folder: str, stages: int, zero: int) -> list[float]:
    engine, data = _engine(name, stages, zero), _vectors()
    for _ in range(3):
        engine.train_batch(data)
    engine.save_checkpoint(folder, "three", client_state={"seen": [1, 2]})
    return [engine.train_batch(data).item() for _ in range(2)]


def _load(name: str, folder: str, stages: int, zero: int, weights_only: bool) -> list[float]:
    engine, data = _engine(name, stages, zero), _vectors()
    how = {"load_module_only": True} if weights_only else {}
    path, client = engine.load_checkpoint(folder, "three", **how)
    assert path is not None
    assert client["seen"] == [1, 2]
    for _ in range(3 * MICROS):
        next(data)
    return [engine.train_batch(data).item() for _ in range(2)]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("one", "other"), [("tds", "deepspeed"), ("deepspeed", "tds")])
def test_checkpoints_go_over_to_deepspeed_and_back(tmp_path: Path, one: str, other: str, zero: int) -> None:
    expected = on_ranks(2, _save, one, str(tmp_path), 2, zero)[0]
    assert on_ranks(2, _load, other, str(tmp_path), 2, zero, False)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("one", ["tds", "deepspeed"])
def test_the_weights_of_a_checkpoint_go_over_to_another_number_of_stages(tmp_path: Path, one: str) -> None:
    """Weights in DeepSpeed's checkpoint format, written by tds or DeepSpeed for two stages, load into three stages."""
    expected = on_ranks(2, _save, one, str(tmp_path), 2, 0)[0]
    found = on_ranks(3, _load, "tds", str(tmp_path), 3, 0, True)[0]
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


def _interleave(folder: str) -> None:
    import tds

    _save("tds", folder, 2, 0)
    model = tds.PipelineModule(_small(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", chunks=2)
    config = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": ROWS, "pipeline": {"schedule": "interleaved"}}
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)
    path, client = engine.load_checkpoint(folder, "three", load_module_only=True)
    assert path is not None
    assert client["seen"] == [1, 2]
    assert "tds_layout" not in client
    engine.load_checkpoint(folder, "three")


def test_optimizer_states_do_not_go_to_other_layers(tmp_path: Path) -> None:
    """Loading optimizer states is refused if the model is now split into other stages.

    DeepSpeed's format stores the states by position, so they could silently go to wrong weights of equal shape.
    """
    with pytest.raises(RankFailure, match=SENTENCES["was_cut_at_0_3_5"]):
        on_ranks(2, _interleave, str(tmp_path))


def _step_columns(zero: int) -> list[list[float]]:
    """Return the weight of `tds` and that of torch's plain AdamW after three steps; it is some columns of a tensor."""
    import tds

    def built() -> nn.Linear:
        model = nn.Linear(4, 3, bias=False)
        columns = torch.arange(24.0).view(3, 8).sin()[:, 2:6]
        model.weight = nn.Parameter(columns)
        return model

    settings = {"lr": 0.1, "weight_decay": 0.1}
    config = {"train_batch_size": 4, "zero_optimization": {"stage": zero}, "gradient_clipping": 0.0}
    engine, *_ = tds.initialize(model=built(), config=config | {"optimizer": {"type": "AdamW", "params": settings}})
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=False)
    for step in range(3):
        inputs = torch.arange(16.0).view(4, 4).add(step).cos()
        engine.backward(engine(inputs).square().mean())
        engine.step()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [each.weight.detach().flatten().tolist() for each in (engine.module, model)]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_weight_with_gaps_in_memory_steps_as_in_torch(zero: int) -> None:
    ((found, expected),) = on_ranks(1, _step_columns, zero)
    assert found == pytest.approx(expected, rel=1e-5)
