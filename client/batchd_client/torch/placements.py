"""Batches become tensors in the memory of the host. Runs in the trainer; see ``batchd_client.feed``.

Invariant: a batch is given back as soon as its tensors are made, whatever happens while they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchd_client.batch import Batch
from batchd_client.torch.tensors import Recipe, Tensors, cut, fill, fresh, is_ragged, largest_in, over, rows_in

Give = Callable[[list[Tensors]], Any]
"""Makes of the tensors of a batch, in the order of the recipes, what the user's loop gets."""
HOST = torch.device("cpu")


class Placed:
    """Tensors that are there; the user's own part in them comes when the loop wants them."""

    def __init__(self, tensors: list[Tensors], give: Give) -> None:
        self._tensors = tensors
        self._give = give

    def finish(self) -> Any:
        """See ``feed.Transfer``."""
        return self._give(self._tensors)


class HostPlacement:
    """Copies batches, in one pass together with whatever is done to them; then, where that is wanted, to another device."""

    def __init__(self, recipes: Sequence[Recipe], give: Give, device: torch.device = HOST) -> None:
        self._recipes = recipes
        self._give = give
        self._device = device

    def begin(self, batch: Batch) -> Placed:
        """See ``feed.Placement``."""
        with batch:
            return Placed([self._tensors(recipe, batch) for recipe in self._recipes], self._give)

    def _tensors(self, recipe: Recipe, batch: Batch) -> Tensors:
        room = batch.room(recipe.name)
        if is_ragged(room):
            rows = rows_in(room).packed(fresh, fill)
            if self._device != HOST:
                rows = rows.over(rows.values.to(self._device))
            return [recipe.look(row, owned=True) for row in rows.views()]
        source = cut(over(room.array), largest_in(room))
        if self._device == HOST:
            return recipe.look(source, owned=False)
        return recipe.look(source.to(self._device), owned=True)

    def sweep(self, *, wait: bool = False) -> None:
        """See ``feed.Placement``. Nothing is under way."""

    def close(self) -> None:
        """See ``feed.Placement``."""
