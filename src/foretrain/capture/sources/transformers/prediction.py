"""Adds multi-token prediction to a language model: layers behind the last one that predict further tokens.

As in DeepSeek-V3 (arXiv 2412.19437, section 2.2): each joins what the layers before it give with the
embedding of the next token, by norms of both and a projection, and runs a layer like the model's last; the
embedding and the layer of the logits are the model's own. Its losses count beside that of the model.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from foretrain.errors import UnsupportedJob

LOSS_WEIGHT = 0.1
"""Of the losses of further tokens, as DeepSeek-V3 ends its training with; no time depends on it."""


def predict_further(module: Any, count: int) -> None:
    """Change a language model in place, so that it is trained to predict ``count`` tokens more."""
    base = getattr(module, "base_model", None)
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module) or head is None:
        raise UnsupportedJob(
            f"training.mtp_layers: {count}, but {type(module).__name__} is no language model of layers, "
            "a norm and a layer of logits"
        )
    module.mtp = nn.ModuleList(_Prediction(layers[-1], norm, head) for _ in range(count))
    module.mtp.within_sequence = True
    _Seen(module, layers[0], norm, head)


class _Prediction(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module, head: Any) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        width, weight = head.weight.shape[1], head.weight
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device=weight.device, dtype=weight.dtype)
        self.layer = copy.deepcopy(layer)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, call: dict[str, Any]) -> Any:
        """What logits are made of, and what goes on to the next prediction."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output = self.layer(joined, **call)
        output = output if isinstance(output, torch.Tensor) else output[0]
        return self.norm(output), output


class _Seen:
    """What a model's first layer is called with and its last one gives, which predictions go on from."""

    def __init__(self, module: Any, first: nn.Module, norm: nn.Module, head: nn.Module) -> None:
        self._module, self._head = module, head
        self._embedded = self._hidden = torch.empty(0)
        self._call: dict[str, Any] = {}
        first.forward = functools.partial(self._enter, first.forward)
        norm.forward = functools.partial(self._leave, norm.forward)
        module.forward = functools.wraps(module.forward)(functools.partial(self._predict, module.forward))

    def _enter(self, forward: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._embedded, self._call = x, kwargs
        return forward(x, *args, **kwargs)

    def _leave(self, forward: Any, x: torch.Tensor) -> Any:
        self._hidden = x
        return forward(x)

    def _predict(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        hidden, embedded = self._hidden, self._embedded
        labels: Any = kwargs.get("labels")
        for prediction in () if labels is None else self._module.mtp:
            labels, embedded = torch.roll(labels, -1, 1), torch.roll(embedded, -1, 1)
            normed, hidden = prediction(hidden, embedded, self._call)
            loss = self._module.loss_function(
                logits=self._head(normed), labels=labels, vocab_size=self._module.config.vocab_size
            )
            output.loss = output.loss + LOSS_WEIGHT * loss
        self._hidden = self._embedded = torch.empty(0)
        self._call = {}
        return output
