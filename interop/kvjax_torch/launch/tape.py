"""Records the kernel launches of an operation and replays them for later calls of the same kind.

A model makes the same call in every layer, on different memory. Checking and planning a call takes the host much longer
than launching its kernels. The first call of a kind runs as usual and is recorded: which kernels it launches, and where
each kernel argument lies in the call's arguments, results or temporary memory. Later calls that differ only in
addresses replay the recording. A call in which torch itself computes something is never replayed.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from kvjax import kernels
from kvjax_torch.launch import running
from kvjax_torch.launch.loading import Kernel

ALIGNMENT = 512
"""Alignment of temporary arrays, in bytes: that of torch's allocator."""

ADDRESS_BYTES = 64
"""A kind includes each address modulo this: the largest alignment that a kernel is compiled for."""

_ATEN = torch.ops.aten
ALLOCATIONS = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)
"""Torch operations that allocate memory and launch no kernel."""

type Results = tuple[torch.Tensor, ...]

_tapes: dict[Any, Tape | None] = {}
_lock = threading.Lock()


type Overlap = tuple[int, int, int]
"""Two arguments, and the bytes from the start of one to that of the other."""


class TapedPlace(NamedTuple):
    """Where an array is.

    Attributes:
      memory: an index into the arguments, followed by the results, the workspace, and address 0 for empty arrays.
      offset: bytes from the start of that memory.
    """

    memory: int
    offset: int


class TapedLaunch(NamedTuple):
    """A launch: the compiled kernel, its packed counts, its arrays, and its number of programs."""

    kernel: Kernel
    counts: tuple[int, ...]
    places: tuple[TapedPlace, ...]
    num_programs: int


class TapedResult(NamedTuple):
    """A result: new memory of a shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Tape(NamedTuple):
    """What calls of a kind launch.

    Attributes:
      launches: in their order.
      results: of the call.
      workspace: bytes of all temporary arrays.
      extents: bytes of each argument, from its first element to its last.
      overlaps: between the arguments that the recorded call wrote and others; the call allowed these.
    """

    launches: tuple[TapedLaunch, ...]
    results: tuple[TapedResult, ...]
    workspace: int
    extents: tuple[int, ...]
    overlaps: frozenset[Overlap]


class Recording(TorchDispatchMode):
    """Collects the launches and allocations of a call until torch computes something.

    It holds references to the allocations, so that no two arrays of the call share an address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[running.Call, running.Launcher]] = []
        self.memory: list[torch.Tensor] = []
        self.only_launches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a torch operation and records it."""
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.memory.append(result)
        elif not _is_view(func, (*args, *(kwargs or {}).values()), result):
            self.only_launches = False
        if not self.only_launches:  # release the references, so that the call can free its memory
            self.memory.clear()
            self.calls.clear()
        return result

    def note(self, call: running.Call, launcher: running.Launcher) -> None:
        """Records a launch."""
        if self.only_launches:
            self.calls.append((call, launcher))


def _is_view(operation: Any, arguments: Sequence[Any], result: Any) -> bool:
    """Whether one of torch's own operations only viewed its first argument, or returned it, and so launched no kernel.

    In inference mode that includes conversions with nothing to convert, which are not dispatched in other modes.
    Another tensor among the arguments may decide what is viewed, so the host reads it.
    """
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if operation.namespace != "aten" or operation._schema.is_mutable:
        return False
    if len(tensors) != 1 or tensors[0] is not arguments[0]:
        return False
    start = tensors[0].untyped_storage().data_ptr()
    views = result if isinstance(result, (list, tuple)) else (result,)
    are_tensors = bool(views) and all(isinstance(view, torch.Tensor) for view in views)
    return are_tensors and all(view.untyped_storage().data_ptr() == start for view in views)


def call(serve: Callable[[], Results], arguments: Sequence[Any], written: Iterable[int] = ()) -> Results:
    """Replays a call on plain CUDA tensors if its kind is known; otherwise runs and records it. Returns its results.

    Args:
      serve: runs the call; launches kernels by `running.run` only.
      arguments: everything that the call depends on: the function that implements it, tensors, numbers, strings, None.
      written: which of the tensors of `arguments` it writes. A call is served, not replayed, if one of these overlaps
        another argument otherwise than in the recorded call.
    """
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    results = _call(serve, arguments, tensors, written)
    increment_version([tensors[i] for i in written])
    return results


def _call(
    serve: Callable[[], Results], arguments: Sequence[Any], tensors: Sequence[torch.Tensor], written: Iterable[int]
) -> Results:
    addresses = [tensor.data_ptr() for tensor in tensors]
    kind = _kind(arguments, tensors, addresses)
    if kind is None:
        return serve()
    try:
        tape = _tapes[kind]
    except KeyError:
        return _record(kind, serve, tensors, written)
    if tape is None or not _overlaps(tape.extents, addresses, written) <= tape.overlaps:
        return serve()
    return _play(tape, tensors, addresses)


def _kind(arguments: Sequence[Any], tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
    """Everything but addresses that a call's launches depend on; None if the tensors are on several devices."""
    device = tensors[0].get_device()
    facts: list[Any] = [device]
    ends: list[int] = []
    for x in arguments:
        if isinstance(x, torch.Tensor):
            if x.get_device() != device:
                return None
            shape, strides, address = x.shape, x.stride(), addresses[len(ends)]
            facts.append((x.dtype, shape, strides, address % ADDRESS_BYTES))
            extent = sum(map(operator.mul, shape, strides)) - sum(strides) + 1
            # One block has room for what lies beside its keys, as one row has.
            ends.append(address + max(extent, *strides[:1]) * x.dtype.itemsize if strides else address + 1)
        else:
            facts.append((type(x), x))
    # Where arguments begin within others. Plans depend on it (values beside keys, two queries in one tensor), and so
    # does which argument an array is a part of. Offsets from the argument that reaches furthest imply all others.
    within: set[Overlap] = set()
    outer, end = 0, 0
    for i in sorted(range(len(ends)), key=addresses.__getitem__):
        if addresses[i] < end:
            within.add((outer, i, addresses[i] - addresses[outer]))
        if ends[i] > end:
            outer, end = i, ends[i]
    return (*facts, frozenset(within))


def _record(
    kind: Any, serve: Callable[[], Results], tensors: Sequence[torch.Tensor], written: Iterable[int]
) -> Results:
    with Recording() as recording, running.recorded(recording.note):
        results = serve()
    tape = _tape_of(recording, tensors, results, written) if recording.only_launches else None
    with _lock:
        if len(_tapes) >= running.REMEMBERED:
            _tapes.clear()
        _tapes[kind] = tape
    return results


def _tape_of(
    recording: Recording, tensors: Sequence[torch.Tensor], results: Results, written: Iterable[int]
) -> Tape | None:
    """The tape of a recorded call; None if an array lies in memory that the recording does not know."""
    made: list[TapedResult] = []
    starts: dict[int, TapedPlace] = {}
    of_arguments = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for result in results:
        start = result.untyped_storage().data_ptr()
        if not result.numel() or not result.is_contiguous() or result.storage_offset() or start in of_arguments:
            return None
        starts[start] = TapedPlace(len(tensors) + len(made), 0)
        made.append(TapedResult(tuple(result.shape), result.dtype))
    workspace = 0
    for array in recording.memory:
        start = array.untyped_storage().data_ptr()
        if start not in starts:
            starts[start] = TapedPlace(len(tensors) + len(made), workspace)
            workspace += -(-array.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
    addresses, extents = [tensor.data_ptr() for tensor in tensors], tuple(map(_extent, tensors))
    given = {address: i for i, address in reversed([*enumerate(addresses)])}

    def place(array: torch.Tensor) -> TapedPlace | None:
        address, start = array.data_ptr(), array.untyped_storage().data_ptr()
        if not array.numel():
            return TapedPlace(len(tensors) + len(made) + 1, 0)
        if address in given:
            return TapedPlace(given[address], 0)
        if start in starts:
            return starts[start]._replace(offset=starts[start].offset + address - start)
        within = (i for i, first in enumerate(addresses) if first < address < first + extents[i])
        return next((TapedPlace(i, address - addresses[i]) for i in within), None)

    launches = []
    for call, launcher in recording.calls:
        places = [place(array) for array in call.tensors]
        known = tuple(each for each in places if each is not None)
        if len(known) < len(places):
            return None
        num_programs = launcher.num_programs(call.amount)
        launches.append(TapedLaunch(launcher.kernel, (*kernels.packed(call.counts),), known, num_programs))
    overlaps = _overlaps(extents, addresses, written)
    return Tape(tuple(launches), tuple(made), workspace, extents, overlaps)


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlaps(extents: Sequence[int], addresses: Sequence[int], written: Iterable[int]) -> frozenset[Overlap]:
    """Which arguments that are written overlap others."""
    found = set()
    for i in written:
        start, end = addresses[i], addresses[i] + extents[i]
        for j, (other, extent) in enumerate(zip(addresses, extents, strict=True)):
            if j != i and other < end and start < other + extent:
                found.add((i, j, other - start))
    return frozenset(found)


def _play(tape: Tape, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Results:
    memory = tensors[0]
    results = tuple(memory.new_empty(result.shape, dtype=result.dtype) for result in tape.results)
    workspace = memory.new_empty(tape.workspace, dtype=torch.uint8)
    starts = (*addresses, *(result.data_ptr() for result in results), workspace.data_ptr(), 0)
    for kernel, counts, places, num_programs in tape.launches:
        kernel((*counts, *[starts[number] + offset for number, offset in places]), num_programs)
    return results
