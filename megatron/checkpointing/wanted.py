"""The choice of the parts of a checkpoint that a run loads."""

from dataclasses import dataclass

from megatron.config import Config


@dataclass(frozen=True)
class Wanted:
    """Which parts of a checkpoint to load, and which mismatches between checkpoint and run to refuse."""

    position: bool = True  # load the iteration and the consumed samples
    optimizer: bool = True  # load moments, step counts and the loss scale
    rng: bool = True  # load the seed of the dropout streams
    same_data: bool = True  # refuse a checkpoint trained on samples that this run's data does not produce
    same_tokenizer: bool = True  # refuse the checkpoint if its tokenizer differs from that of this run

    @classmethod
    def from_config(cls, config: Config, beside_load: bool = False) -> "Wanted":
        """Return the parts to load and the mismatches to refuse, as the flags in `config` ask.

        beside_load: whether --load is given but ignored, because the run resumes from its own checkpoint.
        """
        settings = config.checkpoint
        # --finetune and --no-load-* were meant for the checkpoint of --load, when the run started. Applying them to
        # the run's own checkpoint would discard the progress of the run.
        if beside_load:
            return cls(same_data=not settings.override_data, same_tokenizer=not settings.override_tokenizer)
        finetune = settings.finetune
        return cls(
            position=not finetune,
            optimizer=settings.load_optim and not finetune,
            rng=settings.load_rng and not finetune,
            same_data=not (finetune or settings.override_data),
            same_tokenizer=not settings.override_tokenizer,
        )


LOAD_ALL = Wanted()  # load everything, refuse every mismatch
