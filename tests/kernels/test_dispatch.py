"""The choice of an implementation: in order, with every reason, by thread, and counted."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accelpatch.device import KNOWN, Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import choice, dispatch
from accelpatch.kernels.ops.linear import gemm_w8a8
from accelpatch.kernels.ops.linear.int8_linear import int8_linear, reference
from accelpatch.kernels.spec import Implementation, Spec
from tests.support.parity import name

REGISTERED = [op for op in dispatch.TABLE if dispatch.kernel(op).registered]
# A pack is the CPU's own layout: its operations run there alone.
CANONICAL = [op for op in REGISTERED if "packed" not in op]
SPEC = Spec("int8_linear", {"M": 1, "N": 8, "K": 64}, torch.float32, torch.float32, 64)


def arguments(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-127, 128, (8, 64), generator=generator, dtype=torch.int8)
    return torch.randn(3, 64, generator=generator).to(dtype), q, torch.full((8, 1), 0.01)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8_linear with two more implementations before "torch": one never runs, one only for K under 32."""
    kernel = dispatch.kernel("int8_linear")
    more: dict[str, Implementation] = {
        "never": Implementation(reference, lambda spec, device: f"needs {spec.op}'s own chip, not a {device.arch}"),
        "narrow": Implementation(reference, lambda spec, device: None if spec.sizes["K"] < 32 else "K is 32 or more"),
    }
    monkeypatch.setitem(
        vars(kernel), "implementations", {**more, **kernel.implementations}
    )  # a frozen dataclass keeps its fields in its __dict__
    order_by(monkeypatch, "never", "narrow", "torch")


def order_by(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The order of int8_linear's implementations."""
    monkeypatch.setattr(choice, "TABLE", {**choice.TABLE, "int8_linear": (choice.Row(names),)})


@pytest.mark.parametrize("device", [probe("cpu"), *KNOWN.values()], ids=lambda device: device.arch)
@pytest.mark.parametrize("op", CANONICAL)
def test_plain_torch_runs_everything_on_every_device(op: str, device: Device) -> None:
    last = "operations" if dispatch.kernel(op).composed else "eager" if op == "flash_attention" else "torch"
    assert dispatch.why_not(op, last, SPEC, device) is None
    assert all(row.order[-1] == last for row in choice.TABLE[op])


def test_a_composed_operation_is_forced_through_its_parts() -> None:
    args = next(iter(dispatch.kernel("w8a8_linear").cases())).make(
        torch.Generator().manual_seed(0), F32, torch.device("cpu")
    )
    chosen = dispatch.choose("gemm_w8a8", gemm_spec(*args), probe("cpu"))
    for forced, inner in (("torch", "torch"), ("operations", chosen)):
        dispatch.calls.clear()
        with dispatch.forced(forced):
            dispatch.kernel("w8a8_linear").op(*args)
        assert dispatch.calls == {
            ("w8a8_linear", "operations"): 1, ("quantize_rows", "torch"): 1, ("gemm_w8a8", inner): 1,
        }  # fmt: skip


def gemm_spec(x: torch.Tensor, q: torch.Tensor, *_: Any) -> Spec:
    return gemm_w8a8.of_shape(len(x), *q.shape, x.dtype)


@pytest.mark.parametrize("op", dispatch.TABLE)
def test_table_names_what_the_files_hold(op: str) -> None:
    if dispatch.kernel(op).registered:
        assert dispatch.kernel(op).op.custom._qualname == f"accelpatch::{op}"


@pytest.mark.usefixtures("refusing")
def test_first_without_a_reason_wins() -> None:
    device = probe("cpu")
    assert dispatch.choose("int8_linear", SPEC, device) == "torch"
    assert (
        dispatch.choose("int8_linear", Spec("int8_linear", {"M": 1, "N": 8, "K": 8}, torch.float32), device) == "narrow"
    )


@pytest.mark.usefixtures("refusing")
def test_no_implementation_gives_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    order_by(monkeypatch, "never", "narrow")
    with pytest.raises(KernelError) as raised:
        dispatch.choose("int8_linear", SPEC, KNOWN["gfx942"])
    for part in ("own chip, not a gfx942", "K is 32 or more", "K = 64", "keep this site"):
        assert part in str(raised.value)


@pytest.mark.usefixtures("refusing")
def test_forced_one_that_cannot_run_raises_its_reason() -> None:
    with dispatch.forced("narrow"), pytest.raises(KernelError, match="'narrow' cannot run here: K is 32 or more"):
        int8_linear(*arguments())


def test_forced_unknown_one_raises() -> None:
    with dispatch.forced("abacus"), pytest.raises(KernelError, match=r"no implementation 'abacus'.*torch"):
        int8_linear(*arguments())


@pytest.mark.parametrize("args", [("torch", torch.float64), ("reference", torch.int8)], ids=["not-reference", "int8"])
def test_precision_is_for_the_reference(args: tuple[str, torch.dtype]) -> None:
    with pytest.raises(KernelError, match="precision"), dispatch.forced(*args):
        pass


def test_unknown_operation() -> None:
    with pytest.raises(KernelError, match="there is no operation 'conv'"):
        dispatch.kernel("conv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
def test_reference_in_float64_is_rounded_once(dtype: torch.dtype) -> None:
    x, q, scale = arguments(dtype)
    with dispatch.forced("reference", torch.float64):
        found = int8_linear(x, q, scale)
    assert torch.equal(found, (x.double() @ (q.double() * scale.double()).T).to(dtype))


@pytest.mark.parametrize("op", REGISTERED)
def test_reference_keeps_output_dtypes(op: str) -> None:
    args = list(dispatch.kernel(op).cases())[1].make(
        torch.Generator().manual_seed(0), torch.float16, torch.device("cpu")
    )
    expected = dispatch.output_dtypes(op, args)
    rows = {torch.int8, torch.float32}  # whatever x is
    integers = {"quantize_rows": rows, "rmsnorm_rows": {*rows, torch.float16}, "gemm_w8a8": {torch.float32}}
    integers |= {"layernorm_q": {torch.int8}, "int8_attention": {torch.int8}}
    integers |= {"choose_experts": {torch.int64, torch.float16}}
    integers |= {"gated_rows": {torch.float8_e4m3fnuz, torch.float32}, "layernorm_rows": {*rows, torch.float16}}
    integers |= {"activated_rows": {torch.float8_e4m3fn, torch.float32}}
    assert set(expected) == integers.get(op, {torch.float16})
    for precision in (None, torch.float32, torch.float64):
        with dispatch.forced("reference", precision):
            result = dispatch.kernel(op).op(*args)
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        assert tuple(output.dtype for output in outputs) == expected


def test_forced_nests_ends_and_stays_in_its_thread() -> None:
    dispatch.calls.clear()
    args = arguments()
    with dispatch.forced("reference"):
        with dispatch.forced("torch"):
            int8_linear(*args)
        thread = threading.Thread(target=int8_linear, args=args)
        thread.start()
        thread.join()
        assert dispatch.calls == {("int8_linear", "torch"): 2}
        int8_linear(*args)
    int8_linear(*args)
    assert dispatch.calls == {("int8_linear", "torch"): 3, ("int8_linear", "reference"): 1}


def test_forced_ends_where_its_body_raises() -> None:
    with pytest.raises(ZeroDivisionError), dispatch.forced("abacus"):
        raise ZeroDivisionError
    int8_linear(*arguments())


X, Q, S = torch.zeros(2, 6), torch.zeros(4, 6, dtype=torch.int8), torch.ones(4, 2)
IDS = torch.zeros(3, dtype=torch.int64)
F32 = torch.float32
MISUSE: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "features": ("int8_linear", (X[:, :5], Q, S), "x has 5 features, the weight 6"),
    "x-integer": ("int8_linear", (X.int(), Q, S), "x is float"),
    "x-scalar": ("int8_linear", (torch.tensor(1.0), Q, S), "x is float"),
    "q-float": ("int8_linear", (X, X, S), "q is int8"),
    "q-uint8": ("int4_linear", (X, Q[:, :3].view(torch.uint8), S), "q is int8"),
    "q-empty": ("int8_linear", (X, Q[:0], S[:0]), "the weight is empty"),
    "scale-rows": ("int8_linear", (X, Q, S[:3]), "scale is float"),
    "scale-flat": ("int8_linear", (X, Q, S[:, 0]), "scale is float"),
    "groups": ("int8_linear", (X, Q, torch.ones(4, 4)), "4 groups do not divide K = 6"),
    "no-groups": ("int8_linear", (X, Q, S[:, :0]), "0 groups"),
    "bias": ("int8_linear", (X, Q, S, torch.ones(5)), "bias is float"),
    "bias-device": ("int8_linear", (X, Q, S, torch.ones(4, device="meta")), "move the module"),
    "offset": ("int4_linear", (X, Q[:, :3], S, S[:, :1]), r"offset is \[4, 2\] here"),
    "ids-float": ("int8_embedding", (X, Q, S, F32), "ids are int32 or int64"),
    "ids-dtype": ("int8_embedding", (IDS, Q, S, torch.int8), "dtype is a float"),
    "norm-weight": ("rmsnorm", (X, torch.ones(5), 1e-6, False), "weight is float"),
    "norm-empty": ("rmsnorm", (X[:, :0], torch.ones(0), 1e-6, False), "K = 0"),
    "norm-eps": ("rmsnorm", (X, torch.ones(6), -1.0, False), "eps"),
    "residual": ("add_rmsnorm", (X, X[:1], torch.ones(6), 1e-6, False), "make them equal"),
    "positions": ("rotary_cos_sin", (X, torch.ones(4), 1.0, F32), "position_ids are integers"),
    "inv-freq": ("rotary_cos_sin", (IDS, X, 1.0, F32), "inv_freq is float"),
    "activation": ("gated_activation", (X, X, "swoosh"), "no activation 'swoosh'; there are silu"),
    "gate-shape": ("gated_activation", (X, X[:1], "silu"), "make them equal"),
    "gate-dtype": ("gated_activation", (X, X.half(), "silu"), "make them one"),
}


@pytest.mark.parametrize("op, args, message", MISUSE.values(), ids=MISUSE)
def test_misuse_says_what_came(op: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        dispatch.kernel(op).op(*args)
    on_meta = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args)
    if "device" not in message and "move" not in message:
        with pytest.raises(KernelError, match=message):
            dispatch.kernel(op).op(*on_meta)


@pytest.mark.parametrize("bad", [4, -1], ids=["past-the-end", "negative"])
def test_embedding_refuses_ids_out_of_range(bad: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        dispatch.kernel("int8_embedding").op(torch.tensor([0, bad]), Q, S, F32)


PARTS_OF_ONE = {"_codes", "_six_bits", "_float16", "_signed"}  # of the reference of GGUF blocks alone
OF_REFERENCES = {"dense", "accumulators", "activated_reference"} | PARTS_OF_ONE


def test_references_share_no_code_with_implementations() -> None:
    """No reference calls an implementation's functions, and none imports this repository's kernels."""
    for file in {dispatch.TABLE[op] for op in CANONICAL}:
        source = (Path(dispatch.__file__).parent / f"ops/{file.replace('.', '/')}.py").read_text()
        functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        own = [functions[part] for part in ("reference", *OF_REFERENCES) if part in functions]
        called = {node.id for part in own for node in ast.walk(part) if isinstance(node, ast.Name)}
        assert not called & (set(functions) - OF_REFERENCES | {"linear", "dispatch", "ACTIVATIONS"})
        others = [functions[name] for name in functions if name.startswith("by_") or name.endswith("_by_torch")]
        assert not {node.id for one in others for node in ast.walk(one) if isinstance(node, ast.Name)} & PARTS_OF_ONE
