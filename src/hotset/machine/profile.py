"""A machine in numbers: its memories, who computes, and what each measured path between them carries.

Profiles are measured (``hotset probe``, the profile ``this``) or published (:mod:`hotset.machine.presets`). Planner,
prediction and audit read nothing else about a machine. What nobody measured is None, or is not listed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from hotset.errors import MachineError

VERSION = 1
MemoryKind = Literal["ddr", "lpddr", "hbm", "gddr", "unified"]
ConsumerKind = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Memory:
    """One pool of memory: ``node0``, ``hbm0``, ``unified``. ``usable`` is the share of it that a run may plan with.

    ``node`` is the operating system's node id; None where the pool is not a node of its own, or it is not known.
    """

    name: str
    kind: MemoryKind
    num_bytes: int
    usable: float
    node: int | None = None
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        return int(self.num_bytes * self.usable)


@dataclass(frozen=True)
class Consumer:
    """What reads weights and computes: the cores of a node (``cpu0``) or a GPU (``gpu0``).

    Attributes:
        near: name of its own memory.
        rates: operations per second by kind of arithmetic ("int8", "int8_matrix", "bf16", "f32", "fp8"); a multiply
            and its add are two.
        step_s: what one op costs its team however small it is, in seconds: a barrier, or the launch of a kernel.
    """

    name: str
    kind: ConsumerKind
    near: str
    num_cores: int
    rates: Mapping[str, float]
    step_s: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Path:
    """What ``consumer`` reads from ``memory`` in bytes per second, as one team of as many threads as pay.

    Attributes:
        chunk_bytes_per_s: reading pieces of the size of an expert, at random places.
        latency_s: of one dependent read.
        threads: the fewest that reach the bandwidth.
        spread: lowest and highest sample of ``read_bytes_per_s``.
        reads: (threads, bytes read per second) by growing teams, as far as it was measured.
    """

    consumer: str
    memory: str
    read_bytes_per_s: float
    write_bytes_per_s: float | None = None
    chunk_bytes_per_s: float | None = None
    latency_s: float | None = None
    threads: int | None = None
    spread: tuple[float, float] | None = None
    source: str = ""
    reads: tuple[tuple[int, float], ...] = ()

    def read_by(self, num_threads: int) -> float | None:
        """Bytes per second that a team of ``num_threads`` reads; None where nobody measured how threads add up.

        Between two measured teams it is on the line between them; below the smallest all threads read alike.
        """
        if not self.reads:
            return self.read_bytes_per_s * min(1.0, num_threads / self.threads) if self.threads else None
        before = (0, 0.0)
        for point in self.reads:
            if num_threads <= point[0]:
                part = (num_threads - before[0]) / (point[0] - before[0])
                return before[1] + part * (point[1] - before[1])
            before = point
        return before[1]


@dataclass(frozen=True)
class Profile:
    """One machine. ``measured`` is the ISO time of a measurement, empty for a published machine."""

    name: str
    about: str
    source: str
    memories: tuple[Memory, ...]
    consumers: tuple[Consumer, ...]
    paths: tuple[Path, ...]
    storage_bytes_per_s: float | None = None
    measured: str = ""

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that change with any number of the profile."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def devices(self) -> tuple[Consumer, ...]:
        """Who runs a model here: the GPUs, or the CPUs of a machine without one."""
        gpus = tuple(consumer for consumer in self.consumers if consumer.kind == "gpu")
        return gpus or self.consumers

    def with_consumers(self, names: Collection[str]) -> Profile:
        """The same machine as these consumers see it."""
        return replace(
            self,
            consumers=tuple(consumer for consumer in self.consumers if consumer.name in names),
            paths=tuple(path for path in self.paths if path.consumer in names),
        )

    def cpu_of(self, node_id: int) -> Consumer | None:
        """The CPUs of a node; None where the profile does not know them.

        The profile of a single CPU may name no node: it is the machine's.
        """
        cpus = [consumer for consumer in self.consumers if consumer.kind == "cpu"]
        nodes = (node_id, None) if len(cpus) == 1 else (node_id,)
        return next((cpu for cpu in cpus if self.memory(cpu.near).node in nodes), None)

    def with_teams(self, threads: Mapping[str, int]) -> Profile:
        """The same machine where these CPUs take part with so many threads, no more than their cores.

        Arithmetic rates go by the threads. Bandwidths are those of :meth:`Path.read_by`; where nobody measured it, of
        all cores. The fixed cost of an op stays that of the measured team.
        """
        sizes = {name: min(count, self.consumer(name).num_cores) for name, count in threads.items()}

        def team(consumer: Consumer) -> Consumer:
            count = sizes.get(consumer.name, consumer.num_cores)
            rates = {kind: rate * count / consumer.num_cores for kind, rate in consumer.rates.items()}
            return replace(consumer, num_cores=count, rates=rates)

        def read(path: Path) -> Path:
            rate = path.read_by(sizes[path.consumer]) if path.consumer in sizes else None
            return path if rate is None else replace(path, read_bytes_per_s=rate)

        return replace(
            self,
            consumers=tuple(map(team, self.consumers)),
            paths=tuple(map(read, self.paths)),
        )

    def memory(self, name: str) -> Memory:
        """A memory by name. Raises MachineError."""
        for memory in self.memories:
            if memory.name == name:
                return memory
        raise MachineError(f"{self.name} has no memory {name}", ", ".join(memory.name for memory in self.memories))

    def consumer(self, name: str) -> Consumer:
        """A consumer by name. Raises MachineError."""
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        raise MachineError(f"{self.name} has no {name}", ", ".join(consumer.name for consumer in self.consumers))

    def path(self, consumer: str, memory: str) -> Path:
        """The path on which ``consumer`` reads ``memory``; MachineError where none was measured."""
        found = self.find_path(consumer, memory)
        if found is not None:
            return found
        known = ", ".join(f"{path.consumer} from {path.memory}" for path in self.paths)
        raise MachineError(f"nobody measured on {self.name} how fast {consumer} reads {memory}", f"known: {known}")

    def find_path(self, consumer: str, memory: str) -> Path | None:
        """The same, None where none was measured."""
        ends = (consumer, memory)
        return next((path for path in self.paths if (path.consumer, path.memory) == ends), None)

    def to_json(self) -> dict[str, Any]:
        """The profile as plain JSON values."""
        return {"version": VERSION} | asdict(self)

    @classmethod
    def from_json(cls, content: object, source: str) -> Profile:
        """Read what :meth:`to_json` wrote; ``source`` names the file in errors.

        Raises:
            MachineError: another version, a field that is missing, unknown or of the wrong kind, or names that do not
                fit together.
        """
        data = _Reader(source, "profile").table(content)
        version = data.pop("version", None)
        if version != VERSION:
            raise MachineError(f"{source}: profile of version {version!r}, expected {VERSION}", "hotset probe")
        reader = _Reader(source, "profile")
        parts = {
            "memories": reader.parts(Memory, data, "memories"),
            "consumers": reader.parts(Consumer, data, "consumers"),
            "paths": reader.parts(Path, data, "paths"),
        }
        profile = reader.build(cls, data | parts)
        _check(profile, source)
        return profile


def parse_profile(text: bytes, source: str) -> Profile:
    """Read a profile's JSON text; errors as :meth:`Profile.from_json`, or that it is no JSON."""
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError as well
        raise MachineError(f"{source}: not valid JSON ({error})", "hotset probe --out FILE writes a profile") from error
    return Profile.from_json(content, source)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


_Part = TypeVar("_Part", Memory, Consumer, Path, Profile)
_CHOICES: Mapping[str, tuple[str, ...]] = {"Memory": get_args(MemoryKind), "Consumer": get_args(ConsumerKind)}


@dataclass(frozen=True)
class _Reader:
    """Takes plain JSON values apart and says where one is not as it should be."""

    source: str
    where: str

    def error(self, message: str) -> MachineError:
        return MachineError(f"{self.source}: {self.where}: {message}")

    def table(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{value!r:.60}, expected an object")
        return dict(value)

    def parts(self, kind: type[_Part], data: Mapping[str, object], name: str) -> tuple[_Part, ...]:
        entries = data.get(name)
        if not isinstance(entries, list | tuple):
            raise self.error(f"{name} is {entries!r:.60}, expected a list")
        return tuple(_Reader(self.source, name).build(kind, entry) for entry in entries)

    def build(self, kind: type[_Part], content: object) -> _Part:
        data = self.table(content)
        known = {field.name: field for field in fields(kind)}
        unknown = [name for name in data if name not in known]
        if unknown:
            raise self.error(f"unknown field {unknown[0]!r}, expected {', '.join(known)}")
        try:
            values = {name: self._value(kind.__name__, name, str(known[name].type), data[name]) for name in data}
            return kind(**values)
        except TypeError as error:
            raise self.error(str(error).partition(") ")[2] or str(error)) from error

    def _value(self, kind: str, name: str, hint: str, value: Any) -> Any:
        if name == "rates":
            return {key: self._number(f"rates {key}", rate) for key, rate in self.table(value).items()}
        if name in ("memories", "consumers", "paths"):
            return value
        if value is None and "None" in hint:
            return None
        if name == "spread":
            if not isinstance(value, list | tuple) or len(value) != 2:
                raise self.error(f"spread is {value!r:.60}, expected the lowest and the highest")
            return (self._number(name, value[0]), self._number(name, value[1]))
        if name == "reads":
            return self._reads(value)
        if name == "kind" and value not in _CHOICES[kind]:
            raise self.error(f"kind is {value!r:.60}, expected one of {', '.join(_CHOICES[kind])}")
        if hint.startswith("int"):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.error(f"{name} is {value!r:.60}, expected a number of things, 0 or more")
            return value
        if hint.startswith("float"):
            return self._number(name, value)
        if not isinstance(value, str):
            raise self.error(f"{name} is {value!r:.60}, expected a text")
        return value

    def _reads(self, value: object) -> tuple[tuple[int, float], ...]:
        found: list[tuple[int, float]] = []
        for point in value if isinstance(value, list | tuple) else (None,):
            is_pair = isinstance(point, list | tuple) and len(point) == 2 and type(point[0]) is int
            if not is_pair or point[0] <= (found[-1][0] if found else 0):
                raise self.error(f"reads is {value!r:.60}, expected pairs of threads, growing, and bytes per second")
            found.append((point[0], self._number("reads", point[1])))
        return tuple(found)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{name} is {value!r:.60}, expected a number above 0")
        return float(value)


def _check(profile: Profile, source: str) -> None:
    """Names are told once and refer to something, and the own memory of every consumer has a path."""
    for what, names in (
        ("memory", [memory.name for memory in profile.memories]),
        ("consumer", [consumer.name for consumer in profile.consumers]),
        ("path", [f"{path.consumer} from {path.memory}" for path in profile.paths]),
    ):
        if not names:
            raise MachineError(f"{source}: a machine without a {what}")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise MachineError(f"{source}: {what} {twice} is there twice")
    for memory in profile.memories:
        if memory.usable > 1:
            raise MachineError(f"{source}: usable of {memory.name} is {memory.usable:g}, expected at most 1")
    for path in profile.paths:
        profile.consumer(path.consumer)
        profile.memory(path.memory)
    for consumer in profile.consumers:
        profile.path(consumer.name, consumer.near)
