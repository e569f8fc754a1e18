"""A rank that takes orders: carries them out one by one and answers on its channel."""

from collections.abc import Callable

from anabranch.core.plan import StepPlan
from anabranch.engine.crew import RankWorker
from anabranch.engine.protocol import FROM_RANK, TO_RANK, Control, ControlReply
from anabranch.engine.pulse import Pulse
from anabranch.wire import Channel

ANSWER_SECONDS = 60.0  # longest the brain may take to read an answer
IDLE_SECONDS = 60.0  # longest wait for an order before looking again
FAREWELL = b""  # the last order


def follow(
    worker: RankWorker, take: Callable[[], bytes | None], channel: Channel, pulse: Pulse, slot: int
) -> None:
    """Obey orders until FAREWELL. take: the next one, or None after a while without any."""
    while (frame := take()) != FAREWELL:
        if frame is not None:  # else idle; a brain that is gone is noticed elsewhere
            _obey(worker, TO_RANK.decode(frame), channel, pulse, slot)


def _obey(worker: RankWorker, order: object, channel: Channel, pulse: Pulse, slot: int) -> None:
    if isinstance(order, StepPlan):
        pulse.begin_step(slot, order.number)
        result = worker.step(order)
        pulse.end_step(slot)
        if result is None:
            return
        channel.send(FROM_RANK.encode(result))
    else:
        assert isinstance(order, Control), f"{type(order).__name__} is no order"
        try:
            reply = ControlReply((worker.control(order.name, order.payload),))
        except ValueError as error:
            reply = ControlReply(error=str(error))
        channel.send(FROM_RANK.encode(reply))
    channel.flush(ANSWER_SECONDS)
