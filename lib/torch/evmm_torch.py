# SPDX-License-Identifier: Apache-2.0
"""evmm's caching allocator behind PyTorch.

    import evmm_torch
    evmm_torch.install()  # before the first CUDA tensor

Everything goes through libevmm_torch.so by ctypes; torch is imported only by what needs it. Devices
are CUDA ordinals, torch.device objects or strings; None is the current one. Sizes are bytes.
"""

import contextlib
import ctypes
import json
import os
import pathlib
from collections import OrderedDict

__all__ = [
    "Error",
    "configure",
    "empty_cache",
    "host_tier",
    "host_tier_pool",
    "install",
    "installed",
    "library",
    "library_path",
    "max_memory_reserved",
    "memory_stats",
    "record_history",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "snapshot",
    "version",
]

_DEVICE_THEN_HOST = 0
_HOST_ONLY = 1

_library = None
_installed = None  # the allocator that PyTorch uses, which must outlive all tensors
_pairs = {}  # likewise for those behind pools


class Error(RuntimeError):
    """What evmm refused, and why. `code` is one of evmm_torch_code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def library_path():
    """Where libevmm_torch.so is: EVMM_TORCH_LIBRARY, beside this file, or in its prefix."""
    name = "libevmm_torch.so"
    named = os.environ.get("EVMM_TORCH_LIBRARY")
    if named:
        return named
    here = pathlib.Path(__file__).resolve().parent
    beside = here / name
    if beside.exists():
        return str(beside)
    # PREFIX/share/evmm/python beside PREFIX/lib, lib64 or lib/<machine>.
    for prefix in list(here.parents)[:3]:
        for found in sorted(prefix.glob(f"lib*/{name}")) + sorted(prefix.glob(f"lib/*/{name}")):
            return str(found)
    raise FileNotFoundError(
        f"there is no {name} beside {here} or in its prefix; EVMM_TORCH_LIBRARY names one"
    )


def library():
    """The library, loaded at the first call, as a ctypes.CDLL."""
    global _library
    if _library is None:
        loaded = ctypes.CDLL(library_path())
        pointer, integer, size, text = (
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_char_p,
        )
        for name, result, arguments in (
            ("last_error", text, ()),
            ("last_code", integer, ()),
            ("version", text, ()),
            ("alloc", pointer, (ctypes.c_ssize_t, integer, pointer)),
            ("free", None, (pointer, ctypes.c_ssize_t, integer, pointer)),
            ("begin_tiers", integer, (integer, integer)),
            ("end_tiers", integer, (integer, integer)),
            ("configure", integer, (text,)),
            ("empty_cache", integer, (integer,)),
            ("reset", None, ()),
            ("statistics", integer, (integer, text, size)),
            ("reset_peaks", integer, (integer,)),
            ("reset_totals", integer, (integer,)),
            ("snapshot", integer, (integer, text)),
            ("record_history", integer, (integer, text, integer, size)),
        ):
            function = getattr(loaded, "evmm_torch_" + name)
            function.restype = result
            function.argtypes = arguments
        _library = loaded
    return _library


def _check(code):
    if code < 0:
        message = library().evmm_torch_last_error().decode(errors="replace")
        raise Error(code, message or f"evmm_torch error {code}")
    return code


def _ordinal(device):
    if isinstance(device, int):
        return device
    import torch

    if device is None:
        return torch.cuda.current_device()
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _address(name):
    return ctypes.cast(getattr(library(), "evmm_torch_" + name), ctypes.c_void_p).value


def version():
    """evmm's version."""
    return library().evmm_torch_version().decode()


def install():
    """Makes evmm PyTorch's CUDA allocator, for the rest of the process.

    Before the first CUDA tensor: PyTorch refuses later, with a RuntimeError. A second call does
    nothing.
    """
    global _installed
    if _installed is not None:
        return
    import torch

    library()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library_path(), "evmm_torch_alloc", "evmm_torch_free"
    )
    hooks = allocator.allocator()
    hooks.set_reset_fn(_address("reset"))
    hooks.set_memory_fraction_fn(_address("set_fraction"))
    hooks.set_base_alloc_fn(_address("base"))
    hooks.set_record_stream_fn(_address("record_stream"))
    hooks.set_begin_allocate_to_pool(_address("begin_allocate_to_pool"))
    hooks.set_end_allocate_to_pool_fn(_address("end_allocate_to_pool"))
    hooks.set_release_pool(_address("release_pool"))
    torch.cuda.memory.change_current_allocator(allocator)
    _installed = allocator


def installed():
    """Whether install() was called."""
    return _installed is not None


def host_tier_pool(host_only=False):
    """A torch.cuda.MemPool whose memory lies on the device and, where that is full, in host memory;
    or in host memory alone. For torch.cuda.use_mem_pool, while PyTorch's own allocator is the
    current one: after install() PyTorch makes no pools, and host_tier() serves."""
    if installed():
        raise Error(
            -5, "PyTorch makes no MemPool while evmm is its allocator; use evmm_torch.host_tier()"
        )
    import torch

    kind = "host_only" if host_only else "host_tier"
    if kind not in _pairs:
        _pairs[kind] = torch.cuda.memory.CUDAPluggableAllocator(
            library_path(), f"evmm_torch_{kind}_alloc", f"evmm_torch_{kind}_free"
        )
    return torch.cuda.MemPool(_pairs[kind].allocator())


@contextlib.contextmanager
def host_tier(device=None, host_only=False):
    """What this thread allocates in this context lies on the device and, where that is full, in
    host memory; or in host memory alone. Such tensors are ordinary ones and may outlive the
    context. After install(), what is allocated in a graph capture lies in the graph's pool."""
    if not installed():
        import torch

        # The pool lives on in its tensors.
        with torch.cuda.use_mem_pool(host_tier_pool(host_only), device=device):
            yield
        return
    ordinal = _ordinal(device)
    tiers = _HOST_ONLY if host_only else _DEVICE_THEN_HOST
    _check(library().evmm_torch_begin_tiers(ordinal, tiers))
    try:
        yield
    finally:
        _check(library().evmm_torch_end_tiers(ordinal, tiers))


def memory_stats(device=None):
    """As torch.cuda.memory_stats: the same names, sorted; and evmm's own."""
    ordinal = _ordinal(device)
    buffer = ctypes.create_string_buffer(1 << 14)
    length = _check(library().evmm_torch_statistics(ordinal, buffer, len(buffer)))
    if length >= len(buffer):
        # Numbers may grow in between.
        buffer = ctypes.create_string_buffer(2 * length)
        _check(library().evmm_torch_statistics(ordinal, buffer, len(buffer)))
    return OrderedDict(sorted(json.loads(buffer.value).items()))


def max_memory_reserved(device=None):
    """The most bytes that evmm held at a time."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_accumulated_memory_stats(device=None):
    """Sums and counts begin anew at 0."""
    _check(library().evmm_torch_reset_totals(_ordinal(device)))


def reset_peak_memory_stats(device=None):
    """Peaks begin anew at what is current."""
    _check(library().evmm_torch_reset_peaks(_ordinal(device)))


def empty_cache():
    """Gives cached memory of all devices back, as torch.cuda.empty_cache does after install()."""
    library().evmm_torch_reset()
    _check(library().evmm_torch_last_code())


def configure(text):
    """Changes options while running: "garbage_collection_threshold:0.8,max_split_size_mb:200"."""
    _check(library().evmm_torch_configure(text.encode()))


def record_history(level="all", stacks=False, max_entries=1 << 16):
    """What snapshots will show, on all devices: "off", "state", "alloc" or "all"."""
    _check(library().evmm_torch_record_history(-1, level.encode(), int(stacks), max_entries))


def snapshot(path):
    """Writes what torch.cuda.memory._dump_snapshot would, of all devices in use."""
    _check(library().evmm_torch_snapshot(-1, os.fsencode(path)))
