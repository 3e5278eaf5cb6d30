"""Fill-in-the-middle training of a decoder (Bavarian et al. 2022), which --fim-rate selects."""

from ..config import Config
from ..data.fim import FillInTheMiddle
from ..tokenizer import Tokenizer


def fill_in_the_middle(config: Config, tokenizer: Tokenizer) -> FillInTheMiddle:
    """Return the fill-in-the-middle settings of a run with --fim-rate.

    Raises ValueError if the tokenizer lacks one of the --fim-tokens.
    """
    data = config.data
    names = data.fim_tokens or ()  # three names: config/conflicts.py checks this
    missing = [name for name in names if name not in tokenizer.marks]
    if missing:
        raise ValueError(
            f"--fim-tokens: {data.vocab_file} has no special token {' or '.join(missing)}, only "
            f"{', '.join(tokenizer.marks)}; train a tokenizer with tools/train_tokenizer.py --special-tokens, or add "
            f"the tokens to a Hugging Face tokenizer with add_special_tokens() and save_pretrained()"
        )
    prefix, middle, suffix = (tokenizer.marks[name] for name in names)
    return FillInTheMiddle(data.fim_rate, data.fim_spm_rate, prefix, middle, suffix, tokenizer.eod)
