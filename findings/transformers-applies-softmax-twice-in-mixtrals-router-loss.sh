#!/usr/bin/env bash
# Surprise: the load-balancing loss of Mixtral takes the softmax of the router's probabilities, not of its logits. The loss
#   is close to the right one, so nobody notices, but the gradient that should balance the experts is far too small.
# Versions: transformers 5.5.4 is wrong (so is 5.0.0), transformers 5.8.1 is right; torch 2.13.0. Date: 2026-11-28.
# Belief: aux_loss is experts * sum over experts of (share of choices * mean probability), as in the Switch Transformer.
# Source: the docstring of load_balancing_loss_func, which takes the logits of the gate.
# Cause: the router of these releases returns probabilities under the name router_logits.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/program.py" <<'PY'
import warnings

warnings.filterwarnings("ignore")
import torch
import transformers

EXPERTS, CHOICES = 8, 2
torch.manual_seed(0)
config = transformers.MixtralConfig(
    vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES, max_position_embeddings=64,
    router_jitter_noise=0.0, initializer_range=0.5,
)
model = transformers.MixtralForCausalLM(config).eval()
gate = next(module for name, module in model.named_modules() if name.endswith(".gate"))
inputs = []
gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().flatten(0, -2)))
tokens = torch.randint(1, 60, (4, 32), generator=torch.Generator().manual_seed(1))
found = model(tokens, output_router_logits=True).aux_loss
(of_gate,) = torch.autograd.grad(found, gate.weight)


def loss_of(weight, twice):
    """Return the loss of the definition, or the one with two softmaxes."""
    logits = inputs[0].double() @ weight.T
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(CHOICES).indices, 1.0)
    probabilities = logits.softmax(-1)
    if twice:
        probabilities = probabilities.softmax(-1)
    return EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum()


weight = gate.weight.detach().double().requires_grad_()
numbers = []
for twice in (False, True):
    expected = loss_of(weight, twice)
    (gradient,) = torch.autograd.grad(expected, weight)
    numbers += [float(found) / float(expected), float(of_gate.norm()) / float(gradient.norm())]
print(transformers.__version__, *[f"{number:.5f}" for number in numbers])
PY
for release in 5.5.4 5.8.1; do
    python3 -m venv "$work/$release"
    "$work/$release/bin/pip" install --quiet torch==2.13.0 "transformers==$release" numpy==2.4.6 2> "$work/pip"
    "$work/$release/bin/python" "$work/program.py" 2> "$work/stderr" | tail -1 >> "$work/found"
done
python3 - "$work/found" <<'PY'
import sys

rows = [line.split() for line in open(sys.argv[1])]
print("belief: loss and gradient are 1 times those of the definition")
for release, loss, gradient, loss_twice, gradient_twice in rows:
    print(f"transformers {release}: loss {loss} and gradient {gradient} times those of the definition,")
    print(f"    {loss_twice} and {gradient_twice} times those with a second softmax")
old, new = ([float(number) for number in row[1:]] for row in rows)
is_twice = max(abs(old[2] - 1), abs(old[3] - 1)) < 1e-3 and old[1] < 0.5
is_right = max(abs(new[0] - 1), abs(new[1] - 1)) < 1e-3
if not (is_twice and is_right):
    sys.exit("CHANGED: the loss of one of the two releases is not as described")
print(f"HOLDS: in release 5.5.4 the gradient of the loss is {old[1]:.2f} times the right one")
PY
