"""Methods of a patched model that read, write or name its weights: they handle packed weights, or raise."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from typing import Any

from torch import nn

from accelpatch.errors import PatchError
from accelpatch.modules.adapted_experts import adapt_packed
from accelpatch.modules.adapted_linear import wrappers_in
from accelpatch.modules.packed_weight import PackedWeight, packed_in
from accelpatch.modules.quantized_module import take_over
from accelpatch.runtime.generation.adapter_targets import check_next

MODULE = "torch.nn.modules.module"
PATCHED = "_accelpatch_patched"  # an attribute of patched instances only
HANDLE = "accelpatch"  # the attribute of a patched model that undoes the patch
SAVE = "_accelpatch_save"  # the attribute of a patched model that holds the function that writes it into a folder

# transformers would write tensors under names that it cannot read back, or grow a table that is packed.
REFUSED = {
    "save_pretrained": "writes whole patched models; call accelpatch.unpatch(model) on the whole, and save the part",
    "push_to_hub": "writes whole patched models; call accelpatch.unpatch(model) on the whole, and push the part",
    "resize_token_embeddings": "would change packed weights; call accelpatch.unpatch(model), resize, and patch again",
}


def refusing(stock: Any, advice: str) -> Any:
    @functools.wraps(stock)
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if PATCHED not in vars(self):  # another model of the class, made by `type(model)(...)`
            return stock(self, *args, **kwargs)
        raise PatchError(f"{stock.__name__} {advice}")

    return refuse


def saving(stock: Any) -> Any:
    @functools.wraps(stock)
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, push_to_hub: bool = False,
        max_shard_size: Any = "5GB", **kwargs: Any,
    ) -> None:  # fmt: skip
        if PATCHED not in vars(self) or getattr(self, "_hf_peft_config_loaded", False):  # adapters alone are saved
            given = {"is_main_process": is_main_process, "state_dict": state_dict, "push_to_hub": push_to_hub}
            stock(self, save_directory, **given, max_shard_size=max_shard_size, **kwargs)
            return
        if state_dict is not None or kwargs.get("variant") is not None:
            raise PatchError("a patched model saves its own weights: leave out state_dict and variant")
        take_over(self)
        if is_main_process:
            vars(self)[SAVE](self, save_directory, max_shard_size=max_shard_size)
            if push_to_hub:
                named = kwargs.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
                known = {"token", "private", "commit_message", "create_pr", "revision", "tags"}
                self.push_to_hub(named, **{key: value for key, value in kwargs.items() if key in known})

    return save_pretrained


def moving(stock: Any) -> Any:
    @functools.wraps(stock)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in nn.Module, for every weight that the model uses."""
        take_over(self)
        return stock(self, *args, **kwargs)

    return apply


def tying(stock: Any) -> Any:
    @functools.wraps(stock)
    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Leaves tied replacements alone: they share one pack, and transformers would add a float weight."""
        ends = [end() for end in (self.get_input_embeddings, self.get_output_embeddings)]
        packed = [end for end in ends if isinstance(end, PackedWeight)]
        if PATCHED not in vars(self) or not packed:
            return stock(self, *args, **kwargs)
        if (
            len({id(end.weight_owner) for end in packed}) + len(ends) - len(packed) > 1
            and self.config.tie_word_embeddings
        ):
            raise PatchError(
                "tie_weights would replace a packed weight; call accelpatch.unpatch(model), tie, and patch again"
            )
        return None

    return tie_weights


def naming_ties(cls: Any) -> Any:
    @functools.wraps(cls.named_parameters)
    def named_parameters(self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """As in nn.Module; with remove_duplicate=False also the tokens of packed weights, by which PEFT and accelerate
        find ties. torch itself replaces all tensors that it gets here (torch.export), so that it gets no tokens.
        """
        if sys._getframe(1).f_globals.get("__name__") == MODULE:  # parameters(), once or more often for each token
            return cls.named_parameters(self, prefix, recurse, remove_duplicate)
        if not recurse:  # PEFT looks for an adapter's targets in this way
            check_next(self)
        adapt_packed(self)  # PEFT asks for all names once its adapters are in
        if (handle := vars(self).get(HANDLE)) is not None:
            for module, kind in wrappers_in(self):
                handle.set(module, "__class__", kind)
        named = cls.named_parameters(self, prefix, recurse, remove_duplicate)
        start = f"{prefix}." if prefix else ""
        tokens = ((f"{start}{name}.weight", module.token) for name, module in packed_in(self))
        by_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
        return named if remove_duplicate or not recurse or by_torch else itertools.chain(named, tokens)

    return named_parameters


def marking_packed(cls: Any) -> Any:
    @functools.wraps(cls.requires_grad_)
    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        """As in nn.Module, for packed weights too."""
        for _, module in packed_in(self):
            module.trainable = requires_grad
        return cls.requires_grad_(self, requires_grad)

    return requires_grad_
