"""Arrays of other libraries: taken over without a copy where DLPack or CUDA's array interface allows it, and the result given
back to the library of the queries in the same way."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import _binding, _words

_FAILURES = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)
_WAYS = ("__dlpack__", "__cuda_array_interface__", "__array__")
_WRITTEN = ("k_cache", "v_cache")


def again(function: Any, given: dict[str, Any]) -> Any:
    """Calls a function again with the arguments it was given, of which every tensor (what it takes as ``Any`` or ``Array``) is torch's
    or NumPy's then."""
    side, code = _binding.torch_side, function.__code__
    required = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
    arguments = {}
    for name, kind in function.__annotations__.items():
        if name not in given:
            continue  # the result, and what the function has put aside
        tensor = arguments[name] = given[name]
        if kind not in ("Any", "Array") or isinstance(tensor, numbers.Integral) or (tensor is None and name not in required):
            continue
        if name in _WRITTEN and given["k"] is not None:
            _check_writable(name, tensor)
        arguments[name] = _to_numpy(name, tensor) if side is None else _to_torch(name, tensor, side.torch)
    result = function(**arguments)
    give_back = _importer_of(given["q"])
    if isinstance(result, tuple):
        return tuple(None if part is None else give_back(part) for part in result)
    return give_back(result)


def is_foreign(tensor: Any) -> bool:
    """Whether something beside torch tensors is an array, of whatever library."""
    side = _binding.torch_side
    return side is not None and not isinstance(tensor, side.torch.Tensor) and any(hasattr(tensor, way) for way in _WAYS)


def _to_torch(name: str, tensor: Any, torch: ModuleType) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor
    _check(name, tensor)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    try:
        if hasattr(tensor, "__dlpack__"):
            return torch.from_dlpack(tensor)
        if interface is None:
            return torch.as_tensor(tensor.__array__())
        if interface.get("stream") is not None:
            torch.cuda.synchronize()  # what its owner has queued there may not be done
        return torch.as_tensor(tensor)
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
    kind = type(tensor).__name__
    if not any(hasattr(tensor, way) for way in _WAYS):
        raise TypeError(
            f"{name} is a {kind}; give a torch tensor, a NumPy array or an object with __dlpack__, "
            "__cuda_array_interface__ or __array__"
        )
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray) and type(tensor) not in (numpy.ndarray, numpy.memmap):
        raise TypeError(_words.subclass(name, kind))
    if not _is_of_jax(tensor):
        return
    if kind.endswith("Tracer"):
        raise TypeError(
            f"{name} is a {kind}, which has no memory: evosdpa was called inside jax.jit, vmap or grad. In jit and vmap use "
            "jax.pure_callback(evosdpa.sdpa, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v, vmap_method='sequential'); "
            "there are no gradients"
        )
    if getattr(tensor, "is_deleted", bool)():
        raise ValueError(f"{name} was deleted, or donated to a jitted function: its memory is gone")
    devices = len(getattr(tensor, "devices", set)())
    if devices > 1:
        raise NotImplementedError(
            f"{name} is spread over {devices} devices; call evosdpa on its parts, by jax.shard_map with jax.pure_callback inside"
        )


def _check_writable(name: str, cache: Any) -> None:
    """New tokens are written in place: into memory that others may not rely on, and into no copy."""
    if _is_of_jax(cache) or not hasattr(cache, "__dlpack__"):
        raise TypeError(
            f"{name} is a {type(cache).__name__}, whose memory cannot be written to, but new keys and values go into the cache in "
            "place; write them yourself and leave k and v out"
        )


def _is_of_jax(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] in ("jax", "jaxlib")


def _untakeable(name: str, tensor: Any, by: str, error: BaseException) -> Exception:
    said = str(error).strip().partition("\n")[0]
    kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
    hint = "" if by == "torch" else "; install torch, which can take more"
    return NotImplementedError(f"{by} cannot take over {name}, a {kind} ({said}){hint}")


def _importer_of(tensor: Any) -> Callable[[Any], Any]:
    """What makes a result an array of the library that a tensor is from, where that tensor lies; the identity if that has no way."""
    namespace = getattr(tensor, "__array_namespace__", None)
    library = namespace() if namespace is not None else sys.modules.get(type(tensor).__module__.partition(".")[0])
    takes, makes = getattr(library, "from_dlpack", None), getattr(library, "asarray", None)

    def give_back(result: Any) -> Any:
        if isinstance(result, type(tensor)) or (takes is None and makes is None):
            return result
        try:
            taken = (takes or makes)(result)  # type: ignore[misc]
        except _FAILURES:
            if makes is None:
                raise
            taken = makes(result)
        if _is_of_jax(tensor) and taken.sharding != tensor.sharding:
            taken = sys.modules["jax"].device_put(taken, tensor.sharding)
        return taken

    return give_back
