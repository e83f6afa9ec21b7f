"""Raised where a model, a layer or a weight has no fused form; the runtime catches it and reports the reason."""


class CannotFuse(Exception):
    """The message says why there is no fused form."""
