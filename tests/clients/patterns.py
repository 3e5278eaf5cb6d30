"""Small models, losses and data in the forms in which public projects give them to a PipelineModule."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from .common import MICROS, ROWS, WIDTH, Batch, sgd

VOCABULARY, LENGTH = 11, 6


@dataclass
class Pattern:
    """Layers, loss, data and settings of one project; two patterns of the same function have equal weights and data."""

    layers: Sequence[Any]
    loss: Callable[[Any, Any], Tensor]
    data: Iterator[Any]
    module: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the PipelineModule
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd  # None in `initialize` if the ds_config names one
    batch_fn: Callable[[Any], Batch] | None = None
    resets: bool = False  # whether the project resets the shapes before each step

    def batches(self) -> Iterator[Batch]:
        """Return the data as (inputs, labels)."""
        return map(self.batch_fn, self.data) if self.batch_fn else self.data


def built(specs: Sequence[Any]) -> list[Any]:
    """Return the layers of one process, with one module per tie."""
    tied: dict[str, nn.Module] = {}
    found = []
    for spec in specs:
        if isinstance(spec, TiedLayerSpec):
            module = tied.setdefault(spec.key, spec.build())
            found.append(module)
            if spec.forward_fn:
                found[-1] = partial(spec.forward_fn, module)
        else:
            found.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    return found


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


# ---------------------------------------------------------- a list of layers and functions


def images() -> Pattern:
    """Images, with the list of a sequential network's layers: in-place ReLUs and a function.

    tests/ranks/test_tds.py trains such a list with `training_data`.
    """
    layers = [
        seeded(1, lambda: nn.Conv2d(1, 2, 3, padding=1)),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        seeded(2, lambda: nn.Conv2d(2, 4, 3, padding=1)),
        nn.ReLU(inplace=True),
        lambda x: torch.flatten(x, 1),
        seeded(3, lambda: nn.Linear(16, 8)),
        seeded(4, lambda: nn.Linear(8, 3)),
    ]
    return Pattern(layers, nn.CrossEntropyLoss(), _pictures())


def _pictures() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    while True:
        pixels = torch.randn(ROWS, 1, 4, 4, generator=generator)
        yield pixels, torch.randint(3, (ROWS,), generator=generator)


# ---------------------------------------------------------- a language model whose layers take tuples


class Embedding(nn.Module):
    """First layer: token ids to hidden states; positions and mask pass through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = seeded(1, lambda: nn.Embedding(VOCABULARY, WIDTH))

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        ids, positions, mask = inputs
        return self.word_embeddings(ids), positions, mask


class Block(nn.Module):
    """A layer that depends on positions and adds nothing to masked tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = seeded(seed, lambda: nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, positions, mask = inputs
        angles = torch.cos(positions.float() / 10)[..., None]
        added = torch.tanh(self.inner(hidden * angles))
        return hidden + added * mask[..., None], positions, mask


class Head(nn.Module):
    """Last layer: hidden states to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.project = seeded(2, lambda: nn.Linear(WIDTH, VOCABULARY))

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.project(inputs[0])
        return logits


def _texts(lengths: Iterator[int]) -> Iterator[Any]:
    """Yield ((ids, positions, mask), labels); labels of the padding are -100."""
    generator = torch.Generator().manual_seed(5)
    for length in lengths:
        ids = torch.randint(VOCABULARY, (ROWS, length + 1), generator=generator)
        mask = torch.ones(ROWS, length, dtype=torch.long)
        mask[0, -2:] = 0
        positions = torch.arange(length).expand(ROWS, length).contiguous()
        labels = ids[:, 1:].masked_fill(mask == 0, -100)
        yield (ids[:, :-1].contiguous(), positions, mask), labels


def padded_texts() -> Pattern:
    """Padded texts, a tuple with two integer tensors over each boundary, and AdamW from the ds_config."""
    specs = [LayerSpec(Embedding), LayerSpec(Block, 3), LayerSpec(Block, 4), LayerSpec(Head)]
    settings = {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1}
    return Pattern(
        specs,
        cross_entropy,
        _texts(itertools.repeat(LENGTH)),
        config={"optimizer": {"type": "AdamW", "params": {**settings, "torch_adam": True}}},
        optimizer=lambda module: torch.optim.AdamW(module.parameters(), **settings),
    )


# ---------------------------------------------------------- layers that take their parts of a whole model


class WholeModel(nn.Module):
    """A language model that exists before the pipeline, as loaded from a hub."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embed = Embedding()
        self.blocks = nn.ModuleList(Block(3 + at) for at in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = Head()
        if frozen:
            for each in (self.embed, self.blocks, self.head):
                each.requires_grad_(False)


class PartOfModel(nn.Module):
    """A layer that gets the whole model and keeps one block with its norm."""

    def __init__(self, model: WholeModel, at: int) -> None:
        super().__init__()
        self.embed = model.embed if at == 0 else None
        self.block = model.blocks[at]
        self.norm = model.norms[at]
        self.head = model.head if at == 3 else None

    def forward(self, inputs: Any) -> Any:
        if self.embed is not None:
            inputs = self.embed(inputs)
        hidden, positions, mask = self.block(inputs)
        outputs = self.norm(hidden), positions, mask
        return outputs if self.head is None else self.head(outputs)


def parts_of_a_frozen_model() -> Pattern:
    """Adapters, here the norms, of a frozen model that each LayerSpec gets whole."""
    model = WholeModel(frozen=True)
    specs = [LayerSpec(PartOfModel, model, at) for at in range(4)]
    return Pattern(specs, cross_entropy, _texts(itertools.repeat(LENGTH)))


def long_texts() -> Pattern:
    """Texts of another length in each micro-batch, with `dynamic_shape`, and parts of a whole model."""
    model = WholeModel(frozen=False)
    specs = [LayerSpec(PartOfModel, model=model, at=at) for at in range(4)]
    lengths = itertools.cycle((4, 9, 7, 5, 8))
    return Pattern(specs, cross_entropy, _texts(lengths), module={"dynamic_shape": True})


# ---------------------------------------------------------- a tied embedding with recomputation


class TokenEmbedding(nn.Module):
    """An embedding that the last layer uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(1, lambda: nn.Embedding(VOCABULARY, WIDTH)).weight.detach())

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class Recomputed(nn.Module):
    """A layer whose activations are recomputed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = seeded(seed, lambda: nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


def logits(embedding: TokenEmbedding, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, embedding.weight)


def _ids() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield {"text": torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)}


def _inputs_and_labels(batch: dict[str, Tensor] | None) -> Any:
    if batch is None:
        return None
    text = batch["text"]
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def tied_embedding() -> Pattern:
    """An embedding tied to the logits, recomputation of the layers of one class, and batches as dicts."""
    specs = [
        TiedLayerSpec("embed", TokenEmbedding),
        LayerSpec(Recomputed, 3),
        LayerSpec(Recomputed, 4),
        TiedLayerSpec("embed", TokenEmbedding, forward_fn=logits),
    ]
    recomputation = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Recomputed"]}
    return Pattern(specs, cross_entropy, _ids(), recomputation, batch_fn=_inputs_and_labels)


# ---------------------------------------------------------- diffusion: sizes in buckets, labels with a mask


def _masked_mse(outputs: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    target, mask = labels
    return ((outputs - target).square() * mask).mean()


def _noise() -> Iterator[Any]:
    """Yield (noisy image, (target, mask)), with another size in each step."""
    generator = torch.Generator().manual_seed(5)
    for size in (3, 7, 5, 6):
        for _ in range(MICROS):
            noisy = torch.randn(ROWS, size, WIDTH, generator=generator)
            target = torch.randn(ROWS, size, WIDTH, generator=generator)
            mask = torch.rand(ROWS, size, 1, generator=generator)
            yield noisy, (target, mask)


def buckets_of_sizes() -> Pattern:
    """Images of one size in each step, before which the project calls `reset_activation_shape`.

    The project recomputes all layers by a re-entrant function of its own.
    """
    specs = [LayerSpec(Recomputed, seed) for seed in range(4)]
    recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    settings = {"pipeline": {"activation_checkpoint_interval": 1}}
    return Pattern(specs, _masked_mse, _noise(), {"activation_checkpoint_func": recompute}, settings, resets=True)


PATTERNS: dict[str, Callable[[], Pattern]] = {
    each.__name__: each
    for each in (images, padded_texts, parts_of_a_frozen_model, long_texts, tied_embedding, buckets_of_sizes)
}
