"""Settings that name files and folders: which of them may be URLs, and refusal of URLs with a mistake."""

import re
from collections.abc import Iterator

from ..storage import PathError, check_location, require_local
from .fields import flag
from .sections import Config, settings

# Settings whose words may be URLs of object storage.
URL_SETTINGS = (
    "data_path", "data_stages", "train_data_path", "valid_data_path", "test_data_path", "save", "load",
    "tensorboard_dir",
)  # fmt: skip
# Settings whose words are paths on this machine.
PATH_SETTINGS = ("vocab_file", "deepspeed_config", "param_groups", "run_dir", "eval_tasks")


def location_problems(config: Config) -> Iterator[str]:
    """Yield an error text for each word that looks like a URL with a mistake, or is a URL that is not supported.

    `Config` itself does not check this: the checkpoints of earlier versions, which accepted such words, stay readable.
    """
    for section, _, f in settings():
        if f.name not in URL_SETTINGS + PATH_SETTINGS:
            continue
        check = check_location if f.name in URL_SETTINGS else require_local
        value = getattr(getattr(config, section), f.name) or ()
        # A value is one text, a tuple of words, or None.
        text = value if isinstance(value, str) else " ".join(value)
        for word in text.split():
            named_location = word.strip('"[]{},;')  # without the punctuation of JSON and of --data-stages
            location = re.sub(r"^[\w.-]+=", "", named_location)  # `NAME=PREFIX` names a data set
            try:
                check(location)
            except PathError as error:
                yield f"{flag(f.name)} {error}"
