#!/usr/bin/env bash
# Surprise: FSDP2 with bf16 parameters and reduce_dtype=torch.float32 fails with an AttributeError ('FSDPParam' object has no attribute
#   '_unsharded_param') if gradients are accumulated without reduction while some sharded module has never been used, such as an
#   expert without tokens or the head of another task. The same run works, with right gradients, in fp32, with
#   reduce_dtype=torch.bfloat16, with a reduction in each micro-batch, or if each module was used once before. So a run that worked
#   may fail after a resume, because no module has been used yet in the new process.
# Versions: torch 2.13.0 on a CPU, gloo, numpy 2.4.6. Date: 2026-11-30.
# Belief: a micro-batch may leave modules unused, as it may without accumulation; the gradients of unused modules stay None.
# Source: the documentation of fully_shard (set_requires_gradient_sync: can be used to implement gradient accumulation without
#   communication; MixedPrecisionPolicy.reduce_dtype: the type of the reduction, which can be fp32 while parameters are bf16).
# Cause: post_backward in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py calls FSDPParam.to_accumulated_grad_if_needed, which
#   reads _unsharded_param. The callback at the end of each backward pass calls post_backward for unused modules, too, but the
#   attribute is made when a module is used for the first time.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import os
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(4, 6, bias=False)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, 5, bias=False) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.trunk(x)))


def data(rank, micro_batch):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + micro_batch))


def reference(heads):
    """Return the gradients of the mean over the ranks, without any parallelism and in fp32."""
    model = Model()
    for micro_batch, head in enumerate(heads):
        for rank in range(RANKS):
            (model(data(rank, micro_batch), head).sum() / RANKS).backward()
    return [None if p.grad is None else p.grad for p in model.parameters()]


def train(heads, policy, is_accumulated, is_used_before):
    """Return the gradients of the micro-batches, each with its head."""
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    model = Model()
    for module in (*model.heads, model.trunk, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if is_used_before:
        for head in range(2):
            model(data(dist.get_rank(), 99), head).sum().backward()
        model.zero_grad()
    for micro_batch, head in enumerate(heads):
        if is_accumulated:
            model.set_requires_gradient_sync(micro_batch == len(heads) - 1)
        model(data(dist.get_rank(), micro_batch), head).sum().backward()
    return [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


def work(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    half, single = torch.bfloat16, torch.float32
    policies = {"fp32": MixedPrecisionPolicy(), "bf16, reduced in bf16": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
                "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=single)}
    seen = {}
    for heads in ((0, 0), (0, 1), (0, 0, 1)):
        right = reference(heads)
        for name, policy in policies.items():
            for is_accumulated, is_used_before in ((False, False), (True, False), (True, True)):
                try:
                    found = train(heads, policy, is_accumulated, is_used_before)
                    pairs = [(a, b) for a, b in zip(found, right) if b is not None]
                    result = max((a - b).abs().max().item() / b.abs().max().item() for a, b in pairs)
                except AttributeError as error:
                    result = str(error)
                seen[heads, name, is_accumulated, is_used_before] = result
                if rank == 0:
                    how = "reduced once" if is_accumulated else "reduced each time"
                    text = result if isinstance(result, str) else f"gradients off by {result:.1e}"
                    print(f"heads {heads}, {name}, {how}{', both heads used before' if is_used_before else ''}: {text}", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        print("belief: all of them have the gradients of the reference")
        holds = all(isinstance(result, str) == (key[1:] == ("bf16, reduced in fp32", True, False)) for key, result in seen.items())
        holds = holds and all(isinstance(result, str) or result < (1e-5 if key[1] == "fp32" else 0.05) for key, result in seen.items())
        print("HOLDS: FSDP2 cannot accumulate in fp32 while a module has not been used" if holds else "no longer so", flush=True)
        sys.exit(not holds)


if __name__ == "__main__":
    import socket

    if len(sys.argv) == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            sys.argv.append(str(free.getsockname()[1]))
    ranks = []
    for rank in range(1, RANKS):
        child = os.fork()
        if child == 0:
            work(rank)
            os._exit(0)
        ranks.append(child)
    work(0)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
