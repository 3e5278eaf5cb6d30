"""Settings that live in the files of features: each is a field of the section that the feature's row names."""

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from .feature_table import TABLE
from .fields import Section


@dataclass(frozen=True, kw_only=True)
class FeatureSettings(Section):
    """Base class of the settings of a feature. Fields are declared with `opt`, as in the sections themselves.

    The file of the class is imported when flags are parsed, so it must not import torch at its top.
    """

    def problems(self) -> Iterator[str]:
        """Yield an error text for each contradiction between fields of this class."""
        return iter(())

    def conflicts(self, config: Any) -> Iterator[str]:
        """Yield an error text for each setting of `config`, a `Config`, that the feature cannot be combined with."""
        return iter(())


def settings_classes(section: str) -> Iterator[type[FeatureSettings]]:
    """Yield the classes of settings that features add to a section, in the order of the table."""
    for row in TABLE.values():
        if row.section == section:
            yield resolve_name(row.class_path).Settings


def with_features(name: str, section: type[Any]) -> type[Any]:
    """Return a section that has the fields of `section` and those of its features.

    The instances of the section are also instances of the features' classes.
    """
    bases = list(settings_classes(name))
    if not bases:
        return section

    def problems(self: Any) -> Iterator[str]:
        yield from section._problems(self)
        for base in bases:
            yield from base.problems(self)

    # sections.py binds the class to the name of `section`, so pickle looks for it in that module.
    namespace = {"__doc__": section.__doc__, "__module__": "megatron.config.sections", "_problems": problems}
    extended = type(section.__name__, (*bases, section), namespace)
    # The decorator collects the fields of all base classes into one constructor.
    return dataclass(frozen=True, kw_only=True)(extended)


def conflicts_with_features(config: Any) -> Iterator[str]:
    """Yield an error text for each setting that a feature cannot be combined with. config: a `Config`."""
    for name in vars(config):
        for settings_class in settings_classes(name):
            yield from settings_class.conflicts(getattr(config, name), config)
