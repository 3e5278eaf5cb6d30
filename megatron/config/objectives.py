"""Training objectives of each model family, and the settings that each objective allows."""

from typing import TYPE_CHECKING

from .fields import ConfigError

if TYPE_CHECKING:
    from .sections import Config

OF_T5 = ("span-corruption", "prefix-lm")
OF_DECODERS = ("lm", "sft", "prefix-lm")
ALL = tuple(dict.fromkeys((*OF_DECODERS, *OF_T5)))


def objectives_of(family: str | None) -> tuple[str, ...]:
    """Return a family's objectives, the default first; a custom model (None) has those of decoders."""
    return OF_T5 if family == "t5" else OF_DECODERS


def refuse_other_objectives(config: "Config") -> None:
    """Raise ConfigError for an objective of another family and for settings that conflict with the objective."""
    family, data = config.model.family, config.data
    known = objectives_of(family)
    if data.objective is not None and data.objective not in known:
        raise ConfigError(
            f"--objective {data.objective}: a {family or 'model of your own'} learns {' or '.join(known)}"
        )
    if family != "t5" and config.objective == "prefix-lm" and config.model.sliding_window is not None:
        raise ConfigError(
            "--objective prefix-lm lets a prefix look ahead, which --sliding-window forbids: leave one of them out, or turn off a file's with --sliding-window none"
        )
    if config.objective == "prefix-lm" and config.parallel.context_parallel_size > 1:
        raise ConfigError(
            "--objective prefix-lm lets a prefix look ahead, which --context-parallel-size cannot yet: leave one of them out"
        )
    together = data.reset_position_ids and not data.reset_attention_mask
    if family != "t5" and config.objective == "prefix-lm" and config.model.position_embedding == "rope" and together:
        raise ConfigError(
            "--objective prefix-lm with rotary positions: --reset-position-ids needs --reset-attention-mask, too"
        )
    if family == "t5" and together:
        raise ConfigError(
            "--reset-position-ids: a T5 knows documents apart only with --reset-attention-mask; give both, or neither"
        )
    if data.fim_rate and config.objective != "lm":
        raise ConfigError(
            f"--fim-rate rearranges running text, which --objective {config.objective} does not read: leave it out"
        )
    if data.fim_rate and len(set(data.fim_tokens or ())) != 3:
        raise ConfigError("--fim-rate needs --fim-tokens PREFIX MIDDLE SUFFIX, the names of three special tokens")
    if not data.fim_rate and (data.fim_tokens is not None or data.fim_spm_rate != 0.5):
        raise ConfigError("--fim-tokens and --fim-spm-rate say how documents are rearranged: give --fim-rate, too")
    if config.objective == "sft" and data.eod_mask_loss:
        raise ConfigError("--objective sft knows from the corpus which tokens count: leave --eod-mask-loss out")
