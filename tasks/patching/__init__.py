"""The capture plugin's life cycle: which SGLang it fits, how it gets into a server, and out again.

A managed server is given the plugin's folder through PYTHONPATH; nothing installed is touched. Into somebody else's
environment it can be installed, and removed again without a trace (`environment`). Before either, the functions that
the plugin depends on are read from SGLang's source, without importing it, and compared with `patches/manifest.json`, or
with what a probe has proved on this machine (`proofs`).
"""

from tasks.patching.installation import Installation, check_signatures, find_installation
from tasks.patching.manifest import supported_versions
from tasks.patching.plugin import capture_settings, plugin_version, server_paths

__all__ = [
    "Installation",
    "capture_settings",
    "check_signatures",
    "find_installation",
    "plugin_version",
    "server_paths",
    "supported_versions",
]
