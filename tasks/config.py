"""The one typed config of an extraction, read from YAML.

Unknown keys are refused with the nearest known one. Every field has a description: `python -m flows config` prints
them, and Prefect's form shows them.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from tasks.errors import ConfigError
from tasks.uris import S3_SCHEME, parse_s3_uri

GIB = 1 << 30
# Absolute from the start: what is kept with the output must mean the same from any working directory.
AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


def _output_place(value: Any) -> Path | str:
    if isinstance(value, str) and value.startswith(S3_SCHEME):
        try:
            return f"{S3_SCHEME}{'/'.join(parse_s3_uri(value))}"
        except ConfigError as error:
            raise ValueError(str(error)) from error
    if not isinstance(value, (str, Path)) or "://" in str(value):
        raise ValueError("a directory, or s3://BUCKET/PREFIX, is expected")
    return Path(value).expanduser().absolute()


def _without_keys(value: str | None) -> str | None:
    if value is not None and (not re.match(r"https?://", value) or "@" in value):
        raise ValueError("http:// or https:// is expected, without user or password")
    return value


OutputPlace = Annotated[Path | str, PlainValidator(_output_place), WithJsonSchema({"type": "string"})]
"""In a config: a directory, made absolute, or `s3://BUCKET/PREFIX`."""
EndpointUrl = Annotated[str | None, AfterValidator(_without_keys)]
"""In a config: of a store, with no secret in it."""


class Section(BaseModel):
    """Base of the config's sections: unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        model_title_generator=lambda kind: kind.__name__.removesuffix("Config"),  # over it in Prefect's form
    )


class DatasetConfig(Section):
    """What to extract from: a file of tokenized samples."""

    path: AbsolutePath = Field(
        description="File of samples, its kind by its name: .jsonl, .jsonl.gz or .jsonl.zst with one sample a line, or "
        ".parquet with one a row. A sample: input_ids (token ids), optional loss_mask (0/1, same length; in Parquet "
        "booleans, too), optional id.",
        examples=["/data/datasets/kimi-k2.5-tokenized.jsonl"],
    )
    max_seq_len: int = Field(
        gt=0, description="Longest sample in tokens. Longer ones meet on_too_long.", examples=[8192]
    )
    on_too_long: Literal["fail", "truncate", "skip"] = Field(
        default="fail",
        description="A sample longer than max_seq_len: fail before anything starts, cut it to max_seq_len, or leave it "
        "out. Cut and left-out samples are counted and listed in the ledger.",
    )
    on_invalid: Literal["fail", "skip"] = Field(
        default="fail",
        description="A row that is no valid sample (bad JSON, no or empty input_ids, an id outside the vocabulary, a "
        "loss_mask of another length): fail before anything starts, or leave it out, counted, with its reason.",
    )


class ModelConfig(Section):
    """The model whose hidden states are wanted."""

    path: AbsolutePath = Field(
        description="Folder of a Hugging Face checkpoint: config.json and safetensors files.",
        examples=["/data/models/Kimi-K2.5"],
    )


class CaptureConfig(Section):
    """Which hidden states are stored."""

    layers: list[int] | Literal["eagle3"] = Field(
        default="eagle3",
        description="Decoder layers whose output is stored, 0-based: layer k is hidden_states[k + 1] of Hugging Face "
        "Transformers. 'eagle3' means [1, n // 2 - 1, n - 4] for a model of n layers. The final state is always added.",
        examples=["eagle3", [1, 29, 57]],
    )
    layer_convention: Literal["output", "layer_input", "vllm"] = Field(
        default="output",
        description="What the numbers in `layers` mean, if they come from elsewhere: 'output' of decoder layer k; "
        "'layer_input', what decoder layer k is given, so the output of layer k - 1 (as SGLang's loops count); 'vllm', "
        "the same, where n, for a model of n layers, is the final state before the norm (needs final_norm 'pre'). "
        "They are translated to 'output', which is all that is stored.",
    )
    final_norm: Literal["post", "pre"] = Field(
        default="post",
        description="The final state after ('post': SpecForge, TorchSpec, ModelOpt) or before ('pre': speculators) the "
        "model's last norm.",
    )


class ServerConfig(Section):
    """The SGLang server: started and ended by the extraction (managed), or one that runs already (attached)."""

    mode: Literal["managed", "attached"] = Field(
        default="managed", description="Start a server for this run, or use the one at `url`."
    )
    interpreter: str | None = Field(
        default=None,
        description="managed: the Python that has SGLang installed. Default: the one that runs this command.",
        examples=["/data/envs/sglang/bin/python"],
    )
    host: str = Field(default="127.0.0.1", description="managed: the address to listen on. Loopback unless changed.")
    port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="managed: the port to listen on; a second server takes the next one. 0 takes free ones.",
    )
    count: int = Field(
        default=1,
        ge=1,
        description="managed: servers to start on this machine, each with tensor_parallel GPUs of its own. Rows go to "
        "whichever is free.",
    )
    url: str | list[str] | None = Field(
        default=None,
        description="attached: base URL of the running server, or a list of several. Each must have been started with "
        "the capture plugin and with a staging folder of its own: `python -m flows server-command CONFIG.yaml` prints "
        "the commands.",
        examples=["http://127.0.0.1:30000"],
    )
    device: Literal["cuda", "cpu"] = Field(
        default="cuda", description="managed: 'cpu' serves small models without a GPU, through the CPU stand-ins."
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="The dtype the model runs in, and in which its states are stored."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="managed: GPUs that share the model (SGLang's --tp).")
    chunked_prefill_size: int = Field(
        default=8192, ge=16, description="managed: most prompt tokens in one forward pass (longer prompts are split)."
    )
    arguments: list[str] = Field(
        default_factory=list,
        description="managed: further arguments for sglang.launch_server, as in a shell.",
        examples=[["--trust-remote-code", "--mem-fraction-static", "0.85"]],
    )
    start_timeout: float = Field(
        default=1800,
        gt=0,
        description="Seconds until a started server must answer. A 1T model loads for minutes. attached: seconds to "
        "wait for a lost server to come back.",
    )
    max_restarts: int = Field(
        default=10, ge=0, description="Restarts of a dead or stuck server within restart_window before the run stops."
    )
    restart_window: float = Field(default=3600, gt=0, description="Seconds over which restarts are counted.")

    @model_validator(mode="after")
    def _check_urls(self) -> "ServerConfig":
        if self.mode == "attached" and not self.urls:
            raise ValueError("server.mode is 'attached', so server.url must be set")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("server.url names a server twice")
        return self

    @property
    def urls(self) -> list[str]:
        """attached: base URLs, without a slash at the end."""
        urls = [self.url] if isinstance(self.url, str) else self.url or []
        return [url.rstrip("/") for url in urls]

    @property
    def servers(self) -> int:
        """How many there are."""
        return self.count if self.mode == "managed" else len(self.urls)


class StagingConfig(Section):
    """Where the server leaves its dumps until they are stored."""

    path: AbsolutePath = Field(
        default=Path("/dev/shm/drillcore"),
        description="Directory on the server's host, best in shared memory. A managed server gets a folder of its own "
        "inside; so do attached ones where there are several: attached-0, attached-1 and so on, in the order of "
        "server.url.",
    )
    max_bytes: int = Field(
        default=16 * GIB, gt=0, description="Most bytes of dumps at any time, in all. Limits how much is in flight."
    )
    pinned_bytes: int = Field(
        default=4 * GIB,
        ge=64 << 20,
        description="Most bytes of page-locked host memory in which each server process keeps states on their way from "
        "the GPU. Four forward passes' worth is taken, at most this.",
    )


class OutputConfig(Section):
    """Where the hidden states are stored."""

    path: OutputPlace = Field(
        description="Directory of the store, or s3://BUCKET/PREFIX (see the section s3). The same config and place "
        "resume a run.",
        examples=["/data/hidden-states/kimi-k2.5", "s3://my-bucket/hidden-states/kimi-k2.5"],
    )
    shard_bytes: int = Field(
        default=2 * GIB,
        gt=0,
        description="Size of a shard in bytes, at most (one sample may be larger). Grows where needed so that a run "
        "has at most 2,000 shards.",
    )


class S3Config(Section):
    """How a bucket is reached, where output.path is one. Keys come from boto3's standard chain, never from here."""

    endpoint_url: EndpointUrl = Field(
        default=None,
        description="URL of a store that is not AWS (MinIO, Ceph, ...). Default: AWS_ENDPOINT_URL_S3, or AWS.",
        examples=["http://minio:9000"],
    )
    region: str | None = Field(default=None, description="Region. Default: as boto3 finds it, or us-east-1.")
    profile: str | None = Field(default=None, description="Profile of ~/.aws. Default: AWS_PROFILE.")
    credentials_block: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9][a-z0-9-]*$",
        description="Name of a Prefect block of the type AWS Credentials that has the keys, instead of boto3's chain.",
    )
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="Bucket in the URL's path or in the host's name. auto: path, with an endpoint_url."
    )
    checksum: Literal["crc32", "sha256", "md5"] = Field(
        default="crc32",
        description="With what the store checks what it is sent. md5 is for stores that do not know the newer checksum "
        "headers; sha256 also where the network is neither encrypted nor trusted.",
    )
    spool: AbsolutePath | None = Field(
        default=None,
        description="Local directory where shards are written before they are uploaded. Default: in the state folder.",
    )
    spool_bytes: int = Field(
        default=32 * GIB,
        gt=0,
        description="Most bytes of shards there at any time. Batches wait, and the server with them, while it is full.",
    )
    part_bytes: int = Field(
        default=16 << 20,
        ge=5 << 20,
        le=5 * GIB,
        description="Size of the parts of an upload. Grows where a shard would have more than 10,000.",
    )
    uploads: int = Field(default=16, ge=1, le=128, description="Parts that are sent at a time, of all shards.")


class ExtractionConfig(Section):
    """How hard the server is worked."""

    tokens_in_flight: int = Field(
        default=131_072, gt=0, description="Most prompt tokens at a server at any time, over all requests."
    )
    requests_in_flight: int = Field(default=128, gt=0, description="Most requests at a server at any time.")
    slowest_tokens_per_second: float = Field(
        default=200,
        gt=0,
        description="The slowest server to put up with: a prefill whose answer takes longer than all tokens in flight "
        "need at this rate, and two minutes more, is tried again.",
    )
    attempts: int = Field(default=4, ge=1, description="Tries of one prefill that fails in a way that may pass.")
    max_failed_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of rows that may fail in the end before the run counts as failed. Not one row done is a "
        "failure always.",
    )
    stop_failed_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of rows that may fail, if max_failed_share is not higher, before the run is stopped early, "
        "so that nobody waits for what has failed already. Never before max_failures_in_a_row rows failed.",
    )
    max_failures_in_a_row: int = Field(
        default=50,
        ge=1,
        description="Rows that may fail one after the other, none succeeding in between, before the run is stopped: "
        "it is not the rows then.",
    )


class VerifyConfig(Section):
    """What is checked after the extraction."""

    reextract_share: float = Field(
        default=0.001, ge=0, le=1, description="Share of rows that are extracted a second time and compared."
    )
    reextract_rows: int = Field(default=8, ge=0, description="Rows that are extracted a second time, at least.")
    argmax_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of rows whose states must favour the row's own tokens over permutations of them, by the "
        "model's embedding and lm_head. Needs no server.",
    )
    argmax_rows: int = Field(default=64, ge=0, description="Rows of which that is proved, at least.")


class LineageConfig(Section):
    """Where MLflow keeps the record of what came from what."""

    tracking_uri: str | None = Field(
        default=None,
        description="MLflow tracking URI. Default: MLFLOW_TRACKING_URI, or a database in the state folder.",
        examples=["http://mlflow:5000"],
    )
    experiment: str = Field(default="drillcore", description="MLflow experiment of the extraction runs.")


class ExtractConfig(Section):
    """One extraction: dataset + model + capture -> output."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the extraction, for people: in Prefect, MLflow.",
        examples=["kimi-k2.5"],
    )
    dataset: DatasetConfig
    model: ModelConfig
    capture: CaptureConfig = CaptureConfig()
    server: ServerConfig = ServerConfig()
    staging: StagingConfig = StagingConfig()
    output: OutputConfig
    s3: S3Config = S3Config()
    extraction: ExtractionConfig = ExtractionConfig()
    verify: VerifyConfig = VerifyConfig()
    lineage: LineageConfig = LineageConfig()


def load_config(path: Path, overrides: list[str] | None = None) -> ExtractConfig:
    """Read a YAML config; `overrides` are `section.field=value` strings that win over the file.

    `$NAME` and `${NAME}` in strings are replaced from the environment; relative paths count from the working directory.
    Raises ConfigError that names the field.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"The config {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The config {path} is not UTF-8: {error}.") from error
    try:
        values = yaml.safe_load(os.path.expandvars(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"The config {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"The config {path} is empty or not a mapping; deployments/configs/ has examples.")
    for override in overrides or []:
        _apply_override(values, override)
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], source: str) -> ExtractConfig:
    """Validate plain values; raises ConfigError with one line for each wrong field."""
    try:
        return ExtractConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(f"The config {source} has {len(lines)} wrong field(s):\n" + "\n".join(lines)) from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    *sections, field = key.split(".")
    if not equals or not field:
        raise ConfigError(f"--set {override!r} is not of the form section.field=value.")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value in the config, not a section.")
    try:
        values[field] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from error


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    message = f"  {'.'.join(location)}: {problem['msg']}"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        message = f"  {'.'.join(location)}: unknown field" + (
            f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}."
        )
    elif problem["type"] != "missing" and location[-1] != "endpoint_url":  # it may have a password in it
        message += f" (given: {problem['input']!r})"
    return message


def _fields_at(location: list[str]) -> list[str]:
    model: Any = ExtractConfig
    for part in location:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def describe_config() -> str:
    """All fields with type, default and description, as text."""
    lines: list[str] = []
    for name, section in ExtractConfig.model_fields.items():
        kind = section.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            lines.append(f"{name}\n    {section.description}")
            continue
        lines.append(f"{name}: {(kind.__doc__ or '').strip()}")
        for field, info in kind.model_fields.items():
            default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)}"
            lines.append(f"  {field} ({default})\n    {info.description}")
    return "\n".join(lines)
