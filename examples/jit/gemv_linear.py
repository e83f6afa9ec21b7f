"""The GEMV of gemv.py in a model: an implementation of accelpatch's linear layer, planned and verified as any other.

python examples/jit/gemv_linear.py            on an AMD GPU
python examples/jit/gemv_linear.py emulate    anywhere: a small model, each row in the emulator

cd examples/jit
accelpatch plan mistral-7b --recipe gemv_linear.yaml --plugin gemv_linear.py --arch gfx942
accelpatch run mistral-7b --recipe gemv_linear.yaml --plugin gemv_linear.py --prompt "The sea is"
"""

import runpy
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch

HERE = Path(__file__).parent
ROWS = 4  # of x: each is a launch
multiply = runpy.run_path(str(HERE / "gemv.py"))["multiply"]


def why_not(spec, device):
    """Why jit_gemv cannot run a call; None where it can: on AMD, and in the emulator on a CPU."""
    if spec.dtype != torch.bfloat16:
        return f"it multiplies bfloat16, not {spec.dtype}"
    if spec.sizes["M"] > ROWS:
        return f"{spec.sizes['M']} rows are more than the {ROWS} that it takes"
    return None if device.vendor in ("amd", "cpu") else "it is assembly for AMD"


@accelpatch.implementation("linear", name="jit_gemv", why_not=why_not)
def jit_gemv(x, w, bias=None):
    rows, w = (one.contiguous() for one in (x.reshape(-1, w.shape[1]), w))
    rows, w = (one if one.data_ptr() % 16 == 0 else one.clone() for one in (rows, w))
    y = x.new_empty(len(rows), len(w))
    for at in range(len(rows) if y.numel() else 0):
        y[at] = multiply(w, rows[at], None if x.is_cuda else "emulate")
    return (y if bias is None else y + bias.to(y.dtype)).view(*x.shape[:-1], len(w))


def main(device=None):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).bfloat16().eval()
    model = accelpatch.patch(model.to("cpu" if device else "cuda"), str(HERE / "gemv_linear.yaml"))
    taken = [site for site in model.accelpatch.report().sites if site.kernel == "jit_gemv"]
    print(len(taken), "linear layers by jit_gemv, the largest kernel error", max(site.kernel_error for site in taken))
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
