"""The CPU stand-ins: every import of a GPU package succeeds, every use of a kernel is refused by name."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

CPU = Path(__file__).resolve().parent.parent.parent / "patches" / "cpu"
# Without it every SGLang process would spend seconds on a search for garbage among what it just imported.
RARE_COLLECTION = "import gc; assert gc.get_threshold()[0] == 100_000"

IMPORTS = """
import triton, triton.language as tl, triton.language.extra.anything, torchvision.transforms.v2, sgl_kernel
from triton.runtime import driver
from torchvision.transforms import InterpolationMode

@triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def kernel(x, n: tl.constexpr):
    pass

assert triton.cdiv(7, 2) == 4 and triton.next_power_of_2(5) == 8
assert InterpolationMode("bicubic") is InterpolationMode.BICUBIC
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the stand-ins on its path, as a CPU server has them."""
    environment = os.environ | {"PYTHONPATH": str(CPU)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("program", [IMPORTS, RARE_COLLECTION], ids=["imports", "garbage collection"])
def test_a_server_process_starts_on_the_stand_ins(program: str) -> None:
    done = run(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("kernel[(1,)](None, 3)", "GPU kernel kernel was called"),
        ("sgl_kernel.rmsnorm(None)", "sgl_kernel.rmsnorm was called"),
        ("torchvision.transforms.v2.Resize(3)", "torchvision.transforms.v2.Resize was used"),
    ],
)
def test_using_a_stand_in_is_refused(use: str, named: str) -> None:
    done = run(IMPORTS + use)
    assert done.returncode != 0
    assert "MissingKernelError" in done.stderr
    assert named in done.stderr


@pytest.fixture
def drillcore_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin of a CPU server, imported as the server does."""
    monkeypatch.syspath_prepend(CPU)
    return importlib.import_module("drillcore_cpu")


def test_a_bfloat16_product_is_summed_in_float32_and_rounded_once(drillcore_cpu: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(256, 64, dtype=torch.bfloat16)
    x = torch.randn((5, 256), generator=generator).to(torch.bfloat16)
    product = drillcore_cpu.linear_in_float32(None, None, layer, x, layer.bias)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert product.dtype == torch.bfloat16
    # Half a unit of bfloat16's last place, and a little for float32.
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-5)


def test_other_products_stay_the_server_s_own(drillcore_cpu: Any) -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    answer = drillcore_cpu.linear_in_float32(lambda *arguments: arguments, "method", layer, x)
    assert answer == ("method", layer, x, None)


@pytest.mark.parametrize(
    ("offset_source", "expected"), [(False, [0, 0, 1, 2, 0]), (True, [3, 4, 0, 0, 0])], ids=["gather", "scatter"]
)
def test_rows_are_copied_between_a_rank_s_share_and_the_whole(
    drillcore_cpu: Any, offset_source: bool, expected: list[int]
) -> None:
    target, source = torch.zeros(5, 2), torch.arange(1.0, 6.0).repeat(2, 1).T
    drillcore_cpu.copy_rows(target, source, 0, torch.tensor(2), torch.tensor(2), offset_source)
    assert target[:, 0].tolist() == target[:, 1].tolist() == expected


def test_a_batch_is_padded_without_pinned_memory(drillcore_cpu: Any) -> None:
    counts = drillcore_cpu.without_pinned_memory(lambda: torch.tensor([3, 4], pin_memory=True))
    assert counts.tolist() == [3, 4]
    assert not counts.is_pinned()
