#!/usr/bin/env bash
# Surprise: with Lightning's EMAWeightAveraging(update_starting_at_step=N), every validation before step N uses the initial weights, and a
#   run that ends before step N returns the initial weights instead of the trained ones. ModelCheckpoint chooses its best checkpoint
#   by such validations, and the state_dict in that checkpoint has the initial weights, too. With update_starting_at_epoch=N (counted
#   from 0), averaging starts at the first step and not at epoch N, and the last step of each epoch from N on is averaged twice.
#   There is no message.
# Versions: lightning 2.6.6 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: before averaging starts, validations and results use the current weights, and averaging starts at the given step or epoch.
# Source: the documentation of WeightAveraging (during validation and after the training finishes, the current model parameters will be
#   replaced with the averaged values; its example starts after 100 steps) and the names update_starting_at_step and
#   update_starting_at_epoch of EMAWeightAveraging.
# Cause: lightning/pytorch/callbacks/weight_averaging.py makes the averaged model from the initial weights in setup(), and
#   on_validation_epoch_start and on_train_end use it even if n_averaged is 0. EMAWeightAveraging.should_update looks at
#   update_starting_at_epoch only at the end of an epoch, and lets every step through if update_starting_at_step is None. Lightning's
#   issue 21724 (May 2026, open) reports the validations, but neither the lost result nor update_starting_at_epoch.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")
import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
STEPS = 10


class Model(lightning.LightningModule):
    """Its only weight counts the steps, because its gradient is -1 and the learning rate is 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.validated = []

    def training_step(self, batch, index):
        return -self.weight.sum()

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.validated.append(round(self.weight.item(), 3))
            self.log("loss", -self.weight.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(epochs, folder=None, **options):
    """Return the weights that the validation of each epoch saw, the weight of the result, and the one of the best checkpoint."""
    model = Model()
    callbacks = [EMAWeightAveraging(decay=0.5, **options)]
    saver = ModelCheckpoint(dirpath=folder, monitor="loss", filename="best") if folder else None
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=callbacks + ([saver] if saver else []), logger=False, accelerator="cpu",
                                enable_checkpointing=folder is not None, enable_progress_bar=False, enable_model_summary=False)
    data = torch.utils.data.DataLoader(torch.zeros(STEPS, 1))
    trainer.fit(model, data, torch.utils.data.DataLoader(torch.zeros(1, 1)))
    best = torch.load(saver.best_model_path, weights_only=False)["state_dict"]["weight"].item() if saver else None
    return model.validated, model.weight.item(), best


def average(first, last, twice=()):
    """Return the average with decay 0.5 that is the weight itself after step `first`; some steps are averaged twice."""
    value = float(first)
    for step in range(first + 1, last + 1):
        for _ in range(2 if step in twice else 1):
            value = 0.5 * value + 0.5 * step
    return round(value, 3)


print("lightning", lightning.__version__, "torch", torch.__version__, "-", STEPS, "steps in an epoch, decay 0.5; the weight is the step")
always = train(5)
print("from the start: validations", always[0], "result", always[1])
late = train(5, update_starting_at_step=30)
print("update_starting_at_step=30: validations", late[0], "result", late[1])
short = train(2, folder="checkpoints", update_starting_at_step=30)
print("update_starting_at_step=30, 20 steps: validations", short[0], "result", short[1], "best checkpoint", short[2])
epoch = train(5, update_starting_at_epoch=3)
print("update_starting_at_epoch=3: validations", epoch[0], "result", epoch[1])
right = [average(1, STEPS * number) for number in range(1, 6)]
from_thirty = [average(31, STEPS * number) for number in (4, 5)]
print("averages by hand: of all steps", right, "- from step 31 on", from_thirty, "- with the last steps of epochs 3 and 4 twice",
      average(1, 50, twice=(40, 50)))
print("belief: update_starting_at_step=30 validates 10, 20 and 30 in the first three epochs, and 20 steps end with 20;",
      "update_starting_at_epoch=3 validates 10, 20, 30 and", from_thirty)
holds = always[0] == right and late[0] == [0.0, 0.0, 0.0, *from_thirty] and short[0] == [0.0, 0.0] and short[1] == 0 and short[2] == 0
holds = holds and epoch[0][:4] == right[:4] and abs(epoch[1] - average(1, 50, twice=(40, 50))) < 1e-3
print("HOLDS: before its start, the average is the untrained model" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
