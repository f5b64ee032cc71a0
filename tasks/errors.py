"""Every error that drillcore raises on purpose: one base, narrow classes.

A message says what happened, to what, and what to do. The command line prints it without a traceback and leaves with
the class's `exit_code`: 2 for something the user gave (a config, a dataset, an environment), 1 for a run that failed.
"""


class DrillcoreError(Exception):
    """Base of all errors of this project."""

    exit_code = 1


class InputError(DrillcoreError):
    """What the user gave cannot be used; nothing was started."""

    exit_code = 2


class ConfigError(InputError):
    """The config file is missing, is not YAML, or has an unknown or wrong field."""


class DatasetError(InputError):
    """The dataset is missing or empty, or has rows that the policy `fail` does not let pass."""


class ModelError(InputError):
    """The checkpoint is missing or its config lacks what extraction needs."""


class NoReferenceError(DrillcoreError):
    """The checkpoint is of a kind whose layers are not computed here, so nothing can be compared with them."""


class SpaceError(InputError):
    """The output or the staging directory has no room for what is planned."""


class SetupError(InputError):
    """The machine cannot serve: the interpreter, its SGLang, the port or the plugin's manifest is wrong."""


class OutputError(InputError):
    """The output belongs to another extraction or to another writer, or may not be written."""


class WriterAliveError(OutputError):
    """Another writer holds the output, or a partition of it, and it lives. `lock`: the name of its lock's file."""

    def __init__(self, text: str, lock: str = ""):
        super().__init__(text)
        self.lock = lock


class StoreError(DrillcoreError):
    """What the store holds is damaged or contradicts its own records, or the dataset changed under it."""


class WriteError(DrillcoreError):
    """The output could not be written: it is full, or the file system failed. What was committed stays."""


class RemoteError(DrillcoreError, OSError):
    """A bucket could not be reached, or refused what was asked of it. `code`: the store's own word, or ''."""

    def __init__(self, text: str, code: str = ""):
        super().__init__(text)
        self.strerror, self.code = text, code  # the first is where an OSError says why


class LostLockError(DrillcoreError):
    """Another writer has taken over the store while this run was writing."""


class ServerError(DrillcoreError):
    """The SGLang server did not start, died, or is set up in a way that would spoil the data."""


class ServerGoneError(ServerError):
    """A server was lost and cannot be had back. Where there are others, they go on without it."""


class TransientPrefillError(DrillcoreError):
    """A prefill failed in a way that may pass: a connection, a timeout, HTTP 5xx, a dump that is damaged
    or that the plugin could not write. Worth a retry."""


class ServerLostError(DrillcoreError):
    """The server died, or was found stuck and restarted, while a prefill was under way."""


class RowError(DrillcoreError):
    """One row cannot be extracted, however often it is tried (HTTP 400, or the server dies of it)."""


class ProbeError(DrillcoreError):
    """The test dumps are not what the config asks for: nothing was extracted."""


class ExtractionError(DrillcoreError):
    """Rows are missing at the end of the extraction, or so many failed that it was stopped."""


class FleetError(ExtractionError):
    """A partition, or the verification of the whole, came to no end on any node: the output is not complete."""


class VerificationError(DrillcoreError):
    """The stored data did not pass: it is not complete or not right."""


class LineageError(DrillcoreError):
    """MLflow could not be reached or refused the record. The data is not touched by it."""


class StoppedError(DrillcoreError):
    """Somebody ended the run from outside. What was committed stays."""
