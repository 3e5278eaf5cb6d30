"""Special tokens that mark the parts of a fill-in-the-middle sample (--fim-tokens)."""

from ..config import Config
from ..data.fim import FillInTheMiddle
from ..tokenizer import Tokenizer


def gaps_of(config: Config, tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """Return the fill-in-the-middle settings, or None without --fim-rate.

    Raises ValueError for a special token that the tokenizer lacks.
    """
    data = config.data
    if not data.fim_rate:
        return None
    names = data.fim_tokens or ()
    missing = [name for name in names if name not in tokenizer.marks]
    if missing:
        raise ValueError(
            f"--fim-tokens: {data.vocab_file} has no special token {' or '.join(missing)}, only "
            f"{', '.join(tokenizer.marks)}; train a tokenizer by tools/train_tokenizer.py --special-tokens, or add the "
            f"tokens to a Hugging Face tokenizer by add_special_tokens() and save_pretrained()"
        )
    prefix, middle, suffix = (tokenizer.marks[name] for name in names)
    return FillInTheMiddle(data.fim_rate, data.fim_spm_rate, prefix, middle, suffix, tokenizer.eod)
