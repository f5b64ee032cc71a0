"""A copy of the capture plugin that is wrong in one of many ways at a time, as a file says: is it noticed?

The copy is made by replacing lines of the plugin's source, each of which must be there exactly once, and by functions
added to it. The file is read in every forward pass, so one server serves all mutants, one after the other.
"""

import json
import shutil
from pathlib import Path

from tasks.patching.plugin import CAPTURE, plugin_modules

EDITS = {
    "        decoder.layers_to_capture = [layer + 1 for layer in self.layers]\n": """\
        decoder.register_forward_pre_hook(lambda *_: choose_layers(decoder, self.layers))
""",
    '        if self.final_norm == "pre":\n': "        if True:\n",
    '                last = hidden_states if self.final_norm == "post" else before_norm\n': """\
                self.final_norm = active()["final_norm"]
                post = (self.final_norm == "post") != (active()["mutant"] == "other norm")
                last = hidden_states if post else before_norm
""",
    "            snapshot = self.writers.snapshot(*check_states(input_ids, last, aux, len(self.layers), end))\n": """\
            states = check_states(input_ids, last, aux, len(self.layers), end)
            snapshot = self.writers.snapshot(*spoil_states(ours, len(self.layers), *states))
""",
    "            write_at(self.file, self.room + start + first * part.shape[1], part[rows])\n": """\
            data = spoil_bytes(self, first, self.offsets.index(start), part[rows])
            write_at(self.file, self.room + start + first * part.shape[1], data)
""",
    "            os.replace(self.temporary, self.path)\n": """\
            spoil_file(self)
            os.replace(self.temporary, self.path)
""",
}
ADDED = '''

LATE = {late}  # tokens of the prompts that are spoiled after the probe


def active():
    return json.loads(Path({switch!r}).read_text())


def choose_layers(decoder, layers):
    shift = {{"layers +1": 1, "layers -1": -1}}.get(active()["mutant"], 0)
    decoder.layers_to_capture = [layer + 1 + shift for layer in layers]


def spoil_states(ours, count, aux, last, ids):
    """aux [rows, count * hidden], last [rows, hidden], ids [rows] of one pass, before anything is measured of them."""
    mutant = active()["mutant"]
    aux, last, ids = aux.clone(), last.clone(), ids.clone()
    layers = aux.unflatten(-1, (count, -1))  # a view
    places = {{}}
    for *_, rows in ours:
        places.setdefault(rows.stop - rows.start, []).append(rows)
    one, other = next((same[:2] for same in places.values() if len(same) > 1), (slice(0), slice(0)))
    if mutant == "layers in another order":
        aux = layers.flip(1).flatten(1)
    elif mutant in ("rows +1", "rows -1"):
        by = int(mutant.removeprefix("rows "))
        aux, last = aux.roll(by, 0), last.roll(by, 0)
    elif mutant == "rows of one layer +1":
        layers[:, 0] = layers[:, 0].roll(1, 0)
    elif mutant == "requests swapped":
        for state in (aux, last):
            state[one], state[other] = state[other].clone(), state[one].clone()
    elif mutant == "ids of a neighbour":
        ids[one], ids[other] = ids[other].clone(), ids[one].clone()
    elif mutant == "one layer zero":
        layers[:, 0] = 0
    elif mutant == "NaN in one row":
        layers[-1, -1, 7] = float("nan")
    elif mutant == "fp8":
        scale = aux.abs().amax(-1, keepdim=True).float() / 400
        aux = ((aux.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(aux.dtype)
    return aux, last, ids


def spoil_bytes(dump, first, tensor, data):
    """Bytes [rows, width] of one chunk of a dump's tensor on their way to the file, after they were measured."""
    mutant, rows = active()["mutant"], len(data)
    if tensor == 2:  # the ids
        return data
    if mutant == "last chunk missing" and first > 0 and first + rows == dump.tokens:
        return b""
    if mutant.startswith("late ") and dump.tokens == LATE:
        data, width = bytearray(data), data.shape[1]
        if mutant == "late NaN" and tensor == 0:
            item = dump.dtype.itemsize
            data[5 * width : 5 * width + item] = b"\\xc0\\x7f".rjust(item, b"\\0")
        elif mutant == "late zero row" and tensor == 1:
            data[5 * width : 6 * width] = bytes(width)
        elif mutant == "late rows +1":
            data = data[-width:] + data[:-width]
    return data


def spoil_file(dump):
    """A finished dump, before it gets its name."""
    mutant = active()["mutant"]
    _, _, row, _, tokens = dump.rid.split("-")
    kept = dump.path.with_name(f"kept-{{row}}-{{tokens}}")
    if mutant == "keep":
        kept.write_bytes(dump.temporary.read_bytes())
    elif mutant == "stale" and kept.exists():
        dump.temporary.write_bytes(kept.read_bytes())
'''


def make_mutable(folder: Path, switch: Path, late: int) -> Path:
    """Copy the plugin into `folder` so that the file `switch` decides what is wrong with it; returns the copy's folder.

    late: tokens of the prompts that the mutants called "late ..." spoil.
    """
    copy = folder / "capture"
    shutil.copytree(CAPTURE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (module,) = plugin_modules()
    source = module.read_text()
    for line, replacement in EDITS.items():
        assert source.count(line) == 1, f"the plugin has no longer exactly one line {line!r}"
        source = source.replace(line, replacement)
    (copy / module.name).write_text(source + ADDED.format(switch=str(switch), late=late))
    choose(switch, "none")
    return copy


def choose(switch: Path, mutant: str, final_norm: str = "post") -> None:
    """From the next forward pass on the plugin is wrong in this way, and says that it captures this final state."""
    temporary = switch.with_suffix(".part")
    temporary.write_text(json.dumps({"mutant": mutant, "final_norm": final_norm}))
    temporary.replace(switch)
