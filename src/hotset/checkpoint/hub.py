"""``hotset pull``: brings a model into the store, from a package or from a Hugging Face hub."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.checkpoint import gguf
from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.download import HubSource, RemoteFile, fetch_files, guarded
from hotset.checkpoint.package import PACKAGED, PackagedModel, fetch_packaged
from hotset.checkpoint.progress import Progress, SilentProgress
from hotset.checkpoint.safetensors import INDEX_NAME, read_index
from hotset.checkpoint.store import (
    PARTIAL_NAME,
    Record,
    StoredFile,
    check_free_space,
    is_safe_relative,
    parse_hub_name,
    put_in_place,
    read_record,
    write_record,
)
from hotset.checkpoint.tensor import shown, shown_list
from hotset.config import Settings, load_settings
from hotset.errors import CheckpointError, MachineError, RequestError

# What a safetensors model needs beside its weights. The Python files are read as text by those who port a chat
# format; hotset never runs code from a repository.
_COMPANIONS = re.compile(
    r"[^/]+\.json|[^/]*tokenizer[^/]*\.model|(?:merges|vocab)\.txt|[^/]+\.tiktoken|(?:[^/]+/)?[^/]+\.jinja|encoding/[^/]+\.py"
)
_MAX_FILES = 10_000


@dataclass(frozen=True)
class Pulled:
    """Where a model lies now. ``model`` is what to open of ``record.models``; ``was_here``: nothing was fetched."""

    folder: Path
    record: Record
    model: str
    was_here: bool

    @property
    def path(self) -> Path:
        """The file or folder to open."""
        return self.folder if self.model == "." else self.folder / self.model


def pull(
    name: str,
    progress: Progress,
    *,
    file: str | None = None,
    revision: str | None = None,
    force: bool = False,
    settings: Settings | None = None,
) -> Pulled:
    """Fetch a model by its short name or by ``ORG/REPO[@REVISION]``, check it, and put it into the store.

    ``file`` picks one GGUF model of a repository that has several. With ``force`` everything is fetched again and
    replaces what is there. An interrupted pull goes on where it stopped. RequestError: no such model, file or
    revision, or no access. MachineError: network, disk, checksum. CheckpointError: it arrived and is not sound.
    """
    settings = settings or load_settings()
    if "/" not in name:
        return _pull_packaged(name, progress, file, revision, force, settings)
    hub = parse_hub_name(name)
    if hub.revision is not None and revision is not None and hub.revision != revision:
        raise RequestError(f"two revisions: {hub.revision} in the name and {revision} in --revision")
    if revision is not None:
        hub = parse_hub_name(f"{hub.repo}@{revision}")
    return _pull_from_hub(hub.repo, hub.revision, file, force, progress, settings)


def _pull_packaged(
    name: str, progress: Progress, file: str | None, revision: str | None, force: bool, settings: Settings
) -> Pulled:
    model = PACKAGED.get(name)
    if model is None:
        raise RequestError(
            f"no model is named {shown(name)}", f"names: {', '.join(PACKAGED)}, or ORG/REPO for one from a hub"
        )
    if file is not None or revision is not None:
        raise RequestError(f"{name} is one file of one version: --file and --revision are for ORG/REPO")
    folder = settings.models_dir / name
    record = read_record(folder)
    if record is not None and not force and record.first_missing(folder) is None:
        return Pulled(folder, record, record.models[0], was_here=True)
    with _locked_partial(settings.models_dir, name) as partial:
        staging = _fresh(partial / name)
        fetch_packaged(model, staging / model.file_name, progress)
        return _finish(_packaged_record(model), model.file_name, staging, folder)


def _packaged_record(model: PackagedModel) -> Record:
    files = (StoredFile(model.file_name, model.size_bytes),)
    version = model.requirement.rpartition("==")[2]
    return Record(model.name, f"package {model.requirement}", version, model.sha256, "", (model.file_name,), files)


def _pull_from_hub(
    repo: str, revision: str | None, file: str | None, force: bool, progress: Progress, settings: Settings
) -> Pulled:
    folder = settings.models_dir / repo
    record = read_record(folder)
    if record is not None and not force and _is_what_was_asked(record, revision, file):
        if record.first_missing(folder) is None:
            model = record.models[0] if file is None else gguf.shard_paths(Path(file))[0].as_posix()
            return Pulled(folder, record, model, was_here=True)
        progress.say(f"{record.first_missing(folder)} is missing or changed: fetching it again")
    with _locked_partial(settings.models_dir, repo.replace("/", "--")) as partial:
        source, files = _list_files(repo, revision or "main", settings)
        staging = _staging(partial, repo, source.commit, force)
        keep = None if force or record is None or record.commit != source.commit else record

        def read_shards() -> set[str]:
            fetch_files(source, [files[INDEX_NAME]], staging, SilentProgress())
            return set(read_index(staging / INDEX_NAME).values())

        model, chosen = choose_files(files, file, read_shards)
        models: tuple[str, ...] = (model,)
        if keep is not None:
            models, chosen = _with_those_here(keep, files, model, chosen)
            _link_those_here(keep, folder, staging)
        wanted = sum(f.size_bytes for f in chosen)
        check_free_space(settings.models_dir, wanted - _folder_bytes(staging))
        progress.say(f"fetching {repo} at {source.commit[:12]}: {len(chosen)} files")
        fetch_files(source, chosen, staging, progress)
        stored = tuple(StoredFile(f.path, f.size_bytes) for f in chosen)
        new = Record(repo, settings.hf_endpoint, revision or "main", source.commit, "", models, stored)
        return _finish(new, model, staging, folder)


def _is_what_was_asked(record: Record, revision: str | None, file: str | None) -> bool:
    is_revision = revision is None or revision in (record.revision, record.commit)
    return is_revision and (file is None or file in [stored.path for stored in record.files])


def _list_files(repo: str, revision: str, settings: Settings) -> tuple[HubSource, dict[str, RemoteFile]]:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.hf_endpoint, token=settings.hf_token, library_name="hotset")
    doing = f"looking up {repo} at {settings.hf_endpoint}"
    try:
        info = guarded(lambda: api.model_info(repo, revision=revision, files_metadata=True), repo, doing)
        siblings = info.siblings or []
        files = {
            s.rfilename: RemoteFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None, s.blob_id)
            for s in siblings
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise MachineError(f"{doing}: the answer is not one of a Hugging Face hub", "check HF_ENDPOINT") from error
    if not isinstance(info.sha, str) or not re.fullmatch(r"[0-9a-f]{40}", info.sha):
        raise MachineError(f"{doing}: the answer names no commit", "check HF_ENDPOINT")
    if len(files) > _MAX_FILES:
        raise MachineError(f"{doing}: {len(files)} files, expected at most {_MAX_FILES}")
    for path in files:
        if not is_safe_relative(path):
            raise MachineError(f"{repo} lists a file with an unsafe name: {path[:100]!r}")
    return HubSource(settings.hf_endpoint, repo, info.sha, settings.hf_token), files


def choose_files(
    files: dict[str, RemoteFile], file: str | None, read_shards: Callable[[], set[str]]
) -> tuple[str, list[RemoteFile]]:
    """Return what to open later (one of :attr:`Record.models`) and which files of a repository to fetch.

    Safetensors come first: with an index only the files that it names (``read_shards``), since some repositories hold
    the same weights twice. Else the one GGUF model there is, or the one that ``file`` names.
    """
    ggufs = _gguf_models([path for path in files if path.lower().endswith(".gguf")])
    if file is not None:
        for first, shards in ggufs.items():
            if file in shards:
                return first, [_one(files, shard) for shard in shards]
        names = f"GGUF files: {shown_list(list(ggufs))}" if ggufs else "it has no GGUF files"
        raise RequestError(f"the repository has no GGUF file {shown(file)}", names)
    weights = [path for path in files if "/" not in path and path.endswith(".safetensors")]
    if weights:
        if INDEX_NAME in files:
            weights = sorted(read_shards())
        elif "model.safetensors" in weights:
            weights = ["model.safetensors"]
        companions = [path for path in files if _COMPANIONS.fullmatch(path)]
        return ".", [_one(files, path) for path in [*companions, *weights]]
    if len(ggufs) == 1:
        first, shards = next(iter(ggufs.items()))
        return first, [_one(files, shard) for shard in shards]
    if ggufs:
        raise RequestError(
            f"the repository has {len(ggufs)} GGUF models: {shown_list(list(ggufs), 20)}",
            f"pick one: --file {next(iter(ggufs))}",
        )
    if any(path.endswith((".bin", ".pt", ".pth")) for path in files):
        raise RequestError(
            "the repository has its weights only as Python pickles, which can run code when they are read",
            "look for a repository with safetensors or GGUF files",
        )
    raise RequestError("the repository has no safetensors and no GGUF files")


def _one(files: dict[str, RemoteFile], path: str) -> RemoteFile:
    if path not in files:
        raise CheckpointError(f"the repository is incomplete: it has no file {shown(path)}")
    return files[path]


def _gguf_models(paths: list[str]) -> dict[str, list[str]]:
    """Return the files of every GGUF model by its first file; those of a split model that are not all there, too."""
    groups: dict[object, list[str]] = {}
    for path in sorted(paths):
        folder, _, name = path.rpartition("/")
        split = gguf.split_name(name)
        groups.setdefault((folder, split[0], split[2]) if split else path, []).append(path)
    return {shards[0]: shards for shards in groups.values()}


def _with_those_here(
    keep: Record, files: dict[str, RemoteFile], model: str, chosen: list[RemoteFile]
) -> tuple[tuple[str, ...], list[RemoteFile]]:
    """Add the GGUF models of the same commit that are here already to those that were asked for."""
    if ("." in keep.models) != (model == "."):
        here, asked = ("safetensors", "GGUF") if "." in keep.models else ("GGUF", "safetensors")
        raise RequestError(
            f"{keep.name} is here as {here}, and this asks for {asked}",
            "with --force the new files replace those that are here",
        )
    paths = {f.path for f in chosen}
    others = [files[f.path] for f in keep.files if f.path not in paths and f.path in files]
    return tuple(dict.fromkeys((*keep.models, model))), [*others, *chosen]


def _link_those_here(keep: Record, folder: Path, staging: Path) -> None:
    """Take over files of the same commit that are here and sound, without copying them."""
    for stored in keep.files:
        here, there = folder / stored.path, staging / stored.path
        if here.is_file() and here.stat().st_size == stored.size_bytes and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(here, there)


def _finish(record: Record, model: str, staging: Path, folder: Path) -> Pulled:
    """Open what was fetched, write the record, and give the folder its name."""
    formats = []
    for path in record.models:
        with open_checkpoint(staging if path == "." else staging / path) as checkpoint:
            formats.append(format_label(checkpoint))
    shutil.rmtree(staging / ".cache", ignore_errors=True)
    record = replace(record, format=", ".join(dict.fromkeys(formats)))
    write_record(staging, record)
    put_in_place(staging, folder)
    return Pulled(folder, record, model, was_here=False)


def format_label(checkpoint: Checkpoint) -> str:
    """Return the kind of a checkpoint and the format that most of its bytes are in, such as "GGUF Q4_1"."""
    num_bytes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        num_bytes[info.format.name] += info.nbytes
    kind = "GGUF" if checkpoint.kind == "gguf" else "safetensors"
    return f"{kind} {num_bytes.most_common(1)[0][0]}"


@contextmanager
def _locked_partial(models_dir: Path, key: str) -> Iterator[Path]:
    """Yield the folder for unfinished models, with a lock on one of them; MachineError when another pull has it."""
    partial = models_dir / PARTIAL_NAME
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / f"{key}.lock").open("w")
    except OSError as error:
        raise MachineError(
            f"cannot write to {models_dir}: {error.strerror or error}", "set HOTSET_HOME to a folder of yours"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MachineError(f"another hotset is fetching {key.replace('--', '/', 1)} right now") from error
        yield partial


def _fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def _staging(partial: Path, repo: str, commit: str, force: bool) -> Path:
    """Return the folder that collects one commit; unfinished ones of other commits are removed."""
    prefix = repo.replace("/", "--")
    staging = partial / f"{prefix}--{commit}"
    for other in partial.glob(f"{prefix}--*"):
        if re.fullmatch(rf"{re.escape(prefix)}--[0-9a-f]{{40}}", other.name) and (force or other != staging):
            shutil.rmtree(other)
    staging.mkdir(exist_ok=True)
    return staging


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
