"""Bytes between processes: msgpack codecs of frozen dataclasses, and framed channels. No pickle.

Knows the shapes of messages only through their type hints; never imports torch.
"""

from anabranch.wire.channel import Channel
from anabranch.wire.codec import Schema, WireError

__all__ = ["Channel", "Schema", "WireError"]
