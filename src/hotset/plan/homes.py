"""Where the bytes of a step lie, and who reads them: what a prediction needs to know of a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotset.errors import MachineError
from hotset.machine.profile import Consumer, Profile
from hotset.program.classes import WeightClass


@dataclass(frozen=True)
class Share:
    """``share`` of the bytes of a class lies in ``memory``, and ``consumer`` reads it from there and computes with
    it."""

    memory: str
    share: float
    consumer: str


@dataclass(frozen=True)
class Homes:
    """Shares by class of bytes. Those of weights add up to 1; every consumer may read all cache rows (a copy each)."""

    name: str
    dense: tuple[Share, ...]
    experts: tuple[Share, ...]
    sparse: tuple[Share, ...]
    cache: tuple[Share, ...]

    def of(self, home: str) -> tuple[Share, ...]:
        """The shares of "dense", "experts", "sparse" or "cache"."""
        return {"dense": self.dense, "experts": self.experts, "sparse": self.sparse, "cache": self.cache}[home]

    @property
    def consumers(self) -> tuple[str, ...]:
        """Everyone who takes part, in order."""
        shares = (*self.dense, *self.experts, *self.sparse, *self.cache)
        return tuple(dict.fromkeys(share.consumer for share in shares))


def even_shares(pairs: Sequence[tuple[str, str]], whole: float = 1.0) -> tuple[Share, ...]:
    """``whole`` split evenly over (memory, consumer) pairs."""
    return tuple(Share(memory, whole / len(pairs), consumer) for memory, consumer in pairs)


def module_of(profile: Profile, memory: str) -> str:
    """The module that a memory belongs to, named by the memory of its CPU: node0 and the HBM beside it are one module.

    A GPU stands beside the CPU whose memory it reads fastest; where no path says so, it is a module of its own.
    """
    owners = [consumer for consumer in profile.consumers if consumer.near == memory]
    if not owners or any(consumer.kind == "cpu" for consumer in owners):
        return memory
    return host_memory(profile, owners[0]) or memory


def host_memory(profile: Profile, gpu: Consumer) -> str | None:
    """The memory of a CPU that a GPU reads fastest; None when it reads none."""
    hosts = {consumer.near for consumer in profile.consumers if consumer.kind == "cpu"}
    paths = [path for path in profile.paths if path.consumer == gpu.name and path.memory in hosts]
    return max(paths, key=lambda path: path.read_bytes_per_s).memory if paths else None


def default_homes(profile: Profile, sizes: Mapping[WeightClass, int]) -> Homes:
    """The plain placement: rows of all matrices over the GPUs, or over the CPUs of a machine without one.

    ``sizes`` are the bytes of "dense", "experts" and "sparse". Experts that the GPUs' own memory cannot hold beside the
    rest lie in the memory of the CPU beside each, and are read from there.

    Raises:
        MachineError: experts left over and no memory beside the GPUs.
    """
    devices = profile.devices
    near = [(consumer.near, consumer.name) for consumer in devices]
    own = even_shares(near)
    names = ", ".join(dict.fromkeys(memory for memory, _ in near))
    split = f"rows split over {names}" if len(near) > 1 else f"all in {names}"
    if devices[0].kind == "cpu":
        return Homes(split, own, own, own, own)
    # Rows that are key and value of all heads cannot be split by head: every GPU reads them all.
    cache = tuple(Share(memory, 1.0, consumer) for memory, consumer in near)
    usable = sum(profile.memory(memory).usable_bytes for memory in dict.fromkeys(memory for memory, _ in near))
    room = usable - sizes["dense"] - sizes["sparse"]
    if room >= sizes["experts"]:
        return Homes(split, own, own, own, cache)
    hosts = [(host_memory(profile, gpu), gpu.name) for gpu in devices]
    if any(memory is None for memory, _ in hosts):
        raise MachineError(f"{profile.name} has no room for this model in {names}", "a smaller model")
    outside = min(1.0, 1.0 - room / sizes["experts"])
    far = even_shares([(str(memory), name) for memory, name in hosts], outside)
    experts = (*even_shares(near, 1.0 - outside), *far) if outside < 1.0 else far
    where = ", ".join(dict.fromkeys(share.memory for share in far))
    return Homes(f"{split}, {outside:.0%} of the experts in {where}", own, experts, own, cache)
