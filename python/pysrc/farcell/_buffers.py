"""What is no buffer by itself, as one."""

from __future__ import annotations

import sys
from typing import Any


def of(thing: Any) -> Any:
    """The memory of a contiguous CPU tensor, as bytes that can be written."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(thing, torch.Tensor):
        raise TypeError(
            f"a {type(thing).__name__} has no bytes to share: give a contiguous CPU tensor, a "
            "numpy array, or another buffer"
        )
    if thing.device.type != "cpu":
        raise TypeError(f"the tensor is on {thing.device}: copy it to the CPU first, .cpu()")
    if not thing.is_contiguous():
        raise TypeError("the tensor is not contiguous: use .contiguous()")
    # Every dtype has bytes; numpy does not know all of them.
    return thing.detach().reshape(-1).view(torch.uint8).numpy()
