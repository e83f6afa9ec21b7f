"""generate() over captured steps: the loop. One call with its prompt, steps and cache is a CapturedRun.

Where the token can be sampled on the device, the host queues the next step before it reads the last token's report, and
drops the step that is too many at the end. Where logits processors or criteria need the host, the model's step is
replayed and the host samples. All else runs transformers' own loop over the same modules. The runtime's `paths` counts
each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.triton.launch import on_device
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.decoding import loop
from accelpatch.runtime.generation.encoder_decoder_run import EncoderDecoderRun
from accelpatch.runtime.generation.speculation import Late
from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.kv_cache import NotCaptured
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.sampler import SCORES, Reports, Sampler, Unknown
from accelpatch.runtime.graphs.step import Batch

Stock = Callable[..., Any]


def captured_loop(
    model: Any, runtime: CapturedRuntime, stock: Stock, given: tuple[Any, ...], synced_gpus: bool, streamer: Any,
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Replaces the model's `_sample`. given: ids[B, L], logits processors, stopping criteria and generation config."""
    ids, processors, criteria, config = given
    # streams and events are those of the model's GPU, whichever is the current one
    with on_device(ids), runtime.alone() as alone:
        kind = EncoderDecoderRun if model.config.is_encoder_decoder else CapturedRun
        if alone:
            runtime.use_format(kwargs.get(CACHE))
        reason = kind.why_not(model, runtime, config, synced_gpus, kwargs) if alone else "generate() within generate()"
        reason = reason or _turning(model, ids.shape[1], criteria.max_length) or _expanding(model, ids, kwargs)
        if reason is None:
            try:
                run = kind.begun(model, runtime, ids, criteria.max_length, kwargs)
            except NotCaptured as error:
                reason = str(error)
        if reason is None:
            with torch.no_grad():
                return _decode(run, ids, processors, criteria, config, streamer, kwargs)
    runtime.paths[f"stock loop: {reason}"] += 1
    return stock(*given, synced_gpus, streamer, **kwargs)


def _expanding(model: Any, ids: torch.Tensor, kwargs: dict[str, Any]) -> str | None:
    """Why a prompt with sounds fills more slots than it has ids; None where it does not.

    Qwen2-Audio in older versions of transformers replaces a lone token of a sound by as many as the tower gives.
    """
    token = getattr(model.config, "audio_token_id", None)
    if token is None or kwargs.get("input_features") is None:
        return None
    sounds = ids == token
    lone = bool(sounds.any()) and not bool((sounds[:, 1:] & sounds[:, :-1]).any())
    return "one token for a whole sound" if lone else None


def _turning(model: Any, length: int, most: int) -> str | None:
    """Why longrope's frequencies change while a sequence grows from `length` to `most` tokens; None where they do not.

    They change beyond a fixed length, where transformers computes the whole cache anew.
    """
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    switch = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "longrope" or switch is None or not length <= switch < most - 1:
        return None
    return f"longrope's frequencies change beyond {switch} tokens"


def _decode(
    run: CapturedRun, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any, kwargs: dict[str, Any]
) -> Any:
    steps = run.looking_up(ids, criteria.max_length) or run
    kept = _Kept(config)
    try:
        if (kept.scores is not None or kept.logits is not None) and run.lookup is not None:
            raise Unknown("scores or logits were asked for")
        sampler = Sampler(processors, criteria, config.do_sample, ids.shape[1], ids, kept.scores is not None)
    except Unknown as reason:
        run.runtime.paths[f"token chosen by the host: {reason}"] += 1
        with run:
            return loop(steps, ids, processors, criteria, config, streamer, kwargs, run.result)
    with run:
        logits = steps.prompt(ids, config, kwargs)
        for processor in sampler.watching:
            processor(ids, logits)
        made = _late(run, sampler, config, logits, streamer, criteria.max_length - ids.shape[1], kept)
    sequences = torch.cat([ids, made.to(ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return run.result(sequences=sequences, **kept.of_all(ids.device), **{CACHE: run.kwargs.get(CACHE)})


class _Kept:
    """The scores and logits [B, V] of each token that the caller asks for, copied on the device; None for none."""

    def __init__(self, config: Any):
        asked = bool(config.return_dict_in_generate)
        self.scores: list[Tensor] | None = [] if asked and config.output_scores else None
        self.logits: list[Tensor] | None = [] if asked and config.output_logits else None

    def choose(self, graph: Graph, batch: Batch) -> None:
        """Queue the sampler, and the copies."""
        if self.logits is not None:
            self.logits.append(batch.logits.clone())
        graph.replay()
        if self.scores is not None:
            self.scores.append(batch.tables[SCORES].clone())

    def of_all(self, device: torch.device) -> dict[str, Any]:
        """By their names in generate()'s result."""
        both = {"scores": self.scores, "logits": self.logits}
        return {name: None if one is None else tuple(each.to(device) for each in one) for name, one in both.items()}


def _late(
    run: CapturedRun, sampler: Sampler, config: Any, logits: Tensor, streamer: Any, most: int, kept: _Kept
) -> Tensor:
    """New tokens [B, N], N up to `most`, on the host. Each report is read while the model's next step runs."""
    batch = run.step.batch
    graph = run.sampler(sampler, config._pad_token_tensor if sampler.ends is not None else None)
    batch.logits.copy_(logits)
    if run.lookup is not None:
        return Late(run.lookup, graph, run.all_rows(sampler), streamer, most).run()
    reports = Reports(batch.report)
    made: list[Tensor] = []
    kept.choose(graph, batch)
    reports.send()
    going_on = True
    while going_on:
        ahead = len(made) + 1 < most
        if ahead:
            run.advance()
        report = reports.wait()
        going_on = ahead and bool(report[-1])
        if going_on:  # queued before the streamer, which may be slow, is called
            kept.choose(graph, batch)
            reports.send()
        made.append(report[:-1])
        run.used(len(made) - 1)  # in case the streamer raises
        if streamer is not None:
            streamer.put(report[:-1])
    if streamer is not None:
        streamer.end()
    return torch.stack(made, dim=1)
