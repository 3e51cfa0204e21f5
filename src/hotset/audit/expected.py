"""What the op classes of a timed step read, and how long they should have taken on the measured machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotset.audit.record import ClassSample
from hotset.machine.profile import Profile
from hotset.models.spec import ModelSpec
from hotset.plan.homes import Homes, even_shares
from hotset.plan.predict import model_step, predict_step
from hotset.program import program as p
from hotset.program.cost import op_class
from hotset.program.lower_types import NativeOp


@dataclass(frozen=True)
class StepShape:
    """A step: of each of ``num_sequences`` its tokens, how many are cached, and how many outputs are wanted."""

    num_tokens: int
    num_sequences: int
    context: int
    num_outputs: int


def class_name(op: p.Op) -> str:
    """The class of an op, as predictions name it: the output matrix is one of its own."""
    return "head" if isinstance(op, p.Linear) and op.x.rows == "outputs" else op_class(op)


def class_samples(
    spec: ModelSpec,
    formats: Mapping[str, str],
    ops: Sequence[NativeOp],
    shape: StepShape,
    op_ns: Sequence[tuple[int, int]],
    profile: Profile | None,
    node_ids: Sequence[int],
    num_threads: int,
) -> tuple[ClassSample, ...]:
    """Bytes, seconds and expected seconds by op class.

    ``op_ns`` are nanoseconds (in the op, waiting before it) of thread 0 for each of the native ``ops``. It waits for
    the others to finish the op before, which therefore gets the waiting.
    """
    names = [class_name(spec.program.ops[op.source]) for op in ops]
    spent: Counter[str] = Counter()
    last = names[0]
    for name, (in_op, waiting) in zip(names, op_ns, strict=True):
        spent[last] += waiting
        spent[name] += in_op
        last = name if in_op else last
    step = model_step(
        spec, formats, len(ops), context=shape.context, num_tokens=shape.num_tokens,
        num_sequences=shape.num_sequences, num_outputs=shape.num_outputs,
    )  # fmt: skip
    num_bytes = dict.fromkeys(names, 0.0)
    for work, count in step.work.items():
        num_bytes[work.name] += count * work.num_bytes
    expected: dict[str, float] = {}
    homes = _homes(profile, node_ids) if profile is not None else None
    if profile is not None and homes is not None:
        each = max((profile.consumer(name).step_s or 0.0) for name in homes.consumers)
        threads = dict.fromkeys(homes.consumers, num_threads // len(node_ids))
        num_ops = Counter(names)
        seconds = {entry.name: entry.seconds for entry in predict_step(step, profile, homes, threads).classes}
        expected = {name: seconds.get(name, 0.0) + each * num_ops[name] for name in spent}
    return tuple(ClassSample(name, num_bytes[name], ns / 1e9, expected.get(name)) for name, ns in spent.items())


def _homes(profile: Profile, node_ids: Sequence[int]) -> Homes | None:
    """Rows of everything over the CPUs of the nodes that run; None where the profile has none of them."""
    mine = [cpu for node_id in node_ids if (cpu := profile.cpu_of(node_id)) is not None]
    if not mine:
        return None
    own = even_shares([(cpu.near, cpu.name) for cpu in mine])
    return Homes("as run", own, own, own, own)
