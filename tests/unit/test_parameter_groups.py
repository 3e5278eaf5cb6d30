"""Weight decay applies to matrices and, unless excluded, to embeddings."""

import pytest
from torch import nn

from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model, global_parameters
from megatron.model.embedding import embedding_weights
from megatron.optim.optimizer import parameter_groups

SIZES = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 40"


def _decaying(model: nn.Module, embeddings: bool) -> set[str]:
    names = {p: name for name, p in global_parameters(model)}
    decays, others = parameter_groups(model, 0.1, () if embeddings else embedding_weights(model))
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {*decays["params"], *others["params"]} == set(names)
    return {names[p] for p in decays["params"]}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_be_left_out(tied: bool) -> None:
    """Embeddings can be excluded from weight decay; an untied output matrix does not count as an embedding."""
    model = GPT2Model(parse(f"{SIZES} {'' if tied else '--no-tie-embeddings'}".split()))
    left_out = {"embedding.word_embeddings.weight", "position_embedding.weight"}
    everything = {name for name, p in global_parameters(model) if p.dim() > 1}
    assert _decaying(model, True) == everything
    assert _decaying(model, False) == everything - left_out
    assert ("head.word_embeddings.weight" in everything) != tied


def test_of_t5_those_of_positions_too() -> None:
    model = T5Model(parse(f"{SIZES} --family t5 --enc-seq-length 8 --dec-seq-length 8".split()))
    left_out = {"embedding.word_embeddings.weight", "encoder.start.weight", "decoder.start.weight"}
    assert _decaying(model, True) - _decaying(model, False) == left_out
