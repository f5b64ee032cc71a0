"""The picture of a lineage: a box for each thing, an arrow for each relation, whatever the names are."""

import re
import xml.etree.ElementTree as ElementTree

from tasks.lineage.graph import as_mermaid, as_svg
from tasks.lineage.lookup import Drafter, Extraction, Lineage
from tasks.lineage.pages import with_block


def extraction(name: str, digests: list[str], source: str = "in") -> Extraction:
    empty = ("status", "verified", "uri", "model_identity", "final_norm", "dtype", "sglang", "prefect")
    return Extraction(
        name=name,
        run_id=f"run-{name}",
        experiment_id="1",
        digest=digests[-1],
        digests=digests,
        input_uri=f"/data/{source}.jsonl",
        input_sha256=source,
        model="/models/m",
        layers="[1, 4]",
        rows=1,
        tokens=1_000,
        bytes=1,
        **dict.fromkeys(empty, ""),
    )


def drafter(name: str, digests: list[str]) -> Drafter:
    words = dict.fromkeys(("experiment_id", "model_id", "uri", "status", "created"), "")
    return Drafter(name, "1", ["best"], f"run-{name}", digests=digests, metrics={"length": 2.5}, **words)


LINEAGE = Lineage(
    [extraction("one", ["old", "new"]), extraction('t"w<o', ["two"]), extraction("three", ["three"], "other")],
    [drafter("a", ["old"]), drafter("b", ["new", "two"]), drafter("c", ["three", "lost"])],
)


def test_edges_follow_the_digests_also_of_an_older_manifest() -> None:
    assert LINEAGE.edges == [(0, 0), (0, 1), (1, 1), (2, 2)]
    assert LINEAGE.unknown == ["lost"]
    assert LINEAGE.as_json()["edges"][0] == ["run-one", "run-a"]


def test_mermaid_has_every_box_and_arrow() -> None:
    text = as_mermaid(LINEAGE)
    boxes = dict(re.findall(r'^    (\w+)\["(.*)"\]$', text, re.MULTILINE))
    arrows = re.findall(r"^    (\w+) --> (\w+)$", text, re.MULTILINE)
    assert len(boxes) == 2 + 3 + 1 + 3  # input files, extractions, one that is not recorded, drafters
    assert len(arrows) == 3 + 4 + 1
    assert {name for arrow in arrows for name in arrow} == set(boxes)
    assert boxes["extraction1"].startswith("t#quot;w&lt;o<br/>m, layers [1, 4]<br/>1 rows, 1,000 tokens")
    assert boxes["drafter0"].startswith("a/1 @best<br/>length 2.5")
    assert ("unknown3", "drafter2") in arrows


def test_svg_is_whole_and_has_the_same() -> None:
    drawn = ElementTree.fromstring(as_svg(LINEAGE))
    kinds = [each.tag.rpartition("}")[2] for each in drawn]
    assert kinds.count("rect") == 1 + 9
    assert kinds.count("path") == 8
    assert 't"w<o' in [each.text for each in drawn]
    assert ElementTree.fromstring(as_svg(Lineage([], []))) is not None


def test_a_note_keeps_what_people_wrote_around_ours() -> None:
    first = with_block("", "ours")
    again = with_block(first, "new")
    assert again == first.replace("ours", "new")
    assert with_block(f"above\n{first}\nbelow", "new") == f"above\n\n{again}\n\nbelow"
    assert with_block("theirs alone", "ours") == f"theirs alone\n\n{first}"
