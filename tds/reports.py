"""Reports of the engine: its place in the schedule to the watchdog, losses to monitors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .diagnose import describe


class Reports:
    """Mixin of the pipeline engine for its watchdog and monitors."""

    @contextmanager
    def _watched(self: Any) -> Iterator[None]:
        """Report a failure to the watchdog, which ends all ranks: other ranks depend on this block."""
        try:
            yield
        except BaseException as error:
            if self.watchdog and not getattr(error, "everywhere", False):
                self.watchdog.fail(error)
            raise
        finally:
            self._at(None)

    def _at(self: Any, what: Any) -> None:
        if self.watchdog:
            self.watchdog.at(what)

    def _describe(self: Any, what: Any) -> str:
        return describe(what, self.stage_id, self._borders)

    def _report(self: Any, name: str, loss: Tensor) -> None:
        """Write the loss, and named losses if there are several, to DeepSpeed's monitors."""
        if self.global_rank == 0 and self.monitor.enabled:
            named = {name: loss} | ({} if len(self._losses.named) == 1 else self._losses.named)
            self.monitor.write_events([(f"Train/Samples/{k}", v.item(), self.global_samples) for k, v in named.items()])
