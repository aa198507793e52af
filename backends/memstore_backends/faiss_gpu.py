"""Where an index of faiss lies: on the CPU, or on a GPU if faiss was built for GPUs and finds one."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import faiss
from pydantic import AfterValidator

from memstore.errors import IndexBuildError
from memstore.interfaces import Options
from memstore_backends.faiss_keys import widened

MOST = 2048  # keys that faiss finds, and lists that it reads, for a query on a GPU


def _device(name: str) -> str:
    kind, colon, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ValueError("faiss works on 'cpu', 'cuda', or one of several GPUs, as 'cuda:1'")
    return name


class DeviceOptions(Options):
    """``device``: where keys lie and are searched: "cpu", "cuda" or "cuda:1". On a GPU they are float32."""

    device: Annotated[str, AfterValidator(_device)] = "cpu"


def find_gpu(device: str) -> int:
    """The number of the GPU that ``device`` names, -1 for the CPU. Raises IndexBuildError if faiss finds none such."""
    if device == "cpu":
        return -1
    if not hasattr(faiss, "StandardGpuResources"):
        raise IndexBuildError(
            f"device={device!r} needs faiss for GPUs: pip uninstall faiss-cpu, pip install 'memstore-attention[gpu]'."
        )
    number, count = int(device.partition(":")[2] or 0), faiss.get_num_gpus()
    if number >= count:
        raise IndexBuildError(f"device={device!r} is not there, faiss finds {count} GPUs. Use another, or 'cpu'.")
    return number


def brought_to(device: str, index: Any) -> Any:
    """A filled index of the CPU on this device. Raises IndexBuildError if it is not there, or full."""
    number = find_gpu(device)
    if number < 0:
        return index
    try:
        return faiss.index_cpu_to_gpu(_resources(), number, widened(index))
    except RuntimeError as error:  # most often its memory
        raise IndexBuildError(f"The index cannot be brought to device={device!r}: {error}. Use 'cpu'.") from error


def brought_back(device: str, index: Any) -> Any:
    """An index of this device on the CPU."""
    return index if device == "cpu" else faiss.index_gpu_to_cpu(index)


@cache
def _resources() -> Any:
    return faiss.StandardGpuResources()  # one for all indexes, of which a memory may have hundreds
