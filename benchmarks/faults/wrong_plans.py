"""Wrong plans, as a pass with a bug would emit them; each is written and exported by the real interpreters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.faults.planted import Planted
from benchmarks.faults.subjects import EVIDENCE, LONGEST, VOCABULARY, Subject
from collapse.analysis.layers import drop_layers, edited_config
from collapse.analysis.tables import position_tables, token_tables
from collapse.plan import Axis, DropLayers, Erase, IndexSet, Narrow, Specialise
from collapse.trace import meta_model

Make = Callable[[Subject, random.Random], Iterator[Planted]]


def specialise(site: str, **config: Any) -> Specialise:
    """Return a config switch of a made-up pass."""
    return Specialise(**{"pass": "planted"}, site=site, evidence=EVIDENCE, config=config)


def erase(site: str, *tensors: str, **config: Any) -> Erase:
    """Return an erasure of a made-up pass."""
    return Erase(**{"pass": "planted"}, site=site, evidence=EVIDENCE, tensors=tensors, config=config)


def layers_without(subject: Subject, *dropped: int) -> DropLayers:
    """Return the rewrite that drops numbered layers, with the right config edits."""
    kept = sorted(set(range(subject.layers.size)) - set(dropped))
    found = drop_layers(subject.layers, kept, subject.checkpoint, subject.config, EVIDENCE, "planted")
    if not isinstance(found, DropLayers):
        raise LookupError(found.reason)
    return found


def vocabulary(subject: Subject, kept: tuple[int, ...], **config: Any) -> Narrow:
    """Return the narrowing of all token tables to `kept`."""
    tables = {alias for name in token_tables(subject.program) for alias in subject.program.aliases(name)}
    names = [name for name in subject.checkpoint.tensors if subject.program.model_name(name) in tables]
    return Narrow(
        **{"pass": "planted"}, site="vocabulary", evidence=EVIDENCE, size=VOCABULARY, kept=IndexSet.of(kept),
        relabels="tokens", axes=tuple(Axis(tensor=name, dim=0) for name in names),
        config={"vocab_size": len(kept)} | config,
    )  # fmt: skip


def live_layer(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A live layer is declared dead; its neighbours are renumbered as they should be."""
    for number in range(subject.layers.size):
        yield Planted(subject, subject.plan(layers_without(subject, number)), subject.layers.site)


def live_row(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A token of the input domain loses its rows."""
    for gone in draw.sample(range(5, VOCABULARY), 2):
        kept = tuple(token for token in range(VOCABULARY) if token != gone)
        yield Planted(subject, subject.plan(vocabulary(subject, kept)), "vocabulary")


def wrong_constant(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A number of the config is folded to another value."""
    values = subject.config.to_dict()
    fields = [name for name, value in values.items() if isinstance(value, float) and "drop" not in name]
    fields = [name for name in fields if not name.startswith(("initializer", "router_", "layerdrop"))]
    for field in draw.sample(fields, min(2, len(fields))):
        yield Planted(subject, subject.plan(specialise(field, **{field: values[field] * 1.5 + 0.01})), field)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        changed = rope | {"rope_theta": rope["rope_theta"] / 3}
        yield Planted(subject, subject.plan(specialise("rope_parameters", rope_parameters=changed)), "rope_parameters")


def stale_id(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The end-of-sequence token keeps its old number though the rows before it went."""
    kept = tuple(token for token in range(VOCABULARY) if token not in {0, 1})
    stale = vocabulary(subject, kept, eos_token_id=4)
    yield Planted(subject, subject.plan(stale, kept=kept), "eos_token_id", seen=False)


def dropped_bias(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Biases are erased, and the config says natively that there are none."""
    values = subject.config.to_dict()
    for field in (name for name, value in values.items() if "bias" in name and value is True):
        without = set(meta_model(edited_config(subject.config, {field: False})).state_dict())
        names = [n for n in subject.checkpoint.tensors if (subject.program.model_name(n) or n) not in without]
        if names:
            yield Planted(subject, subject.plan(erase(field, *names, **{field: False})), field)


def wrong_tie(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The head goes since its name is dead, and the config ties it to an embedding of other values."""
    head = [name for name in subject.checkpoint.tensors if name in {"lm_head.weight", "embed_out.weight"}]
    if head and not subject.config.tie_word_embeddings:
        yield Planted(subject, subject.plan(erase(head[0], *head, tie_word_embeddings=True)), head[0])


def shifted_layer_types(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The kinds of attention are handed to the wrong layers."""
    types = getattr(subject.config, "layer_types", None)
    if types is None or len(set(types)) == 1:
        return
    yield Planted(subject, subject.plan(specialise("layer_types", layer_types=[*types[1:], types[0]])), "layer_types")
    for number in range(subject.layers.size):
        right = layers_without(subject, number)
        rolled = [*right.config["layer_types"][1:], right.config["layer_types"][0]]
        if rolled != right.config["layer_types"]:
            wrong = right.model_copy(update={"config": {**right.config, "layer_types": rolled}})
            yield Planted(subject, subject.plan(wrong), subject.layers.site)


def wrong_window(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The window of sliding attention is another one."""
    window = subject.checkpoint.config.get("sliding_window")
    if isinstance(window, int):
        for other in (window + 1, window - 1, LONGEST):
            yield Planted(subject, subject.plan(specialise("sliding_window", sliding_window=other)), "sliding_window")


def short_positions(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The table of positions ends before the longest request."""
    for table, rows in position_names(subject):
        count = LONGEST - draw.randint(1, 8)
        yield Planted(subject, subject.plan(positions(subject, table, rows, count)), "takes")


def position_names(subject: Subject) -> Iterator[tuple[str, int]]:
    """Yield the files' name and the rows of each learned position table."""
    for table in position_tables(subject.program):
        name = next(name for name in subject.checkpoint.tensors if subject.program.model_name(name) == table)
        yield name, subject.program.shapes[table][0]


def positions(subject: Subject, table: str, rows: int, count: int) -> Narrow:
    """Return the narrowing of a position table to `count` positions; what it has beyond the context stays."""
    field = "n_positions" if hasattr(subject.config, "n_positions") else "max_position_embeddings"
    offset = rows - int(getattr(subject.config, field))
    return Narrow(
        **{"pass": "planted"}, site=table, evidence=EVIDENCE, size=rows, kept=IndexSet.of(range(count + offset)),
        relabels="positions", axes=(Axis(tensor=table, dim=0),), config={field: count},
    )  # fmt: skip


WRONG_PLANS: dict[str, Make] = {
    "live layer": live_layer,
    "live row": live_row,
    "wrong constant": wrong_constant,
    "stale id": stale_id,
    "dropped bias": dropped_bias,
    "wrong tie": wrong_tie,
    "shifted layer types": shifted_layer_types,
    "wrong window": wrong_window,
    "short positions": short_positions,
}
