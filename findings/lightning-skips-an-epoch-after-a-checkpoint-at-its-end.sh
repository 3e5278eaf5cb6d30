#!/usr/bin/env bash
# Surprise: if a checkpoint of Lightning's ModelCheckpoint(every_n_train_steps=...) falls on the last step of an epoch, and the
#   training data comes from a StatefulDataLoader, a run that is resumed from it trains no batch of the next epoch. The epoch counter
#   goes on, fit() ends with "max_epochs reached" and without a warning. In a run of 3 epochs with 6 steps each, a resume from step 6
#   makes 6 of the 12 missing steps, and one from step 12 makes none of 6. A resume from any other step is exact, and
#   so is one from step 6 or 12 with a plain DataLoader. So a checkpoint interval that divides the epoch loses epochs.
# Versions: lightning 2.6.6, torchdata 0.11.0 (the newest releases), torch 2.13.0. Date: 2026-11-29.
# Belief: a resumed run makes the steps that are missing. With a loader that has a state, it sees the rest of the batches.
# Source: Lightning's warning for other loaders in the middle of an epoch ("make your dataloader resumable by implementing the
#   state_dict / load_state_dict interface"), and torchdata's README (StatefulDataLoader is a drop-in replacement for DataLoader).
# Cause: _FitLoop.on_save_checkpoint in lightning/pytorch/loops/fit_loop.py saves the state of a loader that is at its end. On
#   the resume, _FitLoop.reset counts the old epoch as completed, setup_data gives the loader its old state, and
#   StatefulDataLoader ends the next iteration at once. This empty iteration counts as an epoch. Without the saved state of the
#   loader in the checkpoint, the run makes all steps.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6 torchdata==0.11.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import logging
import sys
import warnings
from importlib.metadata import version

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

BATCHES, EPOCHS = 6, 3
TOTAL = BATCHES * EPOCHS
logging.disable(logging.CRITICAL)  # one block of messages for each of the 36 runs
DATA = torch.arange(2.0 * BATCHES)[:, None]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, number):
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(loader_class, callbacks=(), checkpoint=None):
    """Train for three epochs, from the start or from a checkpoint; return the batches seen, and the trainer."""
    model = Model()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=EPOCHS, logger=False, callbacks=list(callbacks),
                                enable_checkpointing=bool(callbacks), enable_progress_bar=False,
                                enable_model_summary=False)
    trainer.fit(model, loader_class(DATA, batch_size=2), ckpt_path=checkpoint)
    return model.seen, trainer


print("lightning", lightning.__version__, "torchdata", version("torchdata"), "torch", torch.__version__)
resumed, exact, warned = {}, {}, {}
for loader_class in (DataLoader, StatefulDataLoader):
    name = loader_class.__name__
    save = ModelCheckpoint(name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full, _ = fit(loader_class, [save])
    assert len(full) == TOTAL
    for step in range(1, TOTAL):
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            seen, trainer = fit(loader_class, checkpoint=f"{name}/step={step}.ckpt")
        resumed[name, step] = len(seen)
        exact[name, step] = seen == full[step:]
        warned[name, step] = any("resuming from a checkpoint" in str(message.message) for message in messages)
        if loader_class is StatefulDataLoader and step % BATCHES == 0:
            print(f"{name}, resumed from step {step}: {len(seen)} of {TOTAL - step} steps; the trainer ends in epoch "
                  f"{trainer.current_epoch} of {EPOCHS}, at step {trainer.global_step}")
    right = [step for step in range(1, TOTAL) if exact[name, step]]
    print(f"{name}, steps from which a resume sees exactly the missing batches: {right}")
    print(f"{name}, steps whose resume gives a warning about it: {[s for s in range(1, TOTAL) if warned[name, s]]}")
stripped = {}
for step in (BATCHES, 2 * BATCHES):
    checkpoint = torch.load(f"StatefulDataLoader/step={step}.ckpt", weights_only=False)
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, "stripped.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stripped[step] = len(fit(StatefulDataLoader, checkpoint="stripped.ckpt")[0])
    print(f"the checkpoint of step {step} without the loader's state: {stripped[step]} of {TOTAL - step} steps")
print("belief: 12 of 12 and 6 of 6 steps; seen:", resumed["StatefulDataLoader", 6], "and", resumed["StatefulDataLoader", 12])
ends = [step for step in range(1, TOTAL) if step % BATCHES == 0]
holds = [resumed["StatefulDataLoader", step] for step in ends] == [6, 0]
holds = holds and not any(warned["StatefulDataLoader", step] for step in range(1, TOTAL))
holds = holds and stripped == {6: 12, 12: 6}
holds = holds and all(exact["StatefulDataLoader", step] for step in range(1, TOTAL) if step not in ends)
holds = holds and all(exact["DataLoader", step] for step in ends)
print("HOLDS: a resume at the end of an epoch skips the next epoch" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
