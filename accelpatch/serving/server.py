"""Runs the server: the port first, then the model, then requests until a signal; running streams are finished."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from accelpatch.errors import ServingError
from accelpatch.serving.limits import Address, Limits

NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")


def check_installed(needed: Sequence[str] = NEEDED) -> None:
    """Raise ServingError where a package of the extra `serve` is missing."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ServingError(f"{', '.join(missing)} not installed: pip install 'accelpatch[serve]'")


def bound(address: Address) -> socket.socket:
    """A socket at the address, which refuses connections until the server runs. Raises ServingError."""
    address.check()
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServingError(f"--host {address.host} is no address of this machine: {error}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        return found
    except OSError as error:
        found.close()
        raise ServingError(
            f"cannot listen on {address.host} port {address.port}: {error.strerror}; give another --port, or 0 for any"
        ) from None


def serve(
    where: socket.socket, name: str, load: Callable[[], Any], limits: Limits, address: Address,
    started: Callable[[str], None],
) -> None:  # fmt: skip
    """Load a model and answer requests until SIGTERM or SIGINT; what was accepted is answered before it returns.

    where: of `bound`. load: returns accelpatch.models.load.Loaded. started: called with the server's URL.
    """
    import uvicorn

    from accelpatch.serving.app import Served, Server

    loaded = load()
    if not getattr(loaded.tokenizer, "is_fast", False):
        raise ServingError(f"{name} has no fast tokenizer (tokenizer.json), which transformers' server needs")
    config = loaded.model.config.get_text_config()
    served = Served(name, loaded.model, loaded.tokenizer, getattr(config, "max_position_embeddings", None))
    app = Server(served, limits, address).app
    settings = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=int(limits.seconds) + 1, server_header=False,
        access_log=False,
    )  # fmt: skip
    host = f"[{address.host}]" if ":" in address.host else address.host
    started(f"http://{host}:{where.getsockname()[1]}")
    uvicorn.Server(settings).run(sockets=[where])
