"""The scheduler: who runs in the next step. Knows core only: no torch, no ranks, no sockets."""

from anabranch.sched.scheduler import QueueFull, Scheduler
from anabranch.sched.state import SchedulerConfig

__all__ = ["QueueFull", "Scheduler", "SchedulerConfig"]
