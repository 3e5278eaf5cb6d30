"""Settings files of older versions."""

from collections.abc import Mapping
from typing import Any


def with_family(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values`, by name, with `family` added if it is missing.

    Only old settings files lack `family`; the missing family is t5 if the file sets enc_seq_length, else gpt2.
    An objective that older versions stored by mistake is removed, see `without_t5s_objective`.
    """
    return without_t5s_objective({"family": "gpt2" if values.get("enc_seq_length") is None else "t5", **values})


def without_t5s_objective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values` of a file, by name, without the objective `span-corruption` if the family is not t5.

    Older versions stored this default objective of T5 in the settings of all families.
    """
    strange = values.get("family", "t5") != "t5" and values.get("objective") == "span-corruption"
    return {name: value for name, value in values.items() if not (strange and name == "objective")}
