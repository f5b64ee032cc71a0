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
- Prefill never waits for a disk: on a GPU the copy runs on a side stream into pinned memory, and a thread writes.

Settings: the environment variable DRILLCORE_CAPTURE holds a JSON object
    {"staging": directory, "layers": [decoder layer, ...], "final_norm": "post"}.
Without it the plugin does nothing. Layer k is the residual stream after decoder layer k, 0-based.

Dump: a safetensors file with `aux_hidden_states` [tokens, layers * hidden], `last_hidden_state` [tokens, hidden]
(both in the model's dtype) and `input_ids` int32 [tokens]; its metadata key `drillcore` holds the layer ids, the norm
state and the health of each state (aux layers in order, then the final state): RMS, rows that are all zero, rows
that are not finite.
"""

import json
import logging
import math
import os
import queue
import re
import threading
import time
from importlib.metadata import version
from pathlib import Path

import torch

PLUGIN_VERSION = "1"
SETTINGS = "DRILLCORE_CAPTURE"
# drillcore-<run>-<row>-<attempt>-<tokens>: no character of it can leave the staging directory.
REQUEST_ID = re.compile(r"drillcore-[a-z0-9]{1,16}-[0-9]{1,12}-[0-9]{1,6}-([0-9]{1,8})")
ABANDONED_AFTER = 900.0  # seconds without a new chunk: the request was aborted
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOGITS_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}

# Models whose loop hands over the input of the layer that it is about to run, for each number in `layers_to_capture`,
# by reading SGLang 0.5.23. Others capture after the layer, or use another switch: they would be off by one in silence.
KNOWN_MODELS = {
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
}

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    """A request's states cannot be captured; the message goes into its error record."""


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
    """The capture of one scheduler process: which layers, which requests are half-way, who writes."""

    def __init__(self, settings):
        self.staging = Path(settings["staging"])
        self.layers = list(settings["layers"])
        self.final_norm = settings["final_norm"]
        if self.final_norm != "post":
            raise CaptureError(f"final_norm {self.final_norm!r} is not supported by this plugin, only 'post'")
        self.staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.assemblies = {}
        self.longest_prompt = 0
        self.stream = None
        self.writer = None

    def after_load_model(self, result, runner, *args, **kwargs):
        """AFTER hook of ModelRunner.load_model: switch the capture on and say so in a READY file."""
        if getattr(runner, "is_draft_worker", False):
            return result
        model = getattr(runner.model, "language_model", runner.model)
        decoder = getattr(model, "model", None)
        count = len(getattr(decoder, "layers", ()))
        if type(model).__name__ not in KNOWN_MODELS or not hasattr(decoder, "layers_to_capture"):
            raise CaptureError(f"{type(model).__name__} has no known way to capture hidden states: {KNOWN_MODELS}")
        # States come in the order of the layers, and the output of the last one is no layer's input.
        if self.layers != sorted(set(self.layers)) or not all(0 <= layer < count - 1 for layer in self.layers):
            raise CaptureError(f"layers {self.layers} must ascend between 0 and {count - 2}: there are {count} layers")
        decoder.layers_to_capture = [layer + 1 for layer in self.layers]
        model.capture_aux_hidden_states = True
        self.longest_prompt = runner.model_config.context_len
        if torch.device(runner.device).type == "cuda":
            self.stream = torch.cuda.Stream()
        if _writes_here():
            self.writer = Writer(self.staging)
            ready = {
                "plugin": PLUGIN_VERSION,
                "sglang": version("sglang"),
                "pid": os.getpid(),
                "layers": self.layers,
                "final_norm": self.final_norm,
                "model_layers": count,
                "hidden_size": runner.model_config.hidden_size,
                "dtype": str(runner.model_config.dtype).removeprefix("torch."),
                "context_length": self.longest_prompt,
            }
            _replace(self.staging / f"ready.{os.getpid()}.json", json.dumps(ready).encode())
        return result

    def around_logits_processor(self, original, processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs):
        """AROUND hook of LogitsProcessor.forward; `batch` is the ForwardBatch."""
        if self.writer is not None and getattr(batch, "rids", None):
            try:
                aux = args[0] if args else kwargs.get("aux_hidden_states")
                # A multimodal wrapper embeds the ids itself and passes None on.
                self.take(batch.input_ids if input_ids is None else input_ids, hidden_states, batch, aux)
            except Exception:
                logger.exception("drillcore: capture failed for a whole batch")
        return original(processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs)

    def take(self, input_ids, hidden_states, batch, aux):
        """Copy the rows of our requests out of one forward pass.

        input_ids: int [rows]; hidden_states: [rows, hidden]; aux: one [rows, hidden] tensor a layer or one packed
        [rows, layers * hidden]. The requests' rows follow each other in the order of `batch.rids`; padding comes last.
        """
        if not batch.forward_mode.is_extend():
            return
        start = 0
        for rid, length, prefix in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu):
            rows = slice(start, start + length)
            start += length
            form = REQUEST_ID.fullmatch(rid)
            if form is None:
                continue
            try:
                self.take_chunk(rid, int(form[1]), rows, prefix, input_ids, hidden_states, aux)
            except Exception as error:
                self.assemblies.pop(rid, None)
                self.writer.put_error(rid, error)
        self.drop_abandoned()

    def take_chunk(self, rid, tokens, rows, prefix, input_ids, hidden_states, aux):
        """Add one chunk, the prompt's tokens from `prefix` on, to the request's assembly."""
        length = rows.stop - rows.start
        if not 0 < tokens <= self.longest_prompt:
            raise CaptureError(f"the request id names {tokens} tokens; this server takes 1 to {self.longest_prompt}")
        if prefix + length > tokens:
            raise CaptureError(f"{prefix + length} tokens were prefilled, but the request id names {tokens}")
        if rows.stop > hidden_states.shape[0]:
            raise CaptureError(f"the batch has {hidden_states.shape[0]} rows, the request ends at {rows.stop}")
        if aux is None:
            raise CaptureError("the model gave no aux hidden states")
        if prefix == 0:  # also after a retraction or an abort: the prompt starts anew
            self.assemblies[rid] = Assembly(rid, tokens, self.layers, self.final_norm, hidden_states, self.stream)
        assembly = self.assemblies.get(rid)
        have = assembly.have if assembly else 0
        if assembly is None or have != prefix:
            raise CaptureError(
                f"a chunk starts at token {prefix}, but {have} tokens are here: is the server's radix cache on?"
            )
        chunk_aux = aux[rows] if isinstance(aux, torch.Tensor) else torch.cat([layer[rows] for layer in aux], dim=-1)
        assembly.add(chunk_aux, hidden_states[rows], input_ids[rows])
        if assembly.have == tokens:
            del self.assemblies[rid]
            self.writer.put(assembly)

    def drop_abandoned(self):
        limit = time.monotonic() - ABANDONED_AFTER
        for rid in [rid for rid, assembly in self.assemblies.items() if assembly.touched < limit]:
            del self.assemblies[rid]


class Assembly:
    """The states of one prompt while its chunks arrive, in host memory (pinned when they come from a GPU)."""

    def __init__(self, rid, tokens, layers, final_norm, like, stream):
        hidden = like.shape[-1]
        self.rid, self.tokens, self.layers, self.final_norm = rid, tokens, layers, final_norm
        self.have, self.chunks, self.touched = 0, 0, time.monotonic()
        self.stream, self.copied = stream, None
        host = {"device": "cpu", "pin_memory": stream is not None}
        self.aux = torch.empty((tokens, len(layers) * hidden), dtype=like.dtype, **host)
        self.last = torch.empty((tokens, hidden), dtype=like.dtype, **host)
        self.ids = torch.empty((tokens,), dtype=torch.int32, **host)
        # A line a state: sum of squares, rows that are zero, rows that are not finite. On the device: no wait here.
        self.health = torch.zeros((len(layers) + 1, 3), dtype=torch.float32, device=like.device)
        self.health_host = torch.empty((len(layers) + 1, 3), dtype=torch.float32, **host)

    def add(self, aux, last, ids):
        """aux: [rows, layers * hidden], last: [rows, hidden], ids: [rows], all on the model's device."""
        rows = slice(self.have, self.have + len(last))
        for source, target in ((aux, self.aux), (last, self.last)):
            # copy_ would convert and broadcast without a word
            if source.dtype != target.dtype or source.shape != target[rows].shape:
                raise CaptureError(f"states are {source.dtype} {tuple(source.shape)}, not like the ones before")
        states = [*aux.unflatten(-1, (-1, last.shape[-1])).unbind(1), last]
        for state, line in zip(states, self.health, strict=True):
            norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32)
            finite = torch.isfinite(norms)
            line += torch.stack([norms.square().sum(), (norms == 0).sum(), (~finite).sum()])
        copies = [(self.aux[rows], aux), (self.last[rows], last), (self.ids[rows], ids.to(torch.int32))]
        self.have = rows.stop
        self.chunks += 1
        self.touched = time.monotonic()
        if self.have == self.tokens:
            copies.append((self.health_host, self.health))
        if self.stream is None:
            for target, source in copies:
                target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self.stream)  # its memory is not given to another tensor before the copy ends
            self.copied = self.stream.record_event()

    def parts(self):
        """Wait for the copies; returns (metadata, tensors) of the dump, tensors by name in file order."""
        if self.copied is not None:
            self.copied.synchronize()
        elements = self.tokens * self.last.shape[-1]
        squares, zero, bad = (column.tolist() for column in self.health_host.unbind(1))
        metadata = {
            "format": "drillcore.dump/1",
            "request": self.rid,
            "layers": self.layers,
            "final_norm": self.final_norm,
            "chunks": self.chunks,
            "rms": [math.sqrt(value / elements) if math.isfinite(value) else None for value in squares],
            "zero_rows": [int(value) for value in zero],
            "nonfinite_rows": [int(value) for value in bad],
        }
        return metadata, {"aux_hidden_states": self.aux, "last_hidden_state": self.last, "input_ids": self.ids}


class Writer:
    """One thread that writes finished dumps. The client bounds what is in flight, so the queue stays short."""

    def __init__(self, staging):
        self.staging = staging
        self.work = queue.SimpleQueue()
        threading.Thread(target=self.run, name="drillcore-writer", daemon=True).start()

    def put(self, assembly):
        self.work.put(assembly)

    def put_error(self, rid, error):
        self.work.put((rid, f"{type(error).__name__}: {error}"))

    def run(self):
        while True:
            item = self.work.get()
            if isinstance(item, tuple):
                self.write_error(*item)
                continue
            try:
                write_dump(self.staging / f"{item.rid}.safetensors", *item.parts())
            except Exception as error:
                self.write_error(item.rid, f"{type(error).__name__}: {error}")

    def write_error(self, rid, message):
        logger.error("drillcore: %s: %s", rid, message)
        try:
            _replace(self.staging / f"{rid}.error.json", json.dumps({"error": message}).encode())
        except OSError:
            logger.exception("drillcore: the error record of %s could not be written", rid)


def write_dump(path, metadata, tensors):
    """Write host tensors as one safetensors file (format: huggingface.co/docs/safetensors), atomically."""
    header, offset = {"__metadata__": {"drillcore": json.dumps(metadata)}}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pieces = [len(text).to_bytes(8, "little"), text]
    pieces += [memoryview(tensor.view(torch.uint8).numpy()).cast("B") for tensor in tensors.values()]
    _replace(path, *pieces)


def _replace(path, *pieces):
    """Write `pieces` under a temporary name and rename: `path` never holds half of them."""
    temporary = path.with_name(f"{path.name}.part")
    try:
        with open(temporary, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view.nbytes:
                    view = view[file.write(view) :]
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _writes_here():
    """Whether this process is the one of its attention-TP group that holds the write."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_rank == 0
