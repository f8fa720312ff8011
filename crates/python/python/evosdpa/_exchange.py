"""Arrays of other libraries: taken over without a copy where DLPack or CUDA's array interface allows it, and the result given
back to the library of the queries in the same way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import _binding

_FAILURES = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)


def exchanged(tensors: dict[str, Any], call: Callable[..., Any]) -> Any:
    """Calls ``call(side, *tensors)`` with the module that computes and with tensors that it knows; a mask may be ``None``."""
    side = _binding.torch_side
    taken: list[Any] = []
    for name, tensor in tensors.items():
        if tensor is None and name == "attn_mask":
            taken.append(None)
        elif side is not None:
            taken.append(_to_torch(name, tensor, side.torch))
        else:
            taken.append(_to_numpy(name, tensor))
    if side is None:
        from . import _arrays as side
    result = call(side, *taken)
    give_back = _importer_of(tensors["q"])
    if isinstance(result, tuple):
        return tuple(None if part is None else give_back(part) for part in result)
    return give_back(result)


def _to_torch(name: str, tensor: Any, torch: ModuleType) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor
    _check(name, tensor)
    try:
        if hasattr(tensor, "__dlpack__"):
            return torch.from_dlpack(tensor)
        return torch.as_tensor(tensor if hasattr(tensor, "__cuda_array_interface__") else tensor.__array__())
    except _FAILURES as error:
        raise _untakeable(name, tensor, "torch", error) from error


def _to_numpy(name: str, tensor: Any) -> Any:
    try:
        import numpy
    except ImportError:
        raise ImportError("evosdpa takes arrays of other libraries with the help of NumPy or torch; install one of them") from None
    if isinstance(tensor, numpy.ndarray):
        return tensor
    _check(name, tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        raise _untakeable(name, tensor, "NumPy", BufferError("its memory is a GPU's"))
    try:
        return numpy.from_dlpack(tensor)
    except _FAILURES as error:
        # NumPy has no bfloat16 of its own; a library that knows ml_dtypes has.
        if hasattr(tensor, "__array__"):
            try:
                return numpy.asarray(tensor)
            except _FAILURES:
                pass
        raise _untakeable(name, tensor, "NumPy", error) from error


def _check(name: str, tensor: Any) -> None:
    if not any(hasattr(tensor, way) for way in ("__dlpack__", "__cuda_array_interface__", "__array__")):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}; give a torch tensor, a NumPy array or an object with __dlpack__, "
            "__cuda_array_interface__ or __array__"
        )


def _untakeable(name: str, tensor: Any, by: str, error: BaseException) -> Exception:
    said = str(error).strip().partition("\n")[0]
    kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
    if "Tracer" in kind:
        return TypeError(f"{name} is a {kind}, which has no memory yet; call evosdpa outside jit, vmap and grad (jax.pure_callback)")
    hint = "" if by == "torch" else "; install torch, which can take more"
    return NotImplementedError(f"{by} cannot take over {name}, a {kind} ({said}){hint}")


def _importer_of(tensor: Any) -> Callable[[Any], Any]:
    """What makes a result an array of the library that a tensor is from; the identity if that has no way."""
    namespace = getattr(tensor, "__array_namespace__", None)
    library = namespace() if namespace is not None else sys.modules.get(type(tensor).__module__.partition(".")[0])
    takes, makes = getattr(library, "from_dlpack", None), getattr(library, "asarray", None)

    def give_back(result: Any) -> Any:
        if isinstance(result, type(tensor)) or (takes is None and makes is None):
            return result
        try:
            return (takes or makes)(result)  # type: ignore[misc]
        except _FAILURES:
            if makes is None:
                raise
            return makes(result)

    return give_back
