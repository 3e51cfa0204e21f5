"""Loading a model: from a name to a running engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.chat.tokenizer import open_tokenizer
from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.manifest import Account, account, formats_of
from hotset.checkpoint.resolve import resolve_model
from hotset.engine.engine import Engine
from hotset.engine.native import NativeExecutor
from hotset.engine.native_sampler import NativeSampler
from hotset.kv.identity import identify
from hotset.machine.memory import read_memory
from hotset.machine.native import isa_in_use
from hotset.machine.topology import default_threads, pick_cpus, read_topology
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.budget import Plan, Wish, make_plan, require_fit


@dataclass(frozen=True)
class Described:
    """A checkpoint that was opened, declared and accounted for; no weight was read."""

    checkpoint: Checkpoint
    spec: ModelSpec
    account: Account

    @property
    def formats(self) -> dict[str, str]:
        """The program's format of every weight by key, see :func:`hotset.checkpoint.manifest.formats_of`."""
        return formats_of(self.spec.tensors, self.account)


def describe_model(model: str | Path, cache_format: str | None = None) -> Described:
    """Open a model by path, hub id or pulled name and hold its tensors against what its family declares.

    ``cache_format`` is that of the cache rows, see :func:`hotset.models.spec.with_cache_format`.

    Raises:
        RequestError: no such model here, or no such cache format.
        CheckpointError: the files are damaged, or are not a model that hotset runs.
    """
    checkpoint = open_checkpoint(resolve_model(str(model)))
    spec = describe(checkpoint)
    described = Described(checkpoint, spec, account(checkpoint, spec.tensors))
    return replace(described, spec=with_cache_format(spec, described.formats, cache_format))


def _cpus(threads: int | None) -> tuple[int, ...]:
    topology = read_topology()
    return pick_cpus(topology, default_threads(topology)[0] if threads is None else threads)


def plan_model(described: Described, wish: Wish) -> Plan:
    """Plan a run of ``described`` on this machine, from headers alone."""
    return plan_spec(described.spec, described.formats, wish)


def plan_spec(spec: ModelSpec, formats: Mapping[str, str], wish: Wish) -> Plan:
    """Plan a run of a model that may have no files, its weights in ``formats`` by key, on this machine."""
    threads = len(_cpus(wish.threads))
    memory = read_memory()
    return make_plan(spec, formats, wish, threads, memory.available_bytes, memory.source)


def load(
    model: str | Path,
    *,
    threads: int | None = None,
    context: int | None = None,
    prefill_chunk: int | None = None,
    max_sequences: int | None = None,
    prefix_tokens: int = 0,
    snapshots: int | None = None,
    cache_format: str | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Engine:
    """Load a model and return its engine.

    Args:
        model: path of a ``.gguf`` file or of a folder, a pulled name, or a hub id that was pulled.
        threads: worker threads; default one per physical core that this process may use.
        context: most tokens of one sequence, prompt and answer together; default the model's, at most 8,192.
        prefill_chunk: most tokens in one step; default from a workspace budget.
        max_sequences: most sequences at once; default 1, since each one costs a whole context of cache.
        prefix_tokens: tokens of finished requests that stay reusable beyond what live sequences need.
        snapshots: frontiers kept for prefix reuse, for a model that has one (docs/concepts/memory.md); default 8, and 8
            more for every sequence.
        cache_format: of the cache rows, one of the family's; default what suits the weights (Llama: BF16, or F16 where
            all weights are F32 or F16; DeepSeek-V4: FP8).
        on_plan: called with the plan after it was found to fit and before the first large allocation.
        progress: called with each tensor's name and bytes as it is loaded.

    Raises:
        RequestError: no such model, or a setting that it cannot have.
        MachineError: the plan does not fit this machine; the message names the largest term, the hint what fits.
        CheckpointError: damaged or unsupported files.
    """
    described = describe_model(model, cache_format)
    with described.checkpoint as checkpoint:
        spec = described.spec
        cpus = _cpus(threads)
        wish = Wish(context, max_sequences, prefill_chunk, len(cpus), prefix_tokens, snapshots)
        plan = plan_model(described, wish)
        require_fit(plan)
        if on_plan is not None:
            on_plan(plan)
        tokenizer = open_tokenizer(checkpoint)
        executor = NativeExecutor(spec, described.formats, plan, cpus, isa_in_use())
        executor.load(checkpoint, described.account, progress)
        identity = identify(spec, checkpoint, described.account, executor.isa)
    return Engine(
        executor,
        tokenizer,
        NativeSampler(spec.vocab_size),
        vocab_size=spec.vocab_size,
        max_context=plan.context,
        max_sequences=plan.max_sequences,
        eos_ids=spec.eos_ids,
        plan=plan,
        num_snapshots=plan.num_snapshots,
        identity=identity,
    )
