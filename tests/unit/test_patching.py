"""Which SGLang an interpreter has, whether the plugin fits it, and who holds a port."""

import os
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.errors import SetupError
from tasks.patching import (
    MANIFEST,
    Installation,
    capture_settings,
    check_signatures,
    find_installation,
    plugin_version,
    server_paths,
    signature_of,
    supported_versions,
)
from tasks.server.ports import check_port, free_port
from tests.unit.helpers import PLUGIN

VERSION = "0.5.23"
TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
SOURCES = {
    "srt/model_executor/model_runner.py": "class ModelRunner:\n    def load_model(self): ...\n",
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
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A made-up sglang package with the signatures of the published one."""
    root = tmp_path / "sglang"
    for name, text in SOURCES.items():
        root.joinpath(name).parent.mkdir(parents=True)
        root.joinpath(name).write_text(text)
    return root


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python"


@pytest.fixture
def install(bare_python: Path) -> Iterator[Path]:
    """The site-packages of that interpreter; emptied afterwards."""
    (site,) = bare_python.parent.parent.glob("lib/python*/site-packages")
    before = set(site.iterdir())
    yield site
    for path in set(site.iterdir()) - before:
        subprocess.run(["rm", "-r", str(path)], check=True)


def pretend_sglang(site: Path, version: str) -> None:
    (site / "sglang").mkdir()
    (site / "sglang/__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (site / f"sglang-{version}.dist-info").mkdir()
    (site / f"sglang-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )


def test_a_signature_is_read_without_its_annotations(root: Path) -> None:
    assert signature_of(root, TARGET) == (
        "self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, "
        "hidden_states_before_norm=None"
    )
    assert signature_of(root, TARGET.replace("LogitsProcessor", "Other")) == "self, x"
    assert signature_of(root, "sglang.srt.plugins.hook_registry.HookRegistry.register") == (
        "cls, target, hook, hook_type=HookType.AFTER, *, source=None"
    )


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.layers.nothing.LogitsProcessor.forward",
        "sglang.srt.layers.logits_processor.Nothing.forward",
        "sglang.srt.layers.logits_processor.LogitsProcessor.nothing",
    ],
)
def test_a_function_that_is_not_there_has_no_signature(root: Path, target: str) -> None:
    assert signature_of(root, target) is None


def test_the_published_signatures_pass(root: Path) -> None:
    check_signatures(Installation("python", VERSION, root))


@pytest.mark.parametrize(
    ("old", "new", "actual"),
    [
        (
            "        input_ids,\n        hidden_states,",
            "        hidden_states,\n        input_ids,",
            "self, hidden_states",
        ),
        ("aux_hidden_states: Optional", "aux: Optional", "self, input_ids"),
        ("    def forward(\n", "    def forward_all(\n", "None"),
    ],
    ids=["order", "name", "gone"],
)
def test_a_changed_signature_is_named(root: Path, old: str, new: str, actual: str) -> None:
    path = root / "srt/layers/logits_processor.py"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SetupError) as refused:
        check_signatures(Installation("python", VERSION, root))
    message = str(refused.value)
    assert f"SGLang {VERSION} in {root} is not the published one: {TARGET} takes ({actual}" in message
    assert "the manifest has (self, input_ids, hidden_states, lm_head, logits_metadata" in message


def test_the_manifest_is_of_the_plugin_that_is_here() -> None:
    assert plugin_version() == PLUGIN.PLUGIN_VERSION
    assert VERSION in supported_versions()


def test_every_hook_of_the_plugin_is_in_the_manifest_of_every_version() -> None:
    for version in supported_versions():
        text = MANIFEST.read_text().split(f'"{version}"')[1].split("}")[0]
        assert PLUGIN.LOAD_MODEL in text
        assert PLUGIN.LOGITS_PROCESSOR in text


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(SetupError, match=r"The interpreter /no/python cannot be run: .*No such file.*\(server\.interp"):
        find_installation("/no/python")


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("text")
    with pytest.raises(SetupError, match=r"cannot be run: .*Permission denied"):
        find_installation(str(tmp_path / "python"))


def test_an_interpreter_that_fails_is_named_with_what_it_says(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'libpython is missing' >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(SetupError, match=r"python failed \(server\.interpreter\): libpython is missing"):
        find_installation(str(script))


def test_an_interpreter_without_sglang_is_named_with_what_to_install(bare_python: Path) -> None:
    with pytest.raises(SetupError, match=rf"The interpreter {bare_python} has no SGLang\. Install one of .*0\.5\.23"):
        find_installation(str(bare_python))


def test_a_version_that_the_plugin_was_not_checked_against_is_refused(bare_python: Path, install: Path) -> None:
    pretend_sglang(install, "0.4.1")
    with pytest.raises(SetupError, match=rf"SGLang 0\.4\.1 of {bare_python} is not supported: .*0\.5\.23"):
        find_installation(str(bare_python))


def test_a_known_version_is_found_without_importing_it(bare_python: Path, install: Path) -> None:
    pretend_sglang(install, VERSION)
    found = find_installation(str(bare_python))
    assert (found.interpreter, found.sglang) == (str(bare_python), VERSION)
    assert found.root == install / "sglang"


@pytest.mark.skipif(find_spec("sglang") is None, reason="this environment has no SGLang")
def test_the_installed_sglang_is_one_that_the_plugin_fits() -> None:
    found = find_installation(None)
    assert found.interpreter == sys.executable
    check_signatures(found)


def test_the_plugin_takes_the_settings_that_the_server_is_given(tmp_path: Path) -> None:
    capture = PLUGIN.Capture(capture_settings(tmp_path / "staging", [1, 4], "post"))
    assert (capture.staging, capture.layers) == (tmp_path / "staging", [1, 4])
    assert capture.staging.is_dir()


def test_the_stand_ins_are_on_the_path_of_a_cpu_server_only() -> None:
    assert [path.name for path in server_paths("cuda")] == ["capture"]
    assert [path.name for path in server_paths("cpu")] == ["capture", "cpu"]
    assert all(path.is_dir() for path in server_paths("cpu"))


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    check_port("127.0.0.1", port, "server.port")
    with socket.create_server(("127.0.0.1", port)):
        assert port >= 1024


def test_two_free_ports_differ_while_one_is_held() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as held:
        assert free_port() != held.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_held_port_is_refused_naming_process_and_field(host: str) -> None:
    program = f"import socket; s = socket.create_server(({host!r}, 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(SetupError) as refused:
            check_port("127.0.0.1", port, "server.port")
        holder.communicate(b"\n")
    message = str(refused.value)
    assert (
        f"Port {port} on 127.0.0.1 cannot be used: process {holder.pid} listens on it ({sys.executable} -c" in message
    )
    assert "End it, or change server.port." in message


def test_a_port_of_this_process_is_refused_too() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        pytest.raises(SetupError, match=f"process {os.getpid()} listens on it"),
    ):
        check_port("127.0.0.1", held.getsockname()[1], "server.port")


def test_an_address_that_this_machine_does_not_have_is_refused_with_the_reason() -> None:
    with pytest.raises(SetupError, match=r"Port 4000 on 192\.0\.2\.1 cannot be used: Cannot assign requested address"):
        check_port("192.0.2.1", 4000, "server.port")
