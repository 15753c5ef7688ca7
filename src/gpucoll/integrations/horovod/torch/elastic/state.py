"""The state of training with PyTorch: models, optimizers, samplers and other objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gpucoll.integrations.horovod import basics
from gpucoll.integrations.horovod.elastic import ObjectState
from gpucoll.integrations.horovod.torch.elastic.sampler import ElasticSampler
from gpucoll.integrations.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """Keeps, restores and exchanges one object that has a ``state_dict``.

    Parameters
    ----------
    value : object
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._kept = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Take over rank 0's."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another object from here on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """For a ``torch.nn.Module``."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """For a ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """For an `ElasticSampler`."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handler of each kind of object; the first that fits counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers of `TorchState` objects that are made from here on."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((make(value) for kind, make in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """A state whose attributes are models, optimizers, samplers and Python objects.

    Parameters
    ----------
    model, optimizer : optional
    **kwargs
        Further attributes: each is kept and exchanged as its kind needs it.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        made = {name: _handler_of(value) for name, value in given.items()}
        handlers = {name: handler for name, handler in made.items() if handler is not None}
        super().__setattr__("_handlers", handlers)
        for name, handler in handlers.items():
            super().__setattr__(name, handler.value)
        others = {name: value for name, value in given.items() if name not in handlers}
        super().__init__(broadcast_object, basics.rank, **others)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        """Divide the samples anew."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
