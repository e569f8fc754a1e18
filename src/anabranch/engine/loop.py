"""The brain's thread: read messages, step, send outputs; asleep when there is nothing to do.

Knows the channel to the front and the brain; how the tree was started is main.py's business.
"""

import time

from anabranch.core.messages import Abort, Output, Shutdown, StatsQuery, Submit
from anabranch.engine.brain import Brain
from anabranch.engine.protocol import FROM_BRAIN, TO_BRAIN, Control, ControlReply, Outputs
from anabranch.engine.pulse import Pulse
from anabranch.wire import Channel

UNSENT_LIMIT = 64 << 20  # bytes the front may leave unread before the brain waits for it
FRONT_SECONDS = 60.0  # and how long it waits


class Loop:
    """Serves one front until it says Shutdown or is gone."""

    def __init__(self, brain: Brain, channel: Channel, pulse: Pulse, slot: int = 0) -> None:
        self._brain = brain
        self._channel = channel
        self._pulse = pulse
        self._slot = slot
        self._steps = 0
        self._end: float | None = None  # when to stop for good, once a Shutdown has come

    def run(self) -> None:
        """Returns at a Shutdown or the front's end; exceptions of a step pass through."""
        channel, brain = self._channel, self._brain
        while not channel.closed:
            outputs: list[Output] = []
            for frame in channel.receive():
                outputs += self._handle(TO_BRAIN.decode(frame))
            if self._end is not None and (brain.idle or time.monotonic() >= self._end):
                self._send(outputs)
                break
            if not brain.idle:
                outputs += self._step()
            self._send(outputs)
            if brain.idle and self._end is None:
                channel.wait(brain.patience)
        if not channel.closed:
            channel.flush(FRONT_SECONDS)

    def _step(self) -> list[Output]:
        self._steps += 1
        self._pulse.begin_step(self._slot, self._steps)
        outputs = self._brain.step()
        self._pulse.end_step(self._slot)
        return outputs

    def _handle(self, message: object) -> list[Output]:
        match message:
            case Submit(request) if self._end is not None:
                return [Output(request.id, finish_reason="error", error="the engine is ending")]
            case Submit(request):
                return self._brain.submit(request)
            case Abort(request_id):
                return self._brain.abort(request_id)
            case StatsQuery():
                self._channel.send(FROM_BRAIN.encode(self._brain.stats()))
            case Control(name, payload):
                return self._control(name, payload)
            case Shutdown(drain):
                self._end = time.monotonic() + drain
            case _:
                raise AssertionError(f"{type(message).__name__} after the launch")
        return []

    def _control(self, name: str, payload: bytes) -> list[Output]:
        outputs: list[Output] = []
        try:
            replies, outputs = self._brain.call(name, payload)
            reply = ControlReply(tuple(replies))
        except ValueError as error:
            reply = ControlReply(error=str(error))
        self._send(outputs)
        self._channel.send(FROM_BRAIN.encode(reply))
        return []

    def _send(self, outputs: list[Output]) -> None:
        if outputs:
            self._channel.send(FROM_BRAIN.encode(Outputs(tuple(outputs))))
        if self._channel.unsent > UNSENT_LIMIT:
            self._channel.flush(FRONT_SECONDS)
