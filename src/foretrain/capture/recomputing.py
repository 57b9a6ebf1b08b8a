"""Switches activation checkpointing on in a module as a plan says: by its library's own switch, or block by
block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from foretrain.capture.parallel.stacks import largest_list
from foretrain.plan import Plan

OWN_SWITCH = "its own checkpointing"
"""What was switched on where the module's library has a switch."""
_FLAG = "gradient_checkpointing"
"""The attribute by which a layer of transformers knows that it is a checkpoint."""
Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def recompute_layers(module: nn.Module, plan: Plan) -> str | None:
    """Let a module recompute its layers as the plan says, and say what was switched on; None where it has
    neither a switch of its own nor a list of blocks."""
    if plan.recompute == "full" and plan.recompute_every == 1 and _own_switch(module):
        return OWN_SWITCH
    if _transformers_layers(module, plan):
        return OWN_SWITCH
    if (path := largest_list(module)) is None:
        return None
    chosen = list(module.get_submodule(path).children())[:: plan.recompute_every]
    for block in chosen:
        _checkpoint(block, plan)
    return f"a checkpoint around each of {len(chosen)} blocks of {path}"


def _own_switch(module: nn.Module) -> bool:
    """Whether the module has a switch (timm's, transformers', or one of a user's that is called alike), which
    is on now."""
    for name, args in (("gradient_checkpointing_enable", ()), ("set_grad_checkpointing", (True,))):
        switch = getattr(module, name, None)
        if callable(switch):
            with contextlib.suppress(AssertionError, ValueError, NotImplementedError):  # not supported
                switch(*args)
                return True
    return False


def _transformers_layers(module: nn.Module, plan: Plan) -> bool:
    """Whether the module has layers of transformers that checkpoint themselves; those of the plan do now."""
    layers = [one for one in module.modules() if _checkpoints_itself(one)]
    switch = getattr(module, "gradient_checkpointing_enable", None)
    if not layers or not callable(switch):
        return False
    kwargs = {"use_reentrant": False, **_kwargs(plan)}
    try:
        switch(gradient_checkpointing_kwargs=kwargs)
    except ValueError:  # not supported
        return False
    for number, layer in enumerate(layers):
        setattr(layer, _FLAG, number % plan.recompute_every == 0)
    return True


def _checkpoints_itself(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _checkpoint(block: nn.Module, plan: Plan) -> None:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **_kwargs(plan))


def _kwargs(plan: Plan) -> dict[str, Any]:
    return {"context_fn": products_and_attention_kept} if plan.recompute == "operators" else {}


def products_and_attention_kept() -> Contexts:
    """The policy of torchtitan's checkpointing by operators: results of attention and of every second matrix
    product are kept, all else is computed again."""
    products = {False: 0, True: 0}

    def policy(context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept = func in _attention()
        if func in _PRODUCTS:
            is_kept = products[context.is_recompute] % 2 == 0
            products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    made: Contexts = create_selective_checkpoint_contexts(policy)
    return made


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@functools.cache
def _attention() -> frozenset[Any]:
    """torch's kernels of fused attention, those of them that this version has."""

    def found() -> Iterator[Any]:
        for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
            with contextlib.suppress(AttributeError):
                yield getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default

    return frozenset(found())
