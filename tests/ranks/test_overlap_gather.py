"""`overlap_gather` and --overlap-param-gather change no number, although all-gathers end late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tds
from tds.pipe import SequentialModule, TiedLayerSpec
from tests.support import covering, on_ranks

WIDTH, MICROS = 6, 4


class Late:
    """An all-gather that runs only when it is waited for; until then, the shares of other replicas are NaN."""

    def __init__(self, whole: Tensor, share: Tensor, group: Any, gather: Callable[..., Any]) -> None:
        kept = share.clone()
        whole.fill_(float("nan"))
        share.copy_(kept)
        self._gather = lambda: gather(whole, share, group).wait()
        self._share, self._kept, self._done = share, kept, False

    def wait(self) -> None:
        if not self._done:
            self._share.copy_(self._kept)  # messages that are on their way do not change if a checkpoint is loaded
            self._gather()
            self._done = True


def gather_late(patch: pytest.MonkeyPatch) -> None:
    """Let all-gathers of weights be `Late`."""
    honest = tds.buckets.gather_shares
    patch.setattr(tds.buckets, "gather_shares", lambda *given: Late(*given, honest))


class Reader(nn.Module):
    """A layer that uses the weight of an earlier layer without owning it."""

    def __init__(self, earlier: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._earlier = [earlier]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self._earlier[0].weight.detach()  # type: ignore[no-any-return]


def _tied(layer: nn.Module, x: Tensor) -> Tensor:
    return x @ layer.weight.t()  # type: ignore[operator, no-any-return]


def _model(stages: int, chunks: int) -> Any:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    middle = [first, Reader(first)] if stages == 1 else [nn.Linear(WIDTH, WIDTH) for _ in range(stages * chunks)]
    tied = [
        TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight"], **more)
        for more in ({}, {"forward_fn": _tied})
    ]
    layers = [tied[0], *middle, tied[1]] if chunks == 1 else middle
    if not stages:
        return SequentialModule([first, Reader(first), nn.Linear(WIDTH, WIDTH)])
    return tds.PipelineModule(layers, num_stages=stages, chunks=chunks, loss_fn=nn.functional.mse_loss)


def _losses(stages: int, chunks: int, overlap: bool, bf16: bool, late: bool, folder: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        if late:
            gather_late(patch)
        net = _model(stages, chunks)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROS, "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 1}, "bf16": {"enabled": bf16},
            "pipeline": {"schedule": "interleaved" if chunks > 1 else "1f1b", "timeout": 60},
        }  # fmt: skip
        optimizer = tds.DistributedOptimizer(
            torch.optim.AdamW(net.parameters(), lr=0.05, fused=True), bucket_bytes=1, overlap_gather=overlap
        )
        engine = tds.initialize(model=net, optimizer=optimizer, config=config)[0]
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank() % 2)
            batches = [
                tuple(
                    torch.randn(2, WIDTH, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
                    for _ in "xy"
                )
                for _ in range(MICROS)
            ]
            if step == 1 and stages:
                optimizer.wait()
                _replace_a_layer(net)
            if stages:
                losses.append(engine.train_batch(iter(batches)).item())
                losses.append(engine.eval_batch(iter(batches)).item())
            else:
                losses.append(_plain_step(engine, optimizer, batches))
            if step == 2:
                engine.save_checkpoint(folder, tag="t")
            elif not stages:
                losses.extend(p.double().sum().item() for p in engine.module_state_dict().values())
        engine.load_checkpoint(folder, tag="t")
        optimizer.wait()
        losses.extend(p.double().sum().item() for p in net.parameters())
        return losses


def _replace_a_layer(net: Any) -> None:
    """Replace a linear layer by a new module that has the same weights."""
    name, old = next((name, layer) for name, layer in net.named_children() if type(layer) is nn.Linear)
    new = nn.Linear(WIDTH, WIDTH)
    new.weight, new.bias = old.weight, old.bias
    setattr(net, name, new)


def _plain_step(engine: Any, optimizer: Any, batches: list[Any]) -> float:
    total = torch.zeros(())
    for number, (x, y) in enumerate(batches):
        loss = nn.functional.mse_loss(engine(x), y)
        total += loss.detach().float()
        if number == MICROS - 1:
            optimizer.arm()
        engine.backward(loss)
    optimizer.finish()
    optimizer.clip(optimizer.squared_norm(0, torch.device("cpu")).sqrt(), 0.0)
    engine.step()
    return total.item()


CASES = [(*layout, bf16) for layout in ((0, 1), (1, 1), (2, 1), (2, 2)) for bf16 in (False, True)]


@pytest.mark.parametrize(("stages", "chunks", "bf16"), covering(CASES, CASES[::3].__contains__, several=True))
def test_late_gathers_change_no_number(stages: int, chunks: int, bf16: bool, tmp_path: Any) -> None:
    """Each layer waits for its own weights and those of earlier layers; tied weights arrive at the end of a step."""
    ranks = 2 * max(stages, 1)
    expected = on_ranks(ranks, _losses, stages, chunks, False, bf16, False, str(tmp_path))
    found = on_ranks(ranks, _losses, stages, chunks, True, bf16, True, str(tmp_path))
    assert found == expected


def _refused() -> str:
    model = nn.Linear(2, 2)
    optimizer = tds.DistributedOptimizer(torch.optim.AdamW(model.parameters()), overlap_gather=True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    try:
        tds.initialize(model=model, optimizer=optimizer, config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    assert "overlap_gather" in on_ranks(1, _refused)[0]
