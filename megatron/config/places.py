"""Settings that name files and folders: which of them may be URLs, and refusal of URLs with a mistake."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..storage import PathError, check_location, is_url, require_local
from .data import renamed
from .data_stages import replace_prefixes
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
        # `check_location` accepts paths and URLs without a mistake, `require_local` only paths.
        check = check_location if f.name in URL_SETTINGS else require_local
        value = getattr(getattr(config, section), f.name)
        if value == "":
            yield f"{flag(f.name)} is empty; give a path, or leave it out"
        # A value is one text, a tuple of words, or None.
        text = value if isinstance(value, str) else " ".join(value or ())
        for word in text.split():
            named_location = word.strip('"[]{},;')  # without the punctuation of JSON and of --data-stages
            location = re.sub(r"^[\w.-]+=", "", named_location)  # `NAME=PREFIX` names a data set
            try:
                check(location)
            except PathError as error:
                yield f"{flag(f.name)} {error}"


def relocated(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the settings `values` of a file, by name, with `new` in place of the folder `old` in all paths."""

    def new_path(path: str) -> str:
        """Return the path in `new` if `path` points into `old`, else `path`."""
        if is_url(path):
            return path
        inside = os.path.relpath(path, old)  # begins with .. if the path does not point into the folder
        return path if inside.startswith("..") else os.path.normpath(os.path.join(new, inside))

    result = dict(values)
    for name in (*URL_SETTINGS, "vocab_file", "deepspeed_config", "param_groups", "run_dir"):
        value = values.get(name)
        if isinstance(value, str):
            result[name] = new_path(value)
        elif isinstance(value, list) and name == "data_stages":
            # All words together are the text of the stages, in which the prefixes are replaced.
            result[name] = [replace_prefixes(" ".join(map(str, value)), new_path)]
        elif isinstance(value, list):
            # Each word is a weight or a prefix, such as 0.7 or data/a, and may begin with a name, as in web=data/a.
            result[name] = [renamed(str(word), new_path) for word in value]
    return result
