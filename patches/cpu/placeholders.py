"""Import-only stand-ins for the GPU packages that SGLang imports on every device.

SGLang's CPU engine imports `triton`, `torchvision` and `sgl_kernel` at module level but calls none of
their kernels for text models. Each stand-in package replaces itself by a `Placeholder` module: any
attribute exists, decorators return what they decorate, and using a kernel raises an error that names it.
Promise: nothing here computes a value, so nothing here can make a hidden state wrong silently.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types


class MissingKernelError(NotImplementedError):
    """Code that needs a GPU package was called on a machine that has only its stand-in."""


class Kernel:
    """What a stand-in decorator makes of a GPU function: importable, indexable by a grid, never callable."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise MissingKernelError(f"GPU kernel {self.__name__} was called, but this server has only CPU stand-ins")


class Anything:
    """A tolerant module attribute: can be read, called, indexed, subclassed, used as a type or a decorator."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Anything(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]
        return Anything(f"{self._name}()")

    def __getitem__(self, item):
        return self

    def __iter__(self):
        return iter(())

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (object,)


class Placeholder(types.ModuleType):
    """A module whose every attribute exists: classes for CamelCase names, `Anything` for the rest."""

    __path__: list[str] = []

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        name = f"{self.__name__}.{attribute}"
        if attribute[:1].isupper():
            value = type(attribute, (), {"__module__": self.__name__, "__init__": _refuse(name)})
        else:
            value = Anything(name)
        setattr(self, attribute, value)
        return value


def _refuse(name):
    def __init__(self, *args, **kwargs):
        raise MissingKernelError(f"{name} was used, but this server has only CPU stand-ins")

    return __init__


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every `import package.anything` below a stand-in package succeed."""

    packages: set[str] = set()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages and "." in name:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton.runtime":
            module.driver = _NoDriver()
        if module.__name__ == "torchvision.transforms":
            module.InterpolationMode = InterpolationMode


class _NoDriver:
    """`triton.runtime.driver`: Triton's own words for "no GPU", which its callers already handle."""

    def __getattr__(self, attribute):
        raise RuntimeError("0 active drivers ([]). There should only be one.")


class InterpolationMode(enum.Enum):
    """`torchvision.transforms.InterpolationMode`: Transformers reads its members when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def install(name, version, **attributes):
    """Turn the module `name`, which is being imported, into a placeholder package."""
    module = sys.modules[name]
    module.__class__ = Placeholder
    module.__path__ = []
    module.__version__ = version
    vars(module).update(attributes)
    if not _Submodules.packages:
        sys.meta_path.insert(0, _Submodules())
    _Submodules.packages.add(name)
