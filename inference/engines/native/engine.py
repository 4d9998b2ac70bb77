"""The engine on top of the kernels: int8, without padding and with no runtime but numpy."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import CPU_BATCH_TOKENS, PASSES_AT_ONCE, TokenBatch
from inference.engines.native.architecture import LANES, EncoderShape
from inference.engines.native.library import (
    BlockStruct,
    ClassifierStruct,
    LinearStruct,
    ModelStruct,
    NormStruct,
    SessionStruct,
    chosen_instructions,
    load_library,
)
from inference.engines.native.quantize import FILE_NAME

_ALIGNMENT = 64
_CENTRED = 32  # as in model.h
SECOND_TEXT = 1 << 30
_DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I8": np.int8}
Tensors = Mapping[str, NDArray[Any]]
# The layers behind the encoder. Two models whose other tensors are equal can share these.
_OF_HEAD = ("pooler.", "head_norm.", "classifier.")


class Image(NamedTuple):
    """A model as it lies in another machine's memory: the structures of model.h, the model's first,
    and all arrays.
    """

    memory: bytes
    pointers: list[int]  # where there is an address, given as an offset into `memory`
    int8: int  # where the int8 weights begin, which lie together
    words: int  # where the word embeddings begin, which come last


class NativeEngine:
    """Runs an encoder's classifier in int8 on any processor; see `engines.base.Engine`."""

    name = "native int8"
    batch_tokens = CPU_BATCH_TOKENS
    pads = False
    survives_fork = True

    def __init__(
        self, folder: Path, config: Mapping[str, Any], threads: int, instructions: str = "auto"
    ) -> None:
        """Read the packed weights that `quantize.write_native` wrote, to run them on so many
        threads.

        ``instructions`` is one of `instruction_sets()`, or ``auto`` for the fastest.

        Raises:
            OSError: The compiled kernels or the weights cannot be read, or this processor lacks the
                instructions.
            MemoryError: There is not enough memory for the buffers.
            ValueError: The weights do not fit the configuration, or the kernels do not compute this
                model.
        """
        self.num_slots = threads
        self._shape = EncoderShape.of(config)
        self._library = load_library()
        self.instructions = chosen_instructions(instructions)
        self._read(folder)
        # In a list, so that an engine that `with_heads` made sees the threads that another one has
        # started in a forked process.
        self._threads = [self._start_threads()]

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        self._check(batch)
        num_texts = len(batch.lengths)
        ids = np.ascontiguousarray(batch.ids, dtype=np.int32)
        starts = np.zeros(num_texts + 1, dtype=np.int32)
        np.cumsum(batch.lengths, out=starts[1:])
        if self._shape.separator is not None:
            ids = mark_second_texts(ids, starts, self._shape.separator)
        logits = np.empty((num_texts, self._model.labels), dtype=np.float32)
        # The kernels' threads exist only in the process that started them. Workers are forked from
        # a process that has loaded the model, so each starts its own at its first pass.
        here = self._threads[0]
        if here.process != os.getpid():
            here = self._threads[0] = self._start_threads()
        # A session has the buffers of one pass at a time; if all are in use, wait for one. ctypes
        # releases the interpreter's lock during the call, so passes really run in parallel.
        session = here.sessions.get()
        try:
            session.contents.model = ctypes.addressof(self._model)
            failed = self._library.forward(
                session,
                ids.ctypes.data,
                starts.ctypes.data,
                num_texts,
                min(threads, self.num_slots),
                logits.ctypes.data,
            )
        finally:
            here.sessions.put(session)
        if failed:
            raise MemoryError(f"no memory for a forward pass over {starts[-1]} tokens")
        return logits

    def with_heads(self, heads: Sequence[Tensors]) -> Self:
        """Models that differ from this one only behind the encoder, all in one engine, which shares
        everything else with this one, its threads and buffers too.

        ``heads``: the tensors of each; see `heads`. The scores of all are one row of `logits`, one
        model after the other. They have the bits that each model gives alone (`classify` in
        encoder.h). If neighbours have the same pooler, in the same memory, it is computed once.
        """
        other = copy.copy(self)
        other._model = ModelStruct.from_buffer_copy(self._model)
        other._set_heads(heads, [len(head["classifier.bias"]) for head in heads])
        return other

    def encoder_key(self) -> tuple[Any, ...]:
        """Equal for two engines if they differ only in their heads: then either one may compute the
        head of the other, with the same bits.

        It hashes all weights, which takes 25 ms for MiniLM.
        """
        digest = hashlib.sha256()
        for name in sorted(self._tensors):
            array = self._tensors[name]
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(array)
        shape = replace(self._shape, num_labels=0)
        return self.name, self.instructions, self.num_slots, shape, digest.hexdigest()

    @property
    def words(self) -> NDArray[np.float16]:
        """The word embeddings (vocabulary, embedding width), where the kernels read them."""
        return self._tensors["words"]

    def image(self, pointer_bytes: int = 8) -> Image:
        """Pack the model for a machine with addresses of this size."""

        def aligned(position: int, alignment: int = pointer_bytes) -> int:
            return -(-position // alignment) * alignment

        # Floats, then all int8 weights together, and the word embeddings last: a page receives
        # those in another form, and appends them.
        others = [array for name, array in self._tensors.items() if name != "words"]
        others += [*self._rotations.values()]
        others += [array for head in self.heads for array in head.values()]
        int8 = [array for array in others if array.dtype == np.int8]
        arrays = [*(array for array in others if array.dtype != np.int8), *int8, self.words]
        size, offsets = 0, {}
        for address, num_bytes in (
            (ctypes.addressof(self._model), ctypes.sizeof(self._model)),
            (ctypes.addressof(self._blocks), ctypes.sizeof(self._blocks)),
            (ctypes.addressof(self._classifiers), ctypes.sizeof(self._classifiers)),
            *((array.ctypes.data, array.nbytes) for array in arrays),
        ):
            offsets[address] = aligned(size, _ALIGNMENT)
            size = offsets[address] + num_bytes
        memory, pointers = bytearray(size), []
        for array in arrays:
            position = offsets[array.ctypes.data]
            memory[position : position + array.nbytes] = array.tobytes()

        def put(structure: ctypes.Structure, position: int) -> int:
            """Return where it ends: like this machine's C compiler, but pointers may be shorter."""
            position = aligned(position)
            for name, kind in structure._fields_:
                value = getattr(structure, name)
                if isinstance(value, ctypes.Structure):
                    position = put(value, position)
                elif issubclass(kind, ctypes.c_void_p | ctypes._Pointer):
                    position = aligned(position)
                    if value and name != "centres":  # only for this processor
                        offset = offsets[_address(value)]
                        memory[position : position + pointer_bytes] = offset.to_bytes(
                            pointer_bytes, "little"
                        )
                        pointers.append(position)
                    position += pointer_bytes
                else:
                    memory[position : position + 4] = bytes(kind(value))
                    position += 4
            return aligned(position)

        put(self._model, 0)
        for structures in (self._blocks, self._classifiers):
            position = offsets[ctypes.addressof(structures)]
            for structure in structures:
                position = put(structure, position)
        return Image(
            bytes(memory), pointers, offsets[int8[0].ctypes.data], offsets[self.words.ctypes.data]
        )

    def _check(self, batch: TokenBatch) -> None:
        # The kernels trust their input, so whatever would read outside of a table has to be refused
        # here.
        is_empty = len(batch.lengths) == 0 or batch.lengths.min() < 1
        if is_empty or len(batch.ids) != int(batch.lengths.sum()):
            what = "a batch needs at least one text, a token in each text, "
            raise ValueError(what + "and lengths that sum to its tokens")
        if batch.lengths.max() > self._shape.num_positions:
            raise ValueError(f"{batch.lengths.max()} tokens > maximum {self._shape.num_positions}")
        if batch.ids.min() < 0 or batch.ids.max() >= self._shape.vocab_size:
            raise ValueError(f"token ids must be 0 to {self._shape.vocab_size - 1}")

    def _start_threads(self) -> _Threads:
        return _Threads(self._library, self._model, self.num_slots, self.instructions)

    def _read(self, folder: Path) -> None:
        self._tensors, head = _split(read_tensors(folder / FILE_NAME))
        self._model = self._model_struct()
        self._set_heads([head], [self._shape.num_labels])

    def _model_struct(self) -> ModelStruct:
        shape, family = self._shape, self._shape.family
        width, embedding_width = shape.hidden_size, shape.embedding_size
        positions = shape.num_positions
        thetas = {theta for theta in shape.rotary_thetas if theta}
        # All structures hold plain addresses, which keep nothing alive: what they point to is kept
        # in `_tensors`, `_rotations`, `_centres`, `_blocks`, `heads` and `_classifiers` for as long
        # as the engine.
        self._rotations = {theta: self._rotation(theta) for theta in thetas}
        self._centres: list[NDArray[np.int16]] = []
        self._blocks = (BlockStruct * shape.num_layers)()
        for index in range(shape.num_layers):
            self._fill_block(self._blocks[index], index)
        model = ModelStruct(
            blocks=shape.num_layers,
            width=width,
            wide=shape.intermediate_size,
            heads=shape.num_heads,
            embedding_width=embedding_width,
            num_positions=positions,
            activation=shape.activation,
            head_activation=shape.head_activation,
            norm_first=family.final_norm is not None,
            is_gated=family.gate is not None,
            mean_pool=shape.mean_pool,
            padding_id=-1 if shape.padding_id is None else shape.padding_id,
            norm_epsilon=shape.norm_epsilon,
            words=_pointer(self._tensors, "words", np.float16, (shape.vocab_size, embedding_width)),
            embedding_norm=_norm(self._tensors, "embedding_norm", embedding_width),
            block=self._blocks,
        )
        if family.position_embeddings:
            # With a padding id the first row is for it alone.
            rows = positions + (shape.padding_id is not None)
            tables = 1 if shape.separator is None else 2
            model.positions = _pointer(
                self._tensors, "positions", np.float32, (tables * rows, embedding_width)
            )
        if family.relative_positions:
            model.distances = _pointer(
                self._tensors, "distances", np.float32, (shape.num_heads, 2 * positions + LANES)
            )
        if embedding_width != width:
            model.projection = self._linear("projection", width, embedding_width)
        return model

    def _set_heads(self, heads: Sequence[Tensors], num_labels: Sequence[int]) -> None:
        self.heads = heads  # the tensors behind the encoder of each model, by their names
        structures = map(self._classifier_struct, heads, num_labels)
        self._classifiers = (ClassifierStruct * len(heads))(*structures)
        self._model.classifier = self._classifiers
        self._model.models = len(heads)
        self._model.labels = sum(num_labels)

    def _classifier_struct(self, head: Tensors, labels: int) -> ClassifierStruct:
        width = self._shape.hidden_size
        is_diagonal = "pooler.weight" in head and head["pooler.weight"].ndim == 1
        size = (width,) if is_diagonal else (width, width)
        has_norm = self._shape.family.pooler_norm
        return ClassifierStruct(
            labels=labels,
            is_diagonal=is_diagonal,
            pooler_weight=_pointer(head, "pooler.weight", np.float32, size),
            pooler_bias=_pointer(head, "pooler.bias", np.float32, (width,)),
            norm=_norm(head, "head_norm", width) if has_norm else NormStruct(),
            weight=_pointer(head, "classifier.weight", np.float32, (labels, width)),
            bias=_pointer(head, "classifier.bias", np.float32, (labels,)),
        )

    def _fill_block(self, block: BlockStruct, index: int) -> None:
        prefix, shape = f"block.{index}.", self._shape
        width, wide = shape.hidden_size, shape.intermediate_size
        # (outputs, inputs) of each; keys and values are one product.
        sizes = {
            "query": (width, width),
            "key_value": (2 * width, width),
            "attention_out": (width, width),
            "wide": (wide, width),
            "narrow": (width, wide),
        }
        if shape.family.gate:
            sizes["gate"] = (wide, width)
        for name, (outputs, inputs) in sizes.items():
            setattr(block, name, self._linear(prefix + name, outputs, inputs))
        block.attention_norm = _norm(self._tensors, f"{prefix}attention_norm", width)
        block.output_norm = _norm(self._tensors, f"{prefix}output_norm", width)
        block.window = shape.windows[index]
        if theta := shape.rotary_thetas[index]:
            block.rotation = self._rotations[theta].ctypes.data

    def _rotation(self, theta: float) -> NDArray[np.float32]:
        half, positions = self._shape.head_size // 2, self._shape.num_positions
        rotation = np.empty((positions, 2 * half), dtype=np.float32)
        frequencies = _pointer(self._tensors, f"frequencies.{theta:g}", np.float32, (half,))
        self._library.fill_rotation(frequencies, half, positions, rotation.ctypes.data)
        return rotation

    def _linear(self, name: str, outputs: int, inputs: int) -> LinearStruct:
        linear = LinearStruct(
            outputs=outputs,
            inputs=inputs,
            weight=_pointer(
                self._tensors, f"{name}.weight", np.int8, (outputs // LANES, inputs // 4, LANES, 4)
            ),
            scale=_pointer(self._tensors, f"{name}.scale", np.float32, (outputs,)),
            weight_sum=_pointer(self._tensors, f"{name}.weight_sum", np.int32, (outputs,)),
            bias=_pointer(self._tensors, f"{name}.bias", np.float32, (outputs,)),
        )
        if self.instructions == "avx2" and inputs % _CENTRED == 0:
            # An eighth of the weights' memory.
            centres = _aligned_memory(4 * outputs * inputs // _CENTRED).view(np.int16)
            self._library.fill_centres(linear.weight, outputs, inputs, centres.ctypes.data)
            linear.centres = centres.ctypes.data
            self._centres.append(centres)
        return linear


def _split(tensors: dict[str, NDArray[Any]]) -> tuple[Tensors, Tensors]:
    """The tensors of the encoder, and those of the head."""
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_OF_HEAD)}
    pooler = head.get("pooler.weight")
    if pooler is not None and pooler.ndim == 2:
        diagonal = pooler.diagonal()
        # `--method head` writes such a pooler. It differs from model to model, and many of the whole
        # matrices would take as long as the encoder: a single text waits for each to be read.
        if np.count_nonzero(diagonal) == np.count_nonzero(pooler):
            head["pooler.weight"] = aligned_copy(diagonal)
    return tensors, head


def _norm(tensors: Tensors, name: str, width: int) -> NormStruct:
    gain, bias = (
        _pointer(tensors, f"{name}.{part}", np.float32, (width,)) for part in ("gain", "bias")
    )
    return NormStruct(gain=gain, bias=bias)


def _pointer(tensors: Tensors, name: str, dtype: type, shape: tuple[int, ...]) -> int:
    array = tensors.get(name)
    # The kernels read as much as the sizes in config.json say, so each array must be as large.
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise ValueError(f"{FILE_NAME}: {name} must be {np.dtype(dtype)} {shape}, found {found}")
    return array.ctypes.data


def _address(pointer: Any) -> int:
    # ctypes gives the value of a c_void_p as a number, that of a typed pointer as an object.
    return pointer if isinstance(pointer, int) else ctypes.addressof(pointer.contents)


def mark_second_texts(
    ids: NDArray[np.int32], starts: NDArray[np.int32], separator: int
) -> NDArray[np.int32]:
    """Add SECOND_TEXT of model.h to the ids behind the first separator of each text."""
    is_separator = ids == separator
    before = np.cumsum(is_separator, dtype=np.int32) - is_separator
    before -= np.repeat(before[starts[:-1]], np.diff(starts))
    return np.where(before > 0, ids | SECOND_TEXT, ids)


class _Threads:
    """The helper threads of one model in one process, and the sessions that share them."""

    def __init__(
        self, library: ctypes.CDLL, model: ModelStruct, threads: int, instructions: str
    ) -> None:
        self.process = os.getpid()
        # For __del__, which may run when the interpreter has already cleared its modules.
        self._getpid = os.getpid
        # The calling thread works too, so a pool of n threads has n - 1 helpers.
        self.sessions: SimpleQueue[ctypes._Pointer[SessionStruct]] = SimpleQueue()
        self._library = library
        self._model = model  # the pool has its address
        self._opened: list[ctypes._Pointer[SessionStruct]] = []
        self._pool = ctypes.c_void_p(
            library.open_pool(ctypes.byref(model), threads - 1, instructions.encode())
        )
        for _ in range(min(threads, PASSES_AT_ONCE)):
            session = self._pool and library.open_session(self._pool)
            if not session:
                raise MemoryError("no memory for the sessions of the native engine")
            self._opened.append(session)
            # Each pass writes the address of its model here, so it has to be the right place.
            if session.contents.model != ctypes.addressof(model):
                raise OSError(
                    "the native kernels were compiled from another version; install again"
                )
            self.sessions.put(session)

    def __del__(self) -> None:
        # In a forked child this is only a copy of the parent's pool: there are no threads to join.
        if self._pool and self.process == self._getpid():
            self._library.close_pool(self._pool)
            for session in self._opened:
                self._library.close_session(session)


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, in one piece of memory, each on a boundary of cache lines,
    which kernels load.

    The library would copy each array out of the file's memory, and a file promises no alignment, so
    each would be copied once more; most of the start would go into that.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(header_bytes))
        except RecursionError as error:
            raise ValueError(f"{path.name} has a header that is nested too deep") from error
        header.pop("__metadata__", None)
        # Small arrays of odd sizes shift all that follow, so it is the largest that gets its
        # position.
        offsets = (entry["data_offsets"] for entry in header.values())
        begins = {end - begin: begin for begin, end in offsets}
        data_bytes = os.fstat(file.fileno()).st_size - 8 - header_bytes
        data = _aligned_memory(data_bytes, begins[max(begins)])
        if file.readinto(data) != len(data):
            raise OSError(f"{path.name} was cut while it was read")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensor = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if tensor.ctypes.data % _ALIGNMENT:
            tensor = aligned_copy(tensor)
        tensors[name] = tensor
    return tensors


def aligned_copy(array: NDArray[Any]) -> NDArray[Any]:
    copied = _aligned_memory(array.nbytes).view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _aligned_memory(num_bytes: int, aligned: int = 0) -> NDArray[np.uint8]:
    """New memory whose byte number ``aligned`` is on a boundary."""
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -(memory.ctypes.data + aligned) % _ALIGNMENT
    return memory[start : start + num_bytes]
