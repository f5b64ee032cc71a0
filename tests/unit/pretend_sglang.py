"""Environments with a pretend SGLang: the functions that the plugin depends on, and nothing that could be imported."""

import hashlib
import json
import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from tasks.patching.fingerprint import fingerprints
from tasks.patching.manifest import Manifest

VERSION = "0.5.23"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
REGISTER = "sglang.srt.plugins.hook_registry.HookRegistry.register"
LLAMA = "sglang.srt.models.llama.LlamaModel.forward"
QWEN3 = "sglang.srt.models.qwen3.Qwen3Model.forward"
SOURCES = {
    "srt/layers/logits_processor.py": """
class Other:
    def forward(self, x): ...

class LogitsProcessor(Other):
    def __init__(self): ...

    @staticmethod
    def helper(a): ...

    def forward(
        self,
        input_ids,
        hidden_states,
        lm_head: "VocabParallelEmbedding",
        logits_metadata: Union[LogitsMetadata, ForwardBatch],
        aux_hidden_states: Optional[List[torch.Tensor]] = None,
        hidden_states_before_norm: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        return None
""",
    "srt/plugins/hook_registry.py": """
class HookRegistry:
    @classmethod
    def register(cls, target: str, hook, hook_type: HookType = HookType.AFTER, *, source: str | None = None): ...
""",
    "srt/models/llama.py": """
class LlamaModel:
    @torch.no_grad()
    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = layer(hidden_states)  # one after the other
        return hidden_states

    def other(self): ...
""",
    "srt/models/qwen3.py": """
class Qwen3Model(Qwen2Model):
    pass
""",
}


def write_sglang(site: Path, version: str = VERSION) -> Path:
    """Put the pretend package into a site folder; returns the package's folder."""
    root = site / "sglang"
    for name, text in SOURCES.items():
        root.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        root.joinpath(name).write_text(text)
    (root / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (site / f"sglang-{version}.dist-info").mkdir()
    (site / f"sglang-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )
    return root


def edit(root: Path, name: str, old: str, new: str) -> None:
    """Replace the one `old` in a source file."""
    path = root / name
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def write_manifest(path: Path, folder: Path, versions: tuple[str, ...] = (VERSION,)) -> None:
    """A manifest that lists the unedited pretend SGLang, which is written below `folder`, as each of `versions`."""
    signatures, sources = [LOGITS, REGISTER], [LLAMA, QWEN3]
    line = fingerprints(write_sglang(folder), Manifest(signatures, sources, {}))
    sglang = {version: list(line.values()) for version in versions}
    path.write_text(json.dumps({"signatures": signatures, "sources": sources, "sglang": sglang}))


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip."""

    folder: Path
    python: str
    site: Path

    def run(self, program: str, **environment: str) -> str:
        """What a program prints in it, run as its users would: bytecode is written."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [self.python, "-c", program]
        return subprocess.run(
            command, env=inherited | environment, capture_output=True, text=True, check=True
        ).stdout.strip()


def make_environment(folder: Path) -> Environment:
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    return Environment(folder, str(folder / "bin/python"), site)


def listing(folder: Path) -> dict[str, str]:
    """Everything below a folder: path -> SHA-256 of a file, target of a link, or 'folder'."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            value = os.readlink(path)
        else:
            value = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = value
    return found
