"""How busy this machine is: processor, memory, and the GPUs where there are any."""

import shutil
import subprocess

import psutil

GPU_FIGURES = {
    "utilization.gpu": "utilization_percentage",
    "memory.used": "memory_usage_mebibytes",
    "power.draw": "power_usage_watts",
}
GPU_TIMEOUT = 10.0  # seconds


def machine_figures() -> dict[str, float]:
    """The figures of this moment, by MLflow's names for them where it has some; processor: since the last call."""
    memory = psutil.virtual_memory()
    figures = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_percentage": memory.percent,
        "system_memory_usage_megabytes": round(memory.used / 1e6, 1),
    }
    return figures | _gpu_figures()


def _gpu_figures() -> dict[str, float]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    arguments = [f"--query-gpu=index,{','.join(GPU_FIGURES)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=GPU_TIMEOUT).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_gpu_figures(output)


def parse_gpu_figures(output: str) -> dict[str, float]:
    """nvidia-smi's lines of index and GPU_FIGURES; a figure that a GPU does not have is left out."""
    figures = {}
    for line in output.splitlines():
        index, *values = (value.strip() for value in line.split(","))
        for name, value in zip(GPU_FIGURES.values(), values, strict=False):
            try:
                figures[f"gpu_{index}_{name}"] = float(value)
            except ValueError:
                continue
    return figures
