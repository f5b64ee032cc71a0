"""Stand-in for SGLang's kernel library on a CPU without AMX (see placeholders.py): SGLang then uses torch."""

import placeholders


def _kernel(name):
    def missing(*args, **kwargs):
        raise placeholders.MissingKernelError(f"sgl_kernel.{name} was called, but this server has only CPU stand-ins")

    missing.__name__ = name
    return missing


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _kernel(name)


__version__ = "0.0.0+cpu"
