"""A user's observer is informed of each instruction and part of a step, in the order in which they run."""

from typing import Any

from tests.support import on_ranks

from .test_tds import batches, build


def _observed() -> tuple[list[str], list[str], float]:
    """Return the begun and the ended parts of a step with an observer, and the loss of the step."""
    import tds

    begun = list[str]()
    ended = list[str]()

    class Noting(tds.Observer):
        def begin(self, what: Any) -> None:
            begun.append(_name(what))

        def end(self, what: Any) -> None:
            ended.append(_name(what))

        def waiting(self, doing: str) -> None:
            begun.append("waiting")

    engine = build(2, train_batch_size=8)
    engine.observers.append(Noting())
    loss = engine.train_batch(batches()).item()
    engine.eval_batch(batches())
    return begun, ended, loss


def _name(what: Any) -> str:
    return what if isinstance(what, str) else f"{type(what).__name__}{what.micro}"


def _unobserved() -> float:
    engine = build(2, train_batch_size=8)
    loss: float = engine.train_batch(batches()).item()
    return loss


def test_an_observer_sees_the_schedule_and_the_other_parts_of_a_step() -> None:
    (begun, ended, loss), (last_begun, last_ended, same) = on_ranks(2, _observed)
    training = begun[: begun.index("eval_batch")]
    assert [each for each in training if each not in ("waiting", "Read")] == [
        *("train_batch", "Begin"),
        *("Forward0", "SendActivation0", "Forward1", "SendActivation1"),
        *("RecvGrad0", "Backward0", "RecvGrad1", "Backward1"),
        *("Flush", "Reduce", "Loss", "Step"),
    ]
    assert training.count("Read") == 2
    assert begun[len(training) :].count("Forward0") == 1 and "Backward0" not in begun[len(training) :]
    # Each part ends once. Inner parts end before the part that contains them.
    assert sorted(ended) == sorted(each for each in begun if each != "waiting")
    assert ended.index("Read") < ended.index("Begin") < ended.index("train_batch")
    order = ["RecvActivation0", "Forward0", "Backward0", "SendGrad0", "RecvActivation1", "Forward1"]
    assert [each for each in last_begun if each in order][:6] == order
    assert sorted(last_ended) == sorted(each for each in last_begun if each != "waiting")
    assert "waiting" in training[training.index("Reduce") :] and "waiting" in last_begun
    assert (loss, same) == tuple(on_ranks(2, _unobserved))


def _failing() -> tuple[list[str], list[str]]:
    import tds

    ended = list[str]()

    class Ends(tds.Observer):
        def end(self, what: Any) -> None:
            ended.append(_name(what))

    engine = build(1, train_batch_size=8)
    engine.observers.append(Ends())
    short = iter([next(batches())])
    try:
        engine.train_batch(short)
    except tds.DataEnded:
        failed = list(ended)
    ended.clear()
    engine.train_batch(batches())
    return failed, ended


def test_a_part_that_fails_does_not_end() -> None:
    ((failed, after),) = on_ranks(1, _failing)
    assert "Forward0" in failed and "Forward1" not in failed and "train_batch" not in failed
    assert after[-1] == "train_batch" and "Forward1" in after
