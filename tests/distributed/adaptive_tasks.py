"""Tasks of worker processes about adaptive inputs and the adaptive softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.config import RunConfig


def losses_and_gradients(config: RunConfig, weights: dict[str, Tensor], data: Any) -> Any:
    """Compute losses with `AdaptiveSoftmax`, and the gradients of their weighted sum.

    Args:
        config: The run's config.
        weights: Value of each parameter of the module.
        data: (hidden states [S, B, d], labels [B, S], weights of the losses [B, S]).

    Returns:
        (losses, gradients by name with that of the hidden states as "hidden", log probabilities).
    """
    from pretrain.model.adaptive import AdaptiveSoftmax

    layer = AdaptiveSoftmax(config.adaptive_clusters, config.model.hidden_size, None)
    layer.load_state_dict(weights, strict=True)
    hidden, labels, factors = data
    hidden = hidden.clone().requires_grad_()
    losses, _ = layer(hidden, labels=labels)
    (losses * factors).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"hidden": hidden.grad}
    with torch.no_grad():
        log_p, _ = layer(hidden)
    return losses.detach(), found, log_p


def largest_tensors(config: RunConfig, counts: list[int]) -> list[int]:
    """Compute the losses of some tokens of each cluster, and note the tensors that are made.

    Args:
        config: The run's config.
        counts: Tokens of each cluster.

    Returns:
        The numbers of elements of the ten largest tensors that a forward and a backward pass make.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from pretrain.model.adaptive import AdaptiveSoftmax

    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(each, Tensor):
                    made.append(each.numel())
            return out

    d = config.model.hidden_size
    layer = AdaptiveSoftmax(config.adaptive_clusters, d, None)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    clusters = config.adaptive_clusters
    labels = torch.cat([torch.full((n,), c.first) for n, c in zip(counts, clusters)])
    hidden = torch.randn(len(labels), 1, d, requires_grad=True)
    with Watch():
        layer(hidden, labels=labels[None])[0].sum().backward()
    return sorted(made)[-10:]


def initial_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return the initial weights of a model by global name."""
    from pretrain.model.gpt import build_model
    from pretrain.model.parameters import named_parameters
    from pretrain.topology import initialize

    initialize(config)
    return {n.name: n.parameter.detach() for n in named_parameters(build_model(config))}


def dropped_losses(config: RunConfig, tokens: Tensor, seeds: list[int]) -> list[Tensor]:
    """Compute the losses of a batch in training mode, after seeding dropout.

    Args:
        config: The run's config.
        tokens: Token ids [B, S + 1].
        seeds: A seed for each pass; None evaluates.
    """
    from pretrain.model.forward import call_model
    from pretrain.model.gpt import build_model
    from pretrain.topology import initialize

    initialize(config)
    [model] = build_model(config)
    found = []
    with torch.no_grad():
        for seed in seeds:
            torch.manual_seed(seed or 0)
            model.train(seed is not None)
            found.append(call_model(model, tokens, tokens.shape[1] - 1).clone())
    return found
