"""SGLang plugin: writes the hidden states of our own prefill requests into a staging directory.

SGLang loads it through its entry-point group `sglang.srt.plugins` in every scheduler process; nothing of
SGLang is edited. Two hooks: after the model is loaded, the decoder layers to capture are set; around the
logits processor, the one place that sees request ids, chunk lengths and all states of a forward pass, the
rows of our requests are copied out.

Promises
- Only requests whose id has our form are touched. The id carries the number of prompt tokens, so that a dump is
  written exactly when every one of them was seen, in order; a prompt cut short or served from a cache never is.
- A dump appears under its final name only when it is complete: temporary name, then rename.
- An exception becomes an error record of that request, `<request id>.error.json`. The scheduler lives on.
- A server whose model or settings would give other values than the decoder layers' outputs does not start.
- Prefill never waits for a disk. On a GPU a pass's states are copied on a side stream into pinned memory, which is
  given back as soon as threads have written them; no state is kept for longer, however long its prompt. Where the
  threads fall behind, a file `busy.<pid>` asks clients to send nothing new; nothing is dropped meanwhile.

Settings: the environment variable DRILLCORE_CAPTURE holds a JSON object
    {"staging": directory, "layers": [decoder layer, ...], "final_norm": "post" or "pre", "pinned_bytes": at most}.
Without it the plugin does nothing. Layer k is the residual stream after decoder layer k, 0-based; the final state is
the last layer's output after ("post") or before ("pre") the model's last norm.

Dump: a safetensors file with `aux_hidden_states` [tokens, layers * hidden], `last_hidden_state` [tokens, hidden]
(both in the model's dtype) and `input_ids` int32 [tokens]; its metadata key `drillcore` holds the layer ids, the norm
state and the health of each state (aux layers in order, then the final state): RMS, rows that are all zero, rows
that are not finite.
"""

import collections
import contextlib
import itertools
import json
import logging
import math
import os
import queue
import re
import threading
from importlib.metadata import version
from pathlib import Path

import torch

PLUGIN_VERSION = "2"
SETTINGS = "DRILLCORE_CAPTURE"
# drillcore-<run>-<row>-<attempt>-<tokens>: no character of it can leave the staging directory.
REQUEST_ID = re.compile(r"drillcore-[a-z0-9]{1,16}-[0-9]{1,12}-[0-9]{1,6}-([0-9]{1,8})")
PASSES_APART = 16  # SGLang continues a half-way prompt in its next prefill pass: after so many without, it was aborted
PINNED_BYTES, PASSES_PINNED = 4 << 30, 4  # page-locked memory: for so many prefill passes, at most so many bytes
WRITERS = 4  # threads on a GPU server: one writes 1.6 GB/s into shared memory, most of it the kernel clearing pages
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOGITS_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}
PAGE = 4096

# Models whose loop hands over the input of the layer that it is about to run, complete, for each number in
# `layers_to_capture`: read in the source of every version in the manifest. Others capture after the layer, or use
# another switch: they would be off by one in silence.
KNOWN_MODELS = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
# Of these, SGLang splits the attention heads over all of tensor parallelism also where attention is data parallel.
NO_DATA_PARALLEL_ATTENTION = ("LlamaForCausalLM", "Qwen2ForCausalLM")
# Server arguments under which rows or values here are not what they seem: what they must be, and why. Under other
# versions' names, too; an argument that a version does not have is as it must be.
REQUIRED = {
    "pp_size": (1, "with pipeline parallelism no process sees all layers: use tensor parallelism"),
    "enable_two_batch_overlap": (False, "two-batch overlap skips the capture of layers"),
    "speculative_algorithm": (None, "speculative decoding sets other layers to capture"),
    "enable_return_aux_hidden_states": (False, "SGLang's own capture sets other layers"),
    "enable_layernorm_sp": (False, "sequence parallelism leaves each process a share of the rows"),
    "enable_attn_tp_input_scattered": (False, "scattered inputs leave each process a share of the rows"),
    "enable_pdmux": (False, "multiplexed prefill and decode take another way"),
    "disaggregation_mode": ("null", "disaggregated prefill takes another way"),
    "dllm_algorithm": (None, "diffusion models take another way"),
    "is_embedding": (False, "embedding models take another way"),
    "rl_on_policy_target": (None, "it changes the residual stream's dtype"),
}
# More that only several processes get wrong: an all-reduce that is fused into the next layer's norm comes after the
# capture, or never (SGLang up to 0.5.20); other ways to share the experts leave each process a share of the rows.
REQUIRED_OF_SEVERAL = {
    "enable_flashinfer_allreduce_fusion": (False, "start it with --enforce-disable-flashinfer-allreduce-fusion"),
    "flashinfer_allreduce_fusion_backend": (None, "start it with --enforce-disable-flashinfer-allreduce-fusion"),
    "enable_aiter_allreduce_fusion": (False, "a fused all-reduce comes after the capture"),
    "moe_a2a_backend": ("none", "each process may have a share of the rows: not tested"),
}

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    """A request's states cannot be captured, or a server's not at all; the message says why."""


def register():
    """Entry point: register the two hooks, if this server is to capture at all."""
    settings = os.environ.get(SETTINGS)
    if not settings:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = Capture(json.loads(settings))
    HookRegistry.register(LOAD_MODEL, capture.after_load_model, HookType.AFTER)
    HookRegistry.register(LOGITS_PROCESSOR, capture.around_logits_processor, HookType.AROUND)


class Capture:
    """The capture of one scheduler process: which layers, which prompts are half-way, who writes."""

    def __init__(self, settings):
        self.staging = Path(settings["staging"])
        self.layers = list(settings["layers"])
        self.final_norm = settings["final_norm"]
        if self.final_norm not in ("post", "pre"):
            raise CaptureError(f"final_norm must be 'post' or 'pre', not {self.final_norm!r}")
        self.pinned_bytes = settings.get("pinned_bytes", PINNED_BYTES)
        open_staging(self.staging)
        self.dumps = {}
        self.passes = 0
        self.longest_prompt = 0
        self.before_norm = None
        self.writers = None

    def after_load_model(self, result, runner, *args, **kwargs):
        """AFTER hook of ModelRunner.load_model: switch the capture on and say so in a READY file."""
        if getattr(runner, "is_draft_worker", False):
            return result
        model = getattr(runner.model, "language_model", runner.model)
        decoder = getattr(model, "model", None)
        count = len(getattr(decoder, "layers", ()))
        if type(model).__name__ not in KNOWN_MODELS or not hasattr(decoder, "layers_to_capture"):
            raise CaptureError(
                f"{type(model).__name__} has no known way to capture hidden states, as {', '.join(KNOWN_MODELS)} have"
            )
        arguments = check_server(runner.server_args, type(model).__name__)
        # States come in the order of the layers, and the output of the last one is no layer's input.
        ascending = sorted(set(self.layers))
        if not ascending or self.layers != ascending or not all(0 <= layer < count - 1 for layer in ascending):
            raise CaptureError(f"layers {self.layers} must ascend between 0 and {count - 2}: there are {count} layers")
        decoder.layers_to_capture = [layer + 1 for layer in self.layers]
        model.capture_aux_hidden_states = True
        if self.final_norm == "pre":
            decoder.norm.register_forward_hook(self.keep_before_norm)
        self.longest_prompt = runner.model_config.context_len
        if attention_tp_rank() == 0:  # the others of its group have the same states
            self.start_writers(runner, arguments)
            ready = {
                "plugin": PLUGIN_VERSION,
                "sglang": version("sglang"),
                "pid": os.getpid(),
                "started": start_of(os.getpid()),
                "layers": self.layers,
                "final_norm": self.final_norm,
                "model_layers": count,
                "hidden_size": runner.model_config.hidden_size,
                "dtype": str(runner.model_config.dtype).removeprefix("torch."),
                "context_length": self.longest_prompt,
            }
            replace_file(self.staging / f"ready.{os.getpid()}.json", json.dumps(ready).encode())
        return result

    def start_writers(self, runner, arguments):
        if torch.device(runner.device).type != "cuda":
            self.writers = Writers(self.staging, self.pinned_bytes)
            return
        config, rows = runner.model_config, arguments["chunked_prefill_size"]
        rows = rows if rows and rows > 0 else arguments["max_prefill_tokens"]
        row_bytes = (len(self.layers) + 1) * (config.hidden_size * config.dtype.itemsize + 4) + 4
        pass_bytes = rows * row_bytes + 4 * PAGE
        pinned_bytes = 1 << (PASSES_PINNED * pass_bytes - 1).bit_length()  # PyTorch takes powers of two
        while pinned_bytes > self.pinned_bytes:
            pinned_bytes //= 2
        if pinned_bytes < 2 * pass_bytes:
            logger.warning(
                "drillcore: %d bytes of pinned memory are less than two passes of %d: prefill will wait for copies",
                pinned_bytes,
                pass_bytes,
            )
        self.writers = Writers(self.staging, pinned_bytes, torch.cuda.Stream(), WRITERS)

    def keep_before_norm(self, norm, inputs, output):
        """Forward hook of the last norm: it adds what the last layer gave, complete by then, to the residual."""
        self.before_norm = output[1] if isinstance(output, tuple) else inputs[0]

    def around_logits_processor(self, original, processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs):
        """AROUND hook of LogitsProcessor.forward; `batch` is the ForwardBatch."""
        before_norm, self.before_norm = self.before_norm, None
        if self.writers is not None and getattr(batch, "rids", None):
            try:
                aux = args[0] if args else kwargs.get("aux_hidden_states")
                last = hidden_states if self.final_norm == "post" else before_norm
                # A multimodal wrapper embeds the ids itself and passes None on.
                self.take(batch.input_ids if input_ids is None else input_ids, last, batch, aux)
            except Exception as error:
                logger.exception("drillcore: capture failed for a whole pass")
                for rid in filter(REQUEST_ID.fullmatch, batch.rids):
                    self.fail(rid, error)
        return original(processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs)

    def take(self, input_ids, last, batch, aux):
        """Copy the rows of our requests out of one forward pass.

        input_ids: int [rows]; last: [rows, hidden]; aux: one [rows, hidden] tensor a layer or one packed
        [rows, layers * hidden]. The requests' rows follow each other in the order of `batch.rids`; padding comes last.
        """
        if not batch.forward_mode.is_extend():
            return
        ours, end = [], 0
        for rid, length, prefix in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu):
            form = REQUEST_ID.fullmatch(rid)
            # Where decoding requests ride along, each has a row after its prompt's.
            if form is not None and (prefix == 0 or prefix < int(form[1])):
                ours.append((rid, int(form[1]), int(prefix), slice(end, end + int(length))))
            end += int(length)
        if not ours:
            return
        self.passes += 1
        try:
            snapshot = self.writers.snapshot(*check_states(input_ids, last, aux, len(self.layers), end))
        except Exception as error:
            for rid, *_ in ours:
                self.fail(rid, error)
            return
        pieces = []
        for rid, tokens, prefix, rows in ours:
            try:
                pieces.append(self.piece(rid, tokens, prefix, rows, last))
            except Exception as error:
                self.fail(rid, error)
        self.writers.write(snapshot, pieces)
        for rid in [rid for rid, dump in self.dumps.items() if dump.touched < self.passes - PASSES_APART]:
            self.writers.discard(self.dumps.pop(rid))

    def piece(self, rid, tokens, prefix, rows, last):
        """The prompt's tokens from `prefix` on: (dump, first token, rows of the pass)."""
        length = rows.stop - rows.start
        if not 0 < tokens <= self.longest_prompt:
            raise CaptureError(f"the request id names {tokens} tokens; this server takes 1 to {self.longest_prompt}")
        if prefix + length > tokens:
            raise CaptureError(f"{prefix + length} tokens were prefilled, but the request id names {tokens}")
        dump = self.dumps.get(rid)
        if prefix == 0:  # also after a retraction or an abort: the prompt starts anew
            if dump is not None:
                self.writers.discard(dump)
            dump = self.dumps[rid] = Dump(rid, tokens, self.layers, self.final_norm, last, self.staging)
        have = dump.have if dump else 0
        if dump is None or have != prefix:
            raise CaptureError(
                f"a chunk starts at token {prefix}, but {have} tokens are here: is the server's radix cache on?"
            )
        if (last.dtype, last.shape[-1]) != (dump.dtype, dump.hidden):
            raise CaptureError(f"states are {last.dtype} {tuple(last.shape)}, not like the ones before")
        dump.have += length
        dump.chunks += 1
        dump.touched = self.passes
        if dump.have == tokens:
            del self.dumps[rid]
        return dump, prefix, rows

    def fail(self, rid, error):
        """Give up a request: its dump goes, an error record comes."""
        self.writers.fail(rid, self.dumps.pop(rid, None), f"{type(error).__name__}: {error}")


def check_server(arguments, model):
    """The server's arguments as they were resolved. Raises CaptureError if the model's states would not be right."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.logits_processor import LogitsProcessor

    if not hasattr(LogitsProcessor.forward, "__wrapped__"):  # SGLang logs a hook that it cannot apply, and goes on
        raise CaptureError(f"the hook around {LOGITS_PROCESSOR} was not applied")
    if parallel_state.get_attn_context_model_parallel_world_size() > 1:
        raise CaptureError("the attention is context parallel: each process would have a share of the rows")
    # From 0.5.19 on, the fields hold what was asked for; what became of it is in a dictionary.
    values = arguments.resolved_dict() if hasattr(arguments, "resolved_dict") else vars(arguments)
    check_arguments(values, model, parallel_state.get_tensor_model_parallel_world_size() > 1)
    try:
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
    except ImportError:  # before 0.5.14
        graph_is_off = values["disable_piecewise_cuda_graph"]
    else:
        graph_is_off = check_cuda_graph_backend("prefill", "disabled")
    if not graph_is_off:
        raise CaptureError(
            "prefill runs as a CUDA graph, which hides the requests: start it with --disable-cuda-graph and, before "
            "SGLang 0.5.14, --disable-piecewise-cuda-graph"
        )
    return values


def check_arguments(values, model, several):
    """Raises CaptureError that names the argument which must be otherwise. several: processes share the model."""
    for name, (wanted, why) in (REQUIRED | (REQUIRED_OF_SEVERAL if several else {})).items():
        if (value := values.get(name, wanted)) != wanted:
            raise CaptureError(f"{name} is {value!r}: {why}")
    if several and values.get("moe_dense_tp_size") == 1:
        raise CaptureError("moe_dense_tp_size is 1: each process would have a share of the rows")
    if values.get("enable_dp_attention") and model in NO_DATA_PARALLEL_ATTENTION:
        raise CaptureError(f"enable_dp_attention is on: SGLang computes {model} wrongly with it")


def attention_tp_rank():
    """This process's rank among those that share the attention, and so the states, of the same requests."""
    from sglang.srt.distributed.parallel_state import get_attn_tensor_model_parallel_rank

    return get_attn_tensor_model_parallel_rank()


def check_states(ids, last, aux, layers, rows):
    """(aux [rows, layers * hidden], last, ids) of the first `rows` rows that the model gave. Raises CaptureError."""
    if last is None or aux is None:
        raise CaptureError("the model gave no aux hidden states" if aux is None else "the last norm was not seen")
    if not isinstance(aux, torch.Tensor):
        aux = torch.cat([layer[:rows] for layer in aux], dim=-1)
    aux, last, ids = aux[:rows], last[:rows], ids[:rows]
    # What has another shape or dtype would be converted or cut by a copy without a word.
    if aux.shape != (rows, layers * last.shape[-1]) or len(last) != rows or len(ids) != rows or aux.dtype != last.dtype:
        raise CaptureError(
            f"a pass over {rows} rows and {layers} layers gave aux {aux.dtype} {tuple(aux.shape)}, "
            f"final {last.dtype} {tuple(last.shape)}, ids {tuple(ids.shape)}"
        )
    return aux, last, ids


class Snapshot:
    """The states of one forward pass in host memory, until all that is wanted of them is written."""

    def __init__(self, aux, last, ids, stream, ring):
        # A norm a token and state, on the device: what makes a dump's health figures.
        states = [state.unflatten(-1, (-1, last.shape[-1])) for state in (aux, last)]
        norms = torch.cat([torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32) for state in states], dim=-1)
        sources = [aux, last, ids.to(torch.int32), norms]
        sizes = [source.nbytes + -source.nbytes % PAGE for source in sources]
        self.bytes = sum(sizes)
        self.unwritten, self.lock = 0, threading.Lock()
        self.ring, self.copied = ring, None
        self.segment = ring.take(self.bytes) if ring else None
        # Without a ring: a CPU server, or the writers are behind. Ordinary memory, which is slower to copy into.
        memory = self.segment.memory if self.segment else torch.empty(self.bytes, dtype=torch.uint8)
        targets = [
            part[: source.nbytes].view(source.dtype).view(source.shape)
            for source, part in zip(sources, memory.split(sizes))
        ]
        *parts, self.norms = targets
        try:
            # In the order of a dump's tensors: bytes [rows, width].
            self.parts = [memoryview(part.view(len(part), -1).view(torch.uint8).numpy()) for part in parts]
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                for target, source in zip(targets, sources):
                    target.copy_(source, non_blocking=stream is not None)
                    if stream is not None:
                        source.record_stream(stream)  # its memory is not given to others before the copy ends
            if stream is not None:
                self.copied = torch.cuda.Event(blocking=True)  # who waits for it sleeps
                self.copied.record(stream)
        except BaseException:
            self.release()
            raise

    def wait(self):
        """Block until the states have come from the device."""
        if self.copied is not None:
            self.copied.synchronize()

    def release(self):
        if self.segment is not None:
            self.ring.give_back(self.segment)


class PinnedRing:
    """Page-locked host memory of a fixed size: segments are taken in a circle and given back in any order."""

    class Segment:
        def __init__(self, start, end, memory):
            self.start, self.end, self.memory, self.free = start, end, memory, False

    def __init__(self, size, pin_memory=True):
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
        self.taken = collections.deque()
        self.lock = threading.Lock()

    def take(self, size):
        """A segment of `size` bytes, or None if there is no room."""
        with self.lock:
            start, limit = 0, len(self.memory)
            if self.taken:
                start, oldest = self.taken[-1].end, self.taken[0].start
                if start <= oldest:
                    limit = oldest
                elif start + size > limit:
                    start, limit = 0, oldest
            if start + size > limit:
                return None
            self.taken.append(self.Segment(start, start + size, self.memory[start : start + size]))
            return self.taken[-1]

    def give_back(self, segment):
        with self.lock:
            segment.free = True
            while self.taken and self.taken[0].free:
                self.taken.popleft()


class Dump:
    """One prompt's dump while its chunks arrive: counted by the scheduler's thread, written by one other thread."""

    numbers = itertools.count()

    def __init__(self, rid, tokens, layers, final_norm, like, staging):
        hidden = like.shape[-1]
        self.rid, self.tokens, self.dtype, self.hidden = rid, tokens, like.dtype, hidden
        self.have, self.chunks, self.touched = 0, 0, 0
        self.number = next(self.numbers)
        self.path = staging / f"{rid}.safetensors"
        # A name of its own for each try: a repeated request may begin while the first one is still being written.
        self.temporary = staging / f"{rid}.{os.getpid()}-{self.number}.part"
        self.file, self.written, self.failed = None, 0, False
        self.metadata = {"format": "drillcore.dump/1", "request": rid, "layers": layers, "final_norm": final_norm}
        shapes = {
            "aux_hidden_states": (like.dtype, [tokens, len(layers) * hidden]),
            "last_hidden_state": (like.dtype, [tokens, hidden]),
            "input_ids": (torch.int32, [tokens]),
        }
        self.header, self.offsets, end = {}, [], 0
        for name, (dtype, shape) in shapes.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            self.offsets.append(start)
            self.header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        # The header comes first in the file and last in time. Room for it: as it is, and 64 characters a state.
        states = len(layers) + 1
        self.room = len(json.dumps(self.header)) + len(json.dumps(self.metadata)) + 64 * states + 256
        self.room += -self.room % PAGE
        self.squares = torch.zeros(states, dtype=torch.float64)
        self.zero_rows, self.nonfinite_rows = (torch.zeros(states, dtype=torch.int64) for _ in range(2))

    def write(self, first, snapshot, rows):
        """Add the prompt's tokens from `first` on, which are `rows` of the pass."""
        if self.file is None:
            self.file = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        for start, part in zip(self.offsets, snapshot.parts):
            write_at(self.file, self.room + start + first * part.shape[1], part[rows])
        norms = snapshot.norms[rows].double()
        self.squares += norms.square().sum(0)
        self.zero_rows += (norms == 0).sum(0)
        self.nonfinite_rows += (~norms.isfinite()).sum(0)
        self.written += len(norms)
        if self.written == self.tokens:
            self.finish()

    def finish(self):
        """Write the header (format: huggingface.co/docs/safetensors) and give the file its name."""
        rms = (self.squares / (self.tokens * self.hidden)).sqrt().tolist()
        self.metadata |= {
            "chunks": self.chunks,
            "rms": [value if math.isfinite(value) else None for value in rms],
            "zero_rows": self.zero_rows.tolist(),
            "nonfinite_rows": self.nonfinite_rows.tolist(),
        }
        text = json.dumps({"__metadata__": {"drillcore": json.dumps(self.metadata)}} | self.header).encode()
        size = self.room - 8
        if len(text) > size:
            raise CaptureError(f"the dump's header has {len(text)} bytes, {size} were kept for it")
        write_at(self.file, 0, size.to_bytes(8, "little") + text.ljust(size))
        self.close()
        with contextlib.suppress(FileNotFoundError):  # a client that gave the request up has removed it
            os.replace(self.temporary, self.path)

    def close(self):
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def remove(self):
        self.close()
        self.temporary.unlink(missing_ok=True)


class Writers:
    """Threads that write dumps. All pieces of a dump go through one of them, in the order in which they came."""

    def __init__(self, staging, pinned_bytes, stream=None, threads=1):
        self.staging = staging
        self.stream, self.ring = stream, PinnedRing(pinned_bytes) if stream is not None else None
        # Clients wait from half of the memory on: what they have sent already must still find room.
        self.busy_from = pinned_bytes // 2
        self.busy = staging / f"busy.{os.getpid()}"
        self.busy.unlink(missing_ok=True)  # of a process that had this number before
        self.pending, self.lock = 0, threading.Lock()
        self.queues = [queue.SimpleQueue() for _ in range(threads)]
        for number, work in enumerate(self.queues):
            threading.Thread(target=self.run, args=(work,), name=f"drillcore-writer-{number}", daemon=True).start()

    def snapshot(self, aux, last, ids):
        """Start to copy a pass's states to the host."""
        return Snapshot(aux, last, ids, self.stream, self.ring)

    def write(self, snapshot, pieces):
        """Write `pieces` of a snapshot, (dump, first token, rows) each, and give its memory back then."""
        snapshot.unwritten = len(pieces)
        if not pieces:
            snapshot.release()
            return
        self.count(snapshot.bytes)
        for dump, first, rows in pieces:
            self.put(dump, self.write_piece, dump, first, rows, snapshot)

    def discard(self, dump):
        """Forget a dump that will not be complete."""
        self.put(dump, self.remove, dump)

    def fail(self, rid, dump, message):
        """Forget a request's dump, if there is one, and leave an error record."""
        self.put(dump, self.write_error, rid, dump, message)

    def put(self, dump, *work):
        self.queues[dump.number % len(self.queues) if dump else 0].put(work)

    def run(self, work):
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)  # a thread's own setting; the default is the first GPU
        while True:
            function, *arguments = work.get()
            try:
                function(*arguments)
            except Exception:
                logger.exception("drillcore: a writer failed")

    def write_piece(self, dump, first, rows, snapshot):
        try:
            snapshot.wait()
            if not dump.failed:
                dump.write(first, snapshot, rows)
        except Exception as error:
            self.write_error(dump.rid, dump, f"{type(error).__name__}: {error}")
        finally:
            with snapshot.lock:
                snapshot.unwritten -= 1
                last = snapshot.unwritten == 0
            if last:
                snapshot.release()
                self.count(-snapshot.bytes)

    def remove(self, dump):
        dump.failed = True
        dump.remove()

    def write_error(self, rid, dump, message):
        logger.error("drillcore: %s: %s", rid, message)
        if dump is not None:
            with contextlib.suppress(OSError):
                self.remove(dump)
        replace_file(self.staging / f"{rid}.error.json", json.dumps({"error": message}).encode())

    def count(self, change):
        """Count bytes that wait for a thread, and tell clients when they are many."""
        with self.lock:
            was, self.pending = self.pending, self.pending + change
            if (was > self.busy_from) == (self.pending > self.busy_from):
                return
            try:
                if self.pending > self.busy_from:
                    replace_file(self.busy, start_of(os.getpid()).encode())
                else:
                    self.busy.unlink(missing_ok=True)
            except OSError:
                logger.exception("drillcore: clients could not be told how far the writers are")


def write_at(file, offset, data):
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def replace_file(path, data):
    """Write under a temporary name and rename: `path` never holds half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_staging(staging):
    """Make the staging directory, or take one that is ours alone to write; remove what dead processes left in it."""
    staging.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = staging.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise CaptureError(f"{staging} belongs to another user, or others may write in it")
    for mark in [*staging.glob("ready.*.json"), *staging.glob("busy.*")]:
        if start_of(mark.name.split(".")[1]) is None:
            mark.unlink(missing_ok=True)


def start_of(pid):
    """When a process started, in the kernel's ticks since its boot: with the pid it names one process. None: dead."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = facts.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state == "Z" else rest[18]
