"""Serving: transformers' own server around a patched model, hand-over to vLLM and SGLang, and a load tool."""
