"""The flag --dry-run, which checks a run instead of starting it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.feature_settings import FeatureSettings
from ..config.fields import at_least, opt
from ..training.feature import Feature

if TYPE_CHECKING:
    from ..config import Config
    from ..training.task import Task


@dataclass(frozen=True, kw_only=True)
class DryRunSettings(FeatureSettings):
    """The flag --dry-run."""

    dry_run: int = opt(
        0,
        "check a run of this many ranks in one process, and exit before its first step: settings, layout, memory, "
        "schedule, data and checkpoint folder. 0 trains",
        at_least(0),
    )


class DryRun(Feature):
    """Feature that checks a run of --dry-run ranks in place of the run."""

    Settings = DryRunSettings

    def instead(self, task: "Task", config: "Config") -> None:
        from .dry_run_checks import check_run

        check_run(task, config, config.of(DryRunSettings).dry_run)
