"""Noticing that parts of a model were exchanged after something was bound to them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


class Places:
    """Where some modules of a model stand, what they stand in and what they are made of."""

    def __init__(self, model: nn.Module, modules: Collection[nn.Module]) -> None:
        named = dict(model.named_modules())
        names: set[str] = set()
        for path in [name for name, module in named.items() if module in modules]:
            names.update(name for name, _ in named[path].named_modules(prefix=path))
            steps = path.split(".")
            names.update(".".join(steps[:i]) for i in range(1, len(steps)))
        self._children: list[tuple[str, dict[str, nn.Module | None], str, nn.Module]] = []
        for name in sorted(names & named.keys()):
            parent, _, child = name.rpartition(".")
            if parent in named:  # else a module stands in two places, and this one is its second
                self._children.append((name, named[parent]._modules, child, named[name]))

    def exchanged(self) -> str | None:
        """The name of a module that is not what it was, if there is one. Costs a microsecond for some ten modules."""
        for name, siblings, child, module in self._children:
            if siblings.get(child) is not module:
                return name
        return None
