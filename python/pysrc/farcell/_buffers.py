"""What is no buffer by itself, as one."""

from __future__ import annotations

import ctypes
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
    if thing.layout != torch.strided:
        raise TypeError(f"the tensor's layout is {thing.layout}: use .to_dense()")
    # Their memory has other numbers than they show.
    if thing.is_conj() or thing.is_neg():
        raise TypeError("the tensor is a view that negates: use .resolve_conj().resolve_neg()")
    if not thing.is_contiguous():
        raise TypeError("the tensor is not contiguous: use .contiguous()")
    # Every dtype has bytes; numpy does not know all of them.
    flat = thing.detach().reshape(-1).view(torch.uint8)
    try:
        return flat.numpy()
    except RuntimeError:
        # There is a PyTorch without numpy. Whoever calls keeps the tensor meanwhile.
        return (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
