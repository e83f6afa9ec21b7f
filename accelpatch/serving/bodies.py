"""Checks the bodies of requests before transformers' handlers see them: what cannot be answered as asked is refused.

The handlers take any JSON object: some wrong ones end in a status 500 there, and fields that they do not support are
left out without a word, so that an answer would not be what was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

NonEmpty = Annotated[str, Field(min_length=1)]
#: fields that transformers leaves out -> the values that ask for nothing
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,),
    "presence_penalty": (0,), "response_format": ({"type": "text"},), "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],), "tool_choice": ("auto",), "background": (False,), "truncation": ("disabled",),
    "functions": ([],), "function_call": ("auto",), "include": ([],), "generation_config": (),
    "previous_response_id": (), "prediction": (), "audio": (), "web_search_options": (), "reasoning_effort": (),
    "max_tool_calls": (), "suffix": (),
}  # fmt: skip


class Refused(ValueError):
    """A request that is not answered; the message says why. param: the field at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None


class _Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: NonEmpty
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, value: str) -> str:
        if not isinstance(parsed(value), dict):
            raise ValueError("arguments are no JSON object")
        return value


class _Call(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    @field_validator("content")
    @classmethod
    def _is_said(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("content has no parts")
        return value


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: _Schema


class _FlatTool(_Schema):
    type: Literal["function"]


class _Common(BaseModel):
    """Fields of all three; unknown ones are refused by transformers.

    lengths: the fields for the most tokens to generate; the handler gets the first of them.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


class _Stopped(_Common):
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    # transformers takes it for a repetition penalty of 1 and this much
    frequency_penalty: Annotated[float, Field(ge=0, le=2)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1, max_length=16)] | None = None


class Chat(_Stopped):
    """A body of /v1/chat/completions."""

    lengths = ("max_tokens", "max_completion_tokens")

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    tools: list[_Tool] | None = None


class Completion(_Stopped):
    """A body of /v1/completions."""

    prompt: NonEmpty


class Response(_Common):
    """A body of /v1/responses."""

    lengths = ("max_output_tokens",)

    input: NonEmpty | Annotated[list[_Message | _Part], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    tools: list[_FlatTool | _Tool] | None = None


def parsed(text: str | bytes) -> Any:
    """JSON, as its standard has it. Raises Refused for anything else, and for text that is no Unicode."""

    def refuse(name: str) -> Any:
        raise Refused(f"{name} is no JSON number")

    try:
        found = json.loads(text, parse_constant=refuse)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError:
        raise Refused("the body has text that is not valid Unicode") from None
    except RecursionError:
        raise Refused("the body is nested too deeply") from None
    except ValueError as error:
        raise error if isinstance(error, Refused) else Refused(f"the body is not valid JSON: {error}") from None
    return found


def checked(form: type[_Common], body: bytes) -> dict[str, Any]:
    """The body as transformers' handlers take it. Raises Refused."""
    found = parsed(body)
    if not isinstance(found, dict):
        raise Refused("the body is no JSON object")
    try:
        form.model_validate(found)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, neutral in NEUTRAL.items():
        value = found.pop(name, None)
        if value is not None and value not in neutral:
            raise Refused(f"{name} is not supported by this server", name)
    lengths = [found.pop(name, None) for name in form.lengths]
    found[form.lengths[0]] = next((one for one in lengths if one is not None), None)
    return {name: value for name, value in found.items() if value is not None}


def _refusal(error: ValidationError) -> Refused:
    """One line for the first fault; of a union every alternative has one."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(one) for one in first["loc"])
    return Refused(f"{place}: {first['msg']}", place.partition(".")[0])
