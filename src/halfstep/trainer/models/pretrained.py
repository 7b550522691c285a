"""Opens Hugging Face models and tokenizers by ``transformers``, and writes them.

No code of a folder runs and no pickle is opened. Weights are read from safetensors here, and
``transformers`` gets the tensors, never the folder, in which it would also look for pickles.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep.files import require_intact, sync, sync_folder, write_manifest
from halfstep.precision.scaling.gradients import is_finite

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""What is downloaded: no pickles and no code."""
TEMPLATE_SECONDS = 10
"""A chat template comes with a model, and may loop for ever; a conversation takes a millisecond."""


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Return the local folder of a model that is given as a folder or as a hub name.

    If the hub does not answer, or ``HF_HUB_OFFLINE`` is set, an earlier download is used.
    """
    text = os.fspath(source)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder
    hub = import_module("huggingface_hub")
    try:
        with quiet():
            found = hub.snapshot_download(text, allow_patterns=_FILES)
    except Exception as error:  # unknown or gated names, any kind of network failure
        raise ConfigError(
            f"model {text!r} is not a folder here, and the hub answers: "
            f"{first_line(error).rstrip('.')}. "
            f"Where there is a network, run `hf download {text} --local-dir DIR`, and give DIR"
        ) from error
    return Path(found)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence ``transformers``' load reports, progress bars and warnings within the block."""
    logging = import_module("transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Return an error's message on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@dataclass(frozen=True)
class PretrainedFolder:
    """A model folder, with its config and its weights in memory."""

    name: str
    """The hub name, or the folder's full path."""
    folder: Path
    config: Any
    """The ``transformers`` config object."""
    tensors: dict[str, Tensor]
    """All weights by name."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that holds all stored floating tensors exactly."""
        kinds = {tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()}
        return reduce(torch.promote_types, kinds) if kinds else torch.float32

    def knows(self, auto_class: str) -> bool:
        """Whether an Auto class of ``transformers`` knows the architecture."""
        auto = getattr(import_module("transformers"), auto_class)
        return type(self.config) in auto._model_mapping

    def build(
        self,
        auto_class: str,
        dtype: torch.dtype,
        *,
        head: Literal["needed", "kept", "new"] = "needed",
        seed: int = 0,
    ) -> tuple[Any, list[str]]:
        """Build a model with the folder's tensors, in evaluation mode on the CPU.

        The caller's generators are not touched. ``head`` says whether the folder must have a head,
        may have one, or a new one is drawn from ``seed``. Returns the model and the names of the
        parameters that were drawn.

        Raises:
            CheckpointError: If a tensor is missing or of another shape.
            ConfigError: If the architecture has no such model, or it cannot be built.
        """
        if not self.knows(auto_class):
            kind = self.config.model_type
            raise ConfigError(f"{self.folder}: model_type {kind!r} has no {auto_class}")
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                model, info = self._loaded(auto_class, dtype, head == "new", seed)
        except Exception as error:  # transformers raises many kinds
            raise ConfigError(
                f"{self.folder}: {auto_class} cannot be built: {first_line(error)}"
            ) from error
        drawn, base = sorted(info["missing_keys"]), f"{model.base_model_prefix}."
        # A checkpoint of masked language modelling has no pooler, which is a part of the head.
        lost = [n for n in drawn if head == "needed" or (n.startswith(base) and "pooler." not in n)]
        lost += [f"{name} (another shape)" for name, *_ in sorted(info["mismatched_keys"])]
        if lost or info["error_msgs"]:
            raise CheckpointError(
                f"{self.folder} lacks {len(lost)} weights of the model, such as "
                f"{', '.join(lost[:5])}: config.json and weights are of different models"
            )
        for buffer in model.buffers():  # which stay whole
            buffer.data = buffer.clone()
        model.name_or_path = model.config.name_or_path = self.name
        return model, drawn

    def _loaded(self, auto_class: str, dtype: torch.dtype, new_head: bool, seed: int) -> Any:
        """Let ``transformers`` rename, split and tie the tensors, and draw what is missing."""
        transformers = import_module("transformers")
        found = getattr(transformers, auto_class)._model_mapping[type(self.config)]
        model_class = found[0] if isinstance(found, tuple) else found
        tensors = self.tensors
        if new_head:
            with torch.device("meta"):
                bare = model_class(self.config)
            base = f"{bare.base_model_prefix}."
            of_head = {name for name in bare.state_dict() if not name.startswith(base)}
            tensors = {name: tensor for name, tensor in tensors.items() if name not in of_head}
        torch.manual_seed(seed)
        model, info = model_class.from_pretrained(
            None,
            config=self.config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # the caller reports them by name
            output_loading_info=True,
        )
        if model.can_generate() and (self.folder / "generation_config.json").exists():
            settings = transformers.GenerationConfig.from_pretrained(self.folder)
            model.generation_config = settings
        return model, info


def open_folder(source: str | os.PathLike[str], *, mapped: bool = False) -> PretrainedFolder:
    """Open the folder of a model, given as for :func:`resolve_source`.

    ``mapped`` weights are read from their files where they are touched, as by a rank that copies
    its part of them, and are not to be changed.

    Raises:
        ConfigError: If the source cannot be had, or holds an adapter or quantized weights.
        CheckpointError: If a file is missing, damaged or not as its manifest says, or the model
            needs code of its own.
    """
    folder = resolve_source(source)
    require_intact(folder)
    if (folder / ADAPTER).exists():
        raise ConfigError(f"{folder} holds an adapter, not a model: merge it into its base first")
    transformers = import_module("transformers")
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises many kinds for a bad config
        raise CheckpointError(
            f"{folder}: transformers {transformers.__version__} cannot read its config.json: "
            f"{first_line(error)} (halfstep runs no code that comes with a model)"
        ) from error
    # A name of a kernel in it would be fetched from the hub and run as the model is built.
    config._attn_implementation = config._experts_implementation = None
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{folder}: quantized weights cannot be trained; take the model's unquantized folder"
        )
    name = str(folder.resolve()) if Path(source).expanduser().is_dir() else os.fspath(source)
    return PretrainedFolder(name, folder, config, read_tensors(folder, mapped=mapped))


def read_tensors(folder: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Read all tensors of a folder by name, from ``model.safetensors`` or its shards."""
    whole = folder / WEIGHTS
    files = [whole] if whole.exists() else sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} has no weights in {WEIGHTS}. A pickle (pytorch_model.bin), which can run "
            "code when it is opened, is not read: convert it where you trust it by "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return {n: tensor for file in files for n, tensor in read_safetensors(file, mapped).items()}


def read_safetensors(file: Path, mapped: bool = False) -> dict[str, Tensor]:
    """Read the tensors of one file, or raise CheckpointError."""
    try:
        views = load_file(file)  # of the memory-mapped file, which may be replaced later
        return views if mapped else {name: view.clone() for name, view in views.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is missing, damaged or not a safetensors file ({error}); copy it again"
        ) from error


class Pretrained(nn.Module):
    """A ``transformers`` model with a task's loss; parameters are named ``model.<their name>``.

    Attributes:
        model: The ``transformers`` module, perhaps wrapped.
        model_class: Its class, before anything wraps it.
        max_length: Maximal tokens of a row, special ones included; None: no fixed limit.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.model_class = type(model)
        self.max_length = _position_limit(model)
        self.train()

    @property
    def core(self) -> Any:
        """The ``transformers`` module without what wraps it."""
        return self.model

    def blocks(self) -> list[nn.Module]:
        """Return the layers in order, to be sharded one by one: the longest module list."""
        lists = [m for m in self.core.modules() if isinstance(m, nn.ModuleList)]
        return list(max(lists, key=len, default=[]))

    def save_(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write into a folder what ``from_pretrained`` and the opener of this model read.

        Parameters that are not in ``weights`` are this module's.
        """
        given = {id(p): weights.get(f"model.{n}", p) for n, p in self.model.named_parameters()}
        cast: dict[int, Tensor] = {}  # tied weights are one object
        out: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in cast:
                own = given.get(id(tensor), tensor).detach().cpu()
                require_finite(own, folder, name)
                cast[id(tensor)] = own.contiguous()
            out[name] = cast[id(tensor)]
        kinds = {tensor.dtype for tensor in out.values() if tensor.is_floating_point()}
        with quiet(), torch.device("meta"):
            # without wrappers and hooks; its dtype is what config.json will name
            bare = self.model_class(self.core.config)
            bare.to(kinds.pop() if len(kinds) == 1 else torch.float32)
        with quiet():
            bare.save_pretrained(folder, state_dict=out)
            if self.core.can_generate():
                # not by save_pretrained, which reads settings that contradict each other, but does
                # not write them
                settings = self.core.generation_config.to_json_string()
                (folder / "generation_config.json").write_text(settings, encoding="utf-8")

    def require_saved(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Refuse a folder from which a reader does not get back these weights, bit for bit."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        found, wrong = self.read_back(folder), sorted(trained - weights.keys())
        wrong += [n for n, w in weights.items() if n not in found or not torch.equal(found[n], w)]
        if wrong:
            raise CheckpointError(
                f"no model was left: {len(wrong)} of {len(weights)} tensors in its folder, such as "
                f"{wrong[0]}, are not what was trained. The checkpoints are: please report this"
            )

    def read_back(self, folder: Path) -> dict[str, Tensor]:
        """Read what :meth:`save_` wrote as everyone does, by the names of this module."""
        raise NotImplementedError


def require_finite(tensor: Tensor, folder: Path, name: str) -> None:
    """Raise CheckpointError if a tensor that is to be written holds NaN or inf."""
    if tensor.is_floating_point() and not is_finite(tensor):
        raise CheckpointError(
            f"{folder}: tensor {name!r} holds NaN or inf as {tensor.dtype}; nothing was written"
        )


@contextmanager
def new_folder(folder: Path, policy: object, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder`` if the block ends without error.

    Beside its files it gets their hashes, which :func:`~halfstep.files.require_intact` checks, and
    the policy of the training, whose traces ``halfstep xray`` then expects.

    Raises:
        CheckpointError: If ``folder`` exists, is not empty and not to be replaced; or if it cannot
            be written, and an earlier one stays.
    """
    taken = os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir()))
    if taken and not replace:
        raise CheckpointError(f"{folder} exists and is not an empty folder; choose another name")
    old = folder.with_name(f".old-{folder.name}")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for file in temporary.glob("*.safetensors"):  # which safetensors makes for the owner only
            file.chmod(temporary.stat().st_mode & 0o666)
        write_manifest(temporary, {"precision": str(policy)})
        sync_folder(temporary)
        if taken:
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _position_limit(model: Any) -> int | None:
    """Return the number of positions for a text's tokens, special ones included; None: no limit.

    RoBERTa and its relatives number positions from ``padding_idx + 1``, so they have fewer.
    """
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return int(module.num_embeddings - module.padding_idx - 1)
    return getattr(model.config, "max_position_embeddings", None)


# Tokenizers.


def open_tokenizer(
    source: str | os.PathLike[str],
    *,
    max_length: int,
    model: Pretrained | None = None,
) -> PretrainedTokenizer:
    """Open the tokenizer of a model's folder or hub name.

    The smallest of ``max_length``, the model's and the tokenizer's limit applies to a text.

    Raises:
        ConfigError: If the source cannot be used, or has ids that the model's embedding has not.
        CheckpointError: If the folder has no tokenizer, a damaged one, or one that needs its code.
    """
    folder = resolve_source(source)
    require_intact(folder, besides=".safetensors")  # weights are checked where they are read
    try:
        with quiet():
            tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read: {first_line(error)}"
        ) from error
    files = getattr(tokenizer, "vocab_files_names", {}).values()
    if not any((folder / name).exists() for name in files):  # then transformers made one up
        raise CheckpointError(f"{folder} has no tokenizer: none of {', '.join(files)}")
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{folder}: its tokenizer has no fast version (tokenizer.json)")
    limit = min(max_length, int(tokenizer.model_max_length))
    if model is None:
        return PretrainedTokenizer(tokenizer, limit)
    found = PretrainedTokenizer(tokenizer, min(limit, model.max_length or limit))
    rows = model.core.get_input_embeddings().weight.shape[0]
    if found.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has ids up to {found.vocab_size - 1}, but the model's embedding has "
            f"{rows} rows: tokenizer and weights are of different models"
        )
    return found


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this thread, main or not, once the block has run for so long."""
    thread, error = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(TimeoutError)
    raise_there = ctypes.pythonapi.PyThreadState_SetAsyncExc
    timer = threading.Timer(seconds, raise_there, (thread, error))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class PretrainedTokenizer:
    """Turns text into ids by a fast ``transformers`` tokenizer.

    Attributes:
        max_length: Maximal ids of a text in :meth:`encode_batch`, special ones included.
        pad_id: The tokenizer's padding id; else its end-of-text id, as for GPT-2; else 0.
        bos_id: The id that the tokenizer itself writes before a text, if it does.
        special_tokens: Strings that become control tokens, wherever they occur in a text.
        vocab_size: One more than the largest id.
        fingerprint: SHA-256 of everything that determines ids.
        truncated: Number of texts encoded so far that were cut.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.truncated = 0
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id: int = next(i for i in pads if i is not None)
        self.vocab_size: int = 1 + max(tokenizer.get_vocab().values(), default=-1)
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        named = list(tokenizer.all_special_tokens)
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.special_tokens: tuple[str, ...] = tuple(dict.fromkeys(named + added))
        first = self._ids(["a"], add_special_tokens=True)[0][:1]
        bos: int | None = tokenizer.bos_token_id
        self.bos_id = bos if first == [bos] else None
        parts = [backend.to_str(), self.pad_id, max_length, tokenizer.truncation_side]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts with special tokens, cut to ``max_length``; ``truncated`` counts cuts."""
        found = self._ids(texts, add_special_tokens=True)
        cut = sum(len(ids) > self.max_length for ids in found)
        if not cut:
            return found
        self.truncated += cut
        limit = self.max_length
        return self._ids(texts, add_special_tokens=True, truncation=True, max_length=limit)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without special tokens, to any length."""
        return self._ids(texts, add_special_tokens=False)

    def _ids(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        with quiet():  # silences warnings about long texts, which encode_batch counts
            out = self._tokenizer(list(texts), **options)
        return [list(ids) for ids in out["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def end_of_text(self) -> int:
        """Return the id that ends an answer and a document."""
        found: int | None = self._tokenizer.eos_token_id
        if found is None:
            raise ConfigError(
                "the tokenizer has no end-of-text token (eos_token in tokenizer_config.json), so a "
                "tuned model could not learn to stop; set one"
            )
        return found

    def end_of_turn(self) -> list[int]:
        """Return the id with which the chat template ends an answer, if it is one id."""
        if not getattr(self._tokenizer, "chat_template", None):
            return []
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        ids = self.encode_plain([self.chat(turns).rpartition("!")[2].rstrip()])[0]
        return ids if len(ids) == 1 else []

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False
    ) -> str:
        """Write messages in the chat template, special tokens spelled out.

        ``add_generation_prompt`` ends with what precedes an answer.
        """
        try:
            with _at_most(TEMPLATE_SECONDS):
                text: str = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
        except TimeoutError as error:
            raise DataError(
                f"the tokenizer's chat template ran for over {TEMPLATE_SECONDS} s on one "
                "conversation; look for an endless loop in it, or write instruction and output"
            ) from error
        except Exception as error:  # a template raises what it likes: jinja2's errors, or its own
            raise DataError(
                f"the tokenizer's chat template refuses the conversation ({first_line(error)}); "
                "change the record, or write instruction and output"
            ) from error
        return text

    def save(self, folder: Path) -> None:
        """Write the files that :func:`open_tokenizer` and ``AutoTokenizer`` read."""
        self._tokenizer.save_pretrained(folder)
