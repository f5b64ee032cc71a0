"""The typed config of a fleet: which nodes there are, and how patient to be with them."""

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from tasks.config import ExtractConfig, Section, parse_config
from tasks.errors import ConfigError


class PartitionOf(Section):
    """One partition of a fleet's extraction. `extract-fleet` sets it; leave it empty to extract everything."""

    fleet: str = Field(description="Name of the split that the partition is of.")
    number: int = Field(ge=0, description="The partition's number, from 0.")


class NodeConfig(Section):
    """One node: a machine with its own servers, whose Prefect worker polls a work queue of its own."""

    queue: str = Field(min_length=1, description="Work queue of the deployment's work pool that this node polls.")
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="What is otherwise on this node than in the extraction's config: sections with fields, as "
        "{server: {url: ...}, staging: {path: ...}}. Nothing that changes the data: that is refused.",
        examples=[{"server": {"url": ["http://127.0.0.1:30000"]}}],
    )


class FleetConfig(Section):
    """Nodes that share an extraction."""

    nodes: list[NodeConfig] = Field(min_length=1, description="The nodes, in the order in which they are given work.")
    partitions: int | None = Field(
        default=None,
        ge=1,
        description="Partitions, at least. Default: as many as nodes. More of them spread a lost node's work over more "
        "others; each costs a start of the server and a probe.",
    )
    attempts: int = Field(
        default=3, ge=1, description="Runs of one partition that may fail or be lost before the fleet gives it up."
    )
    wait_for_worker: float = Field(
        default=60, ge=0, description="Seconds after which a run that no worker took goes to a node that is free."
    )
    silence: float = Field(
        default=900,
        gt=0,
        description="Seconds without a sign of life after which a run that has not come to its lock yet counts as "
        "lost. Later the lock's heartbeat is the sign: two minutes without it are enough.",
    )
    stuck_after: float = Field(
        default=7200,
        gt=0,
        description="Seconds without a committed batch, or a server's start, after which a living run is cancelled and "
        "its partition given to another node. More than the start of a server and the slowest batch take.",
    )
    deployment: str = Field(
        default="extract/extract-partition",
        pattern=r"^[^/]+/[^/]+$",
        description="Deployment of the flow extract that runs a partition. Only the fleet may start its runs again.",
    )

    @property
    def count(self) -> int:
        """Partitions, at least."""
        return self.partitions or len(self.nodes)


def load_fleet(path: Path | None, queues: list[str], partitions: int | None) -> FleetConfig:
    """A fleet from a YAML file, or of nodes that are only queues. Raises ConfigError that names the field."""
    values: Any = {"nodes": []}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"The fleet's config {path} cannot be read: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"The fleet's config {path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"The fleet's config {path} is empty or not a mapping: it needs `nodes`.")
    values = {**values, "nodes": [*values.get("nodes", []), *({"queue": queue} for queue in queues)]}
    if partitions is not None:
        values["partitions"] = partitions
    try:
        return FleetConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ConfigError("The fleet has wrong fields:\n" + "\n".join(lines)) from error


def node_configs(config: ExtractConfig, fleet: FleetConfig) -> list[ExtractConfig]:
    """The extraction's config as each node gets it. Raises ConfigError naming the node and the field."""
    queues = [node.queue for node in fleet.nodes]
    if len(set(queues)) < len(queues):
        raise ConfigError(f"Two nodes have the same queue (fleet.nodes): {', '.join(queues)}. Give each its own.")
    return [_merged(config, node) for node in fleet.nodes]


def _merged(config: ExtractConfig, node: NodeConfig) -> ExtractConfig:
    values: dict[str, Any] = json.loads(config.model_dump_json())
    for section, fields in node.settings.items():
        if not isinstance(values.get(section), dict):
            raise ConfigError(f"The node {node.queue} sets {section!r}, which is no section of an extraction's config.")
        values[section] |= fields
    return parse_config(values, f"of the node {node.queue}")
