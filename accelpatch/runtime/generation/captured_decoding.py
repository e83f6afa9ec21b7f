"""generate()'s loop for greedy decoding and sampling, over captured steps.

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
from transformers.generation.utils import GenerateDecoderOnlyOutput

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.triton.launch import on_device
from accelpatch.runtime.cache_form import misfit, why_not
from accelpatch.runtime.generation.captured_lookup import Late
from accelpatch.runtime.generation.captured_reports import Reports
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.decoding import loop, stock_loop_because
from accelpatch.runtime.generation.sampler import Sampler, Unknown
from accelpatch.runtime.graphs.captured_cache import NotCaptured
from accelpatch.runtime.graphs.captured_runtime import CapturedRuntime

Stock = Callable[..., Any]


def captured_loop(
    model: Any, runtime: CapturedRuntime, stock: Stock, given: tuple[Any, ...], synced_gpus: bool, streamer: Any,
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Replaces the model's `_sample`. given: ids[B, L], logits processors, stopping criteria and generation config."""
    ids, processors, criteria, config = given
    # streams and events are those of the model's GPU, whichever is the current one
    with on_device(ids), runtime.alone() as alone:
        reason = (
            _stock_because(model, runtime, ids, config, synced_gpus, kwargs)
            if alone
            else "generate() within generate()"
        )
        reason = reason or _turning(model, ids.shape[1], criteria.max_length)
        if reason is None:
            mask = kwargs.get("attention_mask")  # covers the tokens in a cache that was passed in too
            length = ids.shape[1] if mask is None else max(ids.shape[1], int(mask.shape[1]))
            capacity = runtime.room(length, criteria.max_length)
            try:
                run = CapturedRun(model, runtime, runtime.step(model, ids.shape[0], capacity))
            except NotCaptured as error:
                reason = str(error)
        if reason is None:
            with torch.no_grad():
                return _decode(run, ids, processors, criteria, config, streamer, kwargs)
    runtime.paths[f"stock loop: {reason}"] += 1
    return stock(*given, synced_gpus, streamer, **kwargs)


def _stock_because(
    model: Any, runtime: CapturedRuntime, ids: Tensor, config: Any, synced_gpus: bool, kwargs: dict[str, Any]
) -> str | None:
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if (mask is not None and mask.dim() != 2) or (positions is not None and positions.dim() != 2):
        return "an attention mask or positions of another shape than [B, L]"
    if kwargs.get(CACHE) is None:
        return "no cache"
    cache = kwargs[CACHE]
    reason = stock_loop_because(model, config, synced_gpus, kwargs) or why_not(cache) or runtime.why_not(model)
    return reason or misfit(cache, runtime.captured.cached)


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
    try:
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            raise Unknown("scores or logits were asked for")
        sampler = Sampler(processors, criteria, config.do_sample, ids.shape[1])
    except Unknown as reason:
        run.runtime.paths[f"token chosen by the host: {reason}"] += 1
        with run:
            return loop(steps, ids, processors, criteria, config, streamer, kwargs)
    with run:
        logits = steps.prompt(ids, config, kwargs)
        made = _late(run, sampler, config, logits, streamer, criteria.max_length - ids.shape[1])
    sequences = torch.cat([ids, made.to(ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE: run.kwargs.get(CACHE)})


def _late(run: CapturedRun, sampler: Sampler, config: Any, logits: Tensor, streamer: Any, most: int) -> Tensor:
    """New tokens [B, N], N up to `most`, on the host. Each report is read while the model's next step runs."""
    batch = run.step.batch
    graph = run.sampler(sampler, config._pad_token_tensor if sampler.ends is not None else None)
    batch.logits.copy_(logits)
    if run.lookup is not None:
        return Late(run.lookup, graph, run.all_rows(sampler), streamer, most).run()
    reports = Reports(batch.report)
    made: list[Tensor] = []
    graph.replay()
    reports.send()
    going_on = True
    while going_on:
        ahead = len(made) + 1 < most
        if ahead:
            run.advance()
        report = reports.wait()
        going_on = ahead and bool(report[-1])
        if going_on:  # queued before the streamer, which may be slow, is called
            graph.replay()
            reports.send()
        made.append(report[:-1])
        run.used(len(made) - 1)  # in case the streamer raises
        if streamer is not None:
            streamer.put(report[:-1])
    if streamer is not None:
        streamer.end()
    return torch.stack(made, dim=1)
