"""What `serve` lets its user choose beside the engine's flags; flags are made from the fields."""

import os
from dataclasses import dataclass, field
from ipaddress import ip_address


@dataclass(frozen=True)
class ServeOptions:
    """host, port: where it listens. The rest: see each field's help."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8000, metadata={"help": "port to listen on (0: any free one)"})
    api_key: str | None = field(
        default=None, metadata={"help": "key that every route but /health asks for"}
    )
    cors: str | None = field(
        default=None, metadata={"help": "comma list of web origins that may call, or *"}
    )
    insecure: bool = field(
        default=False, metadata={"help": "listen beyond this machine without an API key"}
    )
    served_model_name: str | None = field(
        default=None, metadata={"help": "comma list of names the model answers to"}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja file used instead of the checkpoint's template"}
    )
    max_body: int = field(default=8 << 20, metadata={"help": "most bytes of a request body"})
    drain: float = field(
        default=5.0, metadata={"help": "seconds that running requests get when the server ends"}
    )
    log_requests: bool = field(default=False, metadata={"help": "log one line for each request"})

    def check(self) -> "ServeOptions":
        """Return self. ValueError if a key is empty or the address is open to all without one."""
        if self.api_key is not None and len(self.api_key) < 1:
            raise ValueError("--api-key is empty; give a key, or leave the flag out")
        if self.api_key is None and not self.insecure and not _loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached from other machines: give --api-key KEY, "
                "or --insecure to let everyone in"
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: ports are 0 to 65535")
        if self.max_body < 1024:
            raise ValueError(f"--max-body {self.max_body}: at least 1024 bytes")
        if not 0 <= self.drain <= 3600:
            raise ValueError(f"--drain {self.drain}: 0 to 3600 seconds")
        return self

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(o.strip() for o in (self.cors or "").split(",") if o.strip())

    def names(self, model: str) -> tuple[str, ...]:
        """Names the model answers to, the main one first; default: as given, and its last part."""
        chosen = tuple(n.strip() for n in (self.served_model_name or "").split(",") if n.strip())
        last = os.path.basename(os.path.normpath(model))
        return chosen or tuple(dict.fromkeys((model, last)))


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
