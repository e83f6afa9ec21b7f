"""What one request and all requests together may ask for, and who may ask."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.errors import ServingError

#: names and addresses that only this machine reaches
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """requests: accepted at once, waiting ones too. prompt_tokens, new_tokens: of one request; the model's context
    bounds their sum. seconds: from a request's arrival to its last token. body_bytes: of its JSON."""

    requests: int = 256
    prompt_tokens: int | None = None
    new_tokens: int = 4096
    seconds: float = 600.0
    body_bytes: int = 4 << 20


@dataclass(frozen=True)
class Address:
    """Where the server listens, and the key that requests to /v1 and /metrics must carry; None for no key."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None

    def check(self) -> None:
        """Raise ServingError for an address that other machines reach without a key."""
        if self.host not in LOOPBACK and not self.api_key:
            raise ServingError(
                f"--host {self.host} can be reached from other machines and no API key is set: set ACCELPATCH_API_KEY "
                "(or --api-key), or leave out --host to listen on this machine alone"
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ServingError("the API key has characters that no HTTP header can carry: use printable ASCII")
