"""The order in which a device moves messages, and what follows from it for process groups and receives.

gloo moves a message as soon as both ends have posted it. torch's NCCL moves the messages of a process group one
after the other, in the order in which a rank posted them. A group has one communicator and one stream, at least
if it was created with its device, as DeepSpeed creates it. A send ends only when it is received, and until then
all messages behind it in its group wait too. deadlocks.py proves that a schedule ends nevertheless.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PREVIOUS, NEXT = "previous", "next"  # sides of a stage
POSTED_AHEAD = 2  # number of receives posted in advance by a channel on CPUs


def boundary_parity(boundary: int, stages: int) -> int:
    """Return the parity of a stage boundary: 0, 1 or 2, such that neighbouring boundaries have different parities.

    Boundary b leads from stage b to stage b + 1, and the boundary of the last stage leads to stage 0. In such a ring
    with an odd number of stages, the last boundary needs parity 2.
    """
    return 2 if stages % 2 and boundary == stages - 1 else boundary % 2


def has_message_queues(device: "torch.device") -> bool:
    """Return whether messages of one process group wait for each other on this device.

    False on CPUs (gloo), where an additional group would only cost a thread.
    """
    return device.type != "cpu"


def receives_ahead(device: "torch.device") -> int | None:
    """Return how many receives a channel posts in advance; None if receives are posted at points of the schedule.

    A host that may have to synchronize its device needs such points (posting.py). A fixed number would deadlock: with
    three stages in 1F1B and one receive in advance, stage 0 posts the receive of gradient 0 before forward 1. But stage
    1 sends gradient 0 only after its own forward 1, for which stage 0 has not sent the input yet.
    """
    return None if has_message_queues(device) else POSTED_AHEAD
