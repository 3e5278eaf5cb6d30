"""Objects that garbage collections skip, such as the half a million that torch and DeepSpeed create when imported."""

import gc


class FrozenObjects:
    """Nested freezes of all objects that exist, of which `gc.unfreeze` could only undo all at once.

    `gc.get_freeze_count` would say whether other code has frozen objects, but it visits each one: 50 ms for torch's.
    """

    def __init__(self) -> None:
        self._freezes = 0  # freezes that have not been undone

    def freeze(self) -> None:
        """Exempt all objects that exist now from garbage collections, until `unfreeze` is called as often as this."""
        self._freezes += 1
        gc.freeze()

    def unfreeze(self) -> None:
        """Undo one `freeze`."""
        self._freezes -= 1
        if self._freezes == 0:
            gc.unfreeze()


frozen_objects = FrozenObjects()
