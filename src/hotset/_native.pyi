"""Types of the native module (native/src/module*.cpp)."""

import enum

import numpy as np
from numpy.typing import NDArray

FORMATS: tuple[str, ...]
KIND_COUNTS: tuple[int, int, int, int, int]

def isas() -> list[str]: ...

class OpSpec:
    kind: int
    x: int
    y: int
    z: int
    out: int
    out2: int
    weight: int
    weight2: int
    barrier_few: int
    barrier_many: int
    is_lent: int
    add: int
    value: float
    value2: float
    limit: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    adjacent: int
    first: int
    inverse: int
    groups: int
    copies: int
    frequency: int
    iterations: int
    cache_kind: int
    cache_offset: int
    row_kind: int
    row_bytes: int
    scale_bytes: int
    plain: int
    ratio: int
    overlap: int
    hadamard: int
    top_k: int
    num_experts: int
    by_pair: int
    unit_tokens: int
    window: int
    ring_offset: int
    ring_rows: int
    ring_kind: int
    ring_row_bytes: int
    ring_scale_bytes: int

class BufferSpec:
    width: int
    slot: int
    is_outputs: int
    is_packed: int
    act: int
    is_private: int
    rows_per_token: int
    groups: int
    header_bytes: int

class WeightSpec:
    format: int
    out_width: int
    in_width: int
    pair: int
    count: int
    is_table: int

class ExecutorSpec:
    ops: list[OpSpec]
    buffers: list[BufferSpec]
    slot_bytes: list[int]
    private_slot_bytes: list[int]
    weights: list[WeightSpec]
    frequencies: list[float]
    max_tokens: int
    max_outputs: int
    few_tokens: int
    num_blocks: int
    block_bytes: int
    partial_floats: int
    attend_rows: int
    attend_head_dim: int
    work_bytes: int
    candidate_bytes: int
    num_frontiers: int
    frontier_bytes: int
    logits: int

class NumaPolicy(enum.Enum):
    TOUCH = 0
    BIND = 1
    PREFER = 2

class Seats:
    cpus: list[int]
    nodes: list[int]
    policy: NumaPolicy

class Place:
    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def node(self) -> int: ...

def pages_by_node(place: Place) -> dict[int, int]: ...

class Executor:
    def __init__(self, seats: Seats, isa: str, spec: ExecutorSpec) -> None: ...
    def load(self, index: int, part: int, fd: int, offset: int, scale_fd: int, scale_offset: int) -> None: ...
    def set_vector(self, index: int, values: NDArray[np.float32]) -> None: ...
    def set_table(self, index: int, values: NDArray[np.int32]) -> None: ...
    def block(self, index: int) -> NDArray[np.uint8]: ...
    def frontier(self, slot: int) -> NDArray[np.uint8]: ...
    def touch(self) -> None: ...
    def step(
        self,
        tokens: NDArray[np.int32],
        segments: NDArray[np.int32],
        blocks: NDArray[np.int32],
        outputs: NDArray[np.int32],
    ) -> None: ...
    def logits(self, rows: int, vocab: int) -> NDArray[np.float32]: ...
    def places(self) -> list[Place]: ...
    def profile(self, enable: bool) -> None: ...
    def op_ns(self) -> list[int]: ...
    def wait_ns(self) -> list[int]: ...

class SamplingParams:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    num_prompt: int

class SamplerWorkspace:
    def __init__(self, vocab: int) -> None: ...

class Chooser:
    def __init__(self, params: SamplingParams, workspace: SamplerWorkspace) -> None: ...
    def __call__(self, logits: NDArray[np.float32], history: NDArray[np.int32], position: int) -> int: ...

ANY_NODE: int

class ProbeBuffers:
    def __init__(self, cpus_by_region: list[list[int]], nodes: list[int], bytes_per_region: int) -> None: ...
    def read(
        self, isa: str, cpus: list[int], bytes: int, prefetch_bytes: int, seconds: float, min_samples: int
    ) -> list[float]: ...
    def read_chunks(
        self, isa: str, cpus: list[int], chunk_bytes: int, prefetch_bytes: int, seconds: float, min_samples: int
    ) -> list[float]: ...
    def write(self, isa: str, cpus: list[int], seconds: float, min_samples: int) -> list[float]: ...
    def copy(self, isa: str, cpus: list[int], seconds: float, min_samples: int) -> list[float]: ...
    def plan_chunks(self, cpus: list[int], chunk_bytes: int) -> list[list[tuple[int, int]]]: ...
    def link(self, bytes: int) -> int: ...
    def walk(self) -> int: ...
    def chase(self, cpu: int, seconds: float, min_samples: int) -> list[float]: ...
    def address(self, region: int) -> int: ...
    def pages(self, region: int) -> dict[int, int]: ...
    @property
    def bytes_per_region(self) -> int: ...

def probe_write_instruction(isa: str) -> str: ...

class ProbeSteps:
    run_s: list[float]
    barrier_s: list[float]
    exchange_s: list[float]

def probe_steps(isa: str, cpus: list[int], seconds: float, min_samples: int) -> ProbeSteps: ...
def probe_computes(isa: str) -> list[tuple[str, str]]: ...
def probe_compute(isa: str, kind: str, cpus: list[int], seconds: float, min_samples: int) -> list[float]: ...
