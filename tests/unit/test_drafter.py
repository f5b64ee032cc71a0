"""`make drafter`'s own part: what it asks, and what it makes of the figures."""

import itertools

from deployments.drafter import FORMS, HELD_OUT_FORMS, HELD_OUT_TOPICS, TOPICS, prompts, specforge_table, table


def test_the_held_out_part_shares_no_form_and_no_topic_with_training() -> None:
    asked = prompts()
    assert len(asked) == len({text for _, text in asked}) >= 640
    forms, topics = set(itertools.chain(*FORMS)), set(TOPICS)
    assert not forms & set(HELD_OUT_FORMS)
    assert not topics & set(HELD_OUT_TOPICS)
    training = [text for name, text in asked if name.startswith("train-")]
    held_out = [text for name, text in asked if name.startswith("held-out-")]
    assert [name for name, _ in asked] == sorted((name for name, _ in asked), key=lambda name: name[0] == "h")
    assert (len(training), len(held_out)) == (len(forms) * len(topics), len(HELD_OUT_FORMS) * len(HELD_OUT_TOPICS))
    assert not [text for text in training for topic in HELD_OUT_TOPICS if f" {topic}" in text]
    assert not [text for text in held_out for topic in TOPICS if f" {topic}" in text]


def test_the_table_compares_on_the_same_rows() -> None:
    """A drafter that has one more hit in each row than the table is better by exactly that, without any doubt."""
    rows = [[10, hits + 1, hits] for hits in (2, 5, 8, 3)]
    text = table({"right": {"rows": rows}, "zero": {"rows": [[10, 1, hits] for hits in (2, 5, 8, 3)]}})
    bigram, zero, ours, *_ = text.splitlines()[1:]
    share, low, _, high, *more = bigram.split()[6:]
    assert share == "0.450"
    assert 0.2 <= float(low) < 0.4 < 0.5 < float(high) <= 0.8
    assert more == ["0.100", "0.100", "to", "0.100"]
    assert zero.split()[4] == "0.100"
    assert ours.split()[3] == "0.550"
    assert text.endswith("40 positions of 4 held-out answers, at each the target's greedy token")


def test_specforges_losses_are_those_of_the_held_out_rows() -> None:
    logged = [[10, {"loss": 9.0}], [70, {"eval/avg_loss": 2.5, "eval/avg_acc": 0.25}]]
    logged += [[140, {"eval/avg_loss": 2.0, "eval/avg_acc": 0.5}]]
    lines = specforge_table({"stored": {"logged": logged}}).splitlines()
    assert lines[1].split()[-4:] == ["2.500", "2.000", "0.250", "0.500"]
