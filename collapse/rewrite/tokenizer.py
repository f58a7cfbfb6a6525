"""What keeping some token ids does to the files beside the weights: tokenizer, config and their ids.

New ids are dense and ascend with the old ones, so the cut is a pure function of the kept set: cutting twice
gives the bytes of cutting once to what both keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from collapse.bpe import closure
from collapse.canonical import dumps
from collapse.errors import CheckpointError, PlanError, UnsupportedError
from collapse.plan import IndexSet
from collapse.token_ids import ID_FILES, NAME_FILES, map_ids, names_in
from collapse.tokenizer import DAMAGE, LEGACY, TOKENIZER, TokenizerFile, check_decoder
from collapse.untrusted import loads

Json = dict[str, Any]


def narrow_side_files(files: Mapping[str, bytes], kept: IndexSet, vocab_size: int) -> dict[str, bytes]:
    """Return the side files of a model of which only the token ids in `kept` remain.

    `files` maps names to bytes and may hold any files; `vocab_size` is the number of rows of the source's
    token table. Files without token ids come back as they were. Second copies of the tokenizer (`LEGACY`:
    vocab.json, merges.txt, tokenizer.model, ...) are left out: tokenizer.json says it all, and some of them
    cannot be cut.

    Raises `PlanError` where `kept` breaks the tokenizer or trims a token that a file names by file and field,
    and `UnsupportedError` where the tokenizer cannot be cut.
    """
    if kept.runs and kept.runs[-1][1] > vocab_size:
        raise PlanError(f"keeps token {kept.runs[-1][1] - 1} of {vocab_size} rows", where="kept tokens")
    new_ids = {old: new for new, old in enumerate(kept)}
    legacy = left_out(files)
    if legacy and TOKENIZER not in files:
        raise UnsupportedError(
            f"no {TOKENIZER}, only {', '.join(legacy)}", fix="save the tokenizer with save_pretrained first"
        )
    result = {name: raw for name, raw in files.items() if name not in legacy}
    for name in ID_FILES:
        if name in result:
            result[name] = _edit(name, result[name], partial(_renumber, name, new_ids, vocab_size))
    if TOKENIZER in result:
        file = TokenizerFile.from_bytes(result[TOKENIZER])
        check_kept(file, kept, vocab_size)
        try:
            result[TOKENIZER] = narrow_tokenizer(file, new_ids)
        except DAMAGE as error:
            what = f"damaged ({type(error).__name__}: {error})"
            raise CheckpointError(what, where=TOKENIZER, fix="fetch it again") from None
        result |= _narrow_names(result, file, new_ids, vocab_size)
    return result


def left_out(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the names in `files` that a cut leaves out, sorted."""
    return tuple(sorted(name for name in files if name in LEGACY))


def check_kept(file: TokenizerFile, kept: IndexSet, vocab_size: int) -> None:
    """Raise `PlanError` unless `kept` has all bytes, markers, special tokens and all merge ancestors."""
    ids = set(kept)
    strings = [file.strings[number] for number in sorted(ids) if number in file.strings]
    for kind, tokens in (("byte token", file.byte_tokens), ("space marker", file.markers)):
        if lost := [token for token in tokens if file.vocab[token] not in ids]:
            raise _broken(f"the {kind} {lost[0]!r} is trimmed, so some text could not be written")
    held = [t for t in file.added if (t.special or t.single_word) and t.id not in ids and t.id < vocab_size]
    if held:
        raise _broken(f"the special token {held[0].content!r} is trimmed")
    missing = sorted(token for token in closure(strings, file.ranks) if _lost(file, token, ids))
    if missing:
        raise _broken(f"{missing[0]!r} is trimmed, from which kept tokens are merged")


def _lost(file: TokenizerFile, token: str, ids: set[int]) -> bool:
    return token in file.vocab and file.vocab[token] not in ids


def _broken(what: str) -> PlanError:
    return PlanError(what, where="kept tokens", fix="make a new plan with `collapse plan`")


def narrow_tokenizer(file: TokenizerFile, new_ids: Mapping[int, int]) -> bytes:
    """Return tokenizer.json with only the tokens in `new_ids`, renumbered; merges keep their order.

    A merge stays if its two parts and its result do. The result is read back before it is returned.
    """
    data: Json = dict(file.data)
    ordered = sorted((new_ids[old], token) for token, old in file.vocab.items() if old in new_ids)
    vocab = {token: new for new, token in ordered}
    pairs = zip(file.merges, data["model"]["merges"], strict=True)
    merges = [raw for (left, right), raw in pairs if left in vocab and right in vocab and left + right in vocab]
    data["model"] = {**data["model"], "vocab": vocab, "merges": merges}
    added = [entry for entry in data.get("added_tokens") or () if entry["id"] in new_ids]
    data["added_tokens"] = [{**entry, "id": new_ids[entry["id"]]} for entry in added]
    data["post_processor"] = deepcopy(data.get("post_processor"))
    _renumber_post(data["post_processor"], new_ids)
    if padding := data.get("padding"):
        pad = _new(new_ids, padding["pad_id"], TOKENIZER, "padding.pad_id")
        data["padding"] = {**padding, "pad_id": pad}
    raw = (json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    TokenizerFile.from_bytes(raw)
    return raw


def _renumber_post(step: Any, new_ids: Mapping[int, int]) -> None:
    if not step:
        return
    for inner in step.get("processors") or ():
        _renumber_post(inner, new_ids)
    for name, entry in (step.get("special_tokens") or {}).items():
        where = f"post_processor.special_tokens.{name}"
        entry["ids"] = [_new(new_ids, number, TOKENIZER, where) for number in entry["ids"]]
    for role in ("sep", "cls"):
        if role in step:
            token, number = step[role]
            step[role] = [token, _new(new_ids, number, TOKENIZER, f"post_processor.{role}")]


def _new(new_ids: Mapping[int, int], number: int, file: str, where: str) -> int:
    if number not in new_ids:
        raise PlanError(f"{where} names token {number}, which is trimmed", where=file, fix="keep that token")
    return new_ids[number]


def _edit(name: str, raw: bytes, change: Callable[[Json], Json]) -> bytes:
    """Apply `change` to a JSON file; a file that it leaves equal keeps its bytes."""
    try:
        before = loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON ({error})", where=name, fix="fetch the file again") from None
    if not isinstance(before, dict):
        raise CheckpointError("not a JSON object", where=name, fix="fetch the file again")
    try:
        after = change(before)
    except DAMAGE as error:
        raise CheckpointError(f"damaged ({type(error).__name__}: {error})", where=name, fix="fetch it again") from None
    return raw if after == before else dumps(after, infinite=True).encode()


def _renumber(name: str, new_ids: Mapping[int, int], size: int, data: Json) -> Json:
    mapped = map_ids(data, size, lambda number, where: _new(new_ids, number, name, where))
    resized: Json = _resize(mapped, size, len(new_ids)) if name == "config.json" else mapped
    return resized


def _resize(config: Any, old: int, new: int) -> Any:
    """Set `vocab_size` wherever it says the old number of rows."""
    if isinstance(config, list):
        return [_resize(item, old, new) for item in config]
    if not isinstance(config, Mapping):
        return config
    return {
        key: new if key == "vocab_size" and value == old else _resize(value, old, new) for key, value in config.items()
    }


def _narrow_names(
    files: Mapping[str, bytes], file: TokenizerFile, new_ids: Mapping[int, int], size: int
) -> dict[str, bytes]:
    """Files that name tokens by string: a name that the cut tokenizer lacks would be added as a new id."""
    result = {}
    for name in NAME_FILES:
        if name in files:
            result[name] = _edit(name, files[name], partial(_names, name, file, new_ids, size))
    if "added_tokens.json" in files:
        raw = files["added_tokens.json"]
        result["added_tokens.json"] = _edit("added_tokens.json", raw, lambda data: _by_string(data, new_ids))
    return result


def _by_string(data: Json, new_ids: Mapping[int, int]) -> Json:
    return {token: new_ids[number] for token, number in data.items() if number in new_ids}


def _names(name: str, file: TokenizerFile, new_ids: Mapping[int, int], size: int, data: Json) -> Json:
    rowless = {token for token, number in file.ids.items() if number >= size}
    check_decoder(file, name, data)
    data = _without(data, rowless)
    for where, content in names_in(data):
        number = file.ids.get(content)
        if number not in new_ids:
            raise PlanError(f"{where} names {content!r}, which is trimmed", where=name, fix="keep that token")
    decoder = data.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        kept = {int(old): entry for old, entry in decoder.items() if int(old) in new_ids}
        data["added_tokens_decoder"] = {str(new_ids[old]): kept[old] for old in sorted(kept)}
    return data


def _without(data: Json, contents: set[str]) -> Json:
    """Drop names of tokens that never had a row: the source could not use them either."""

    def named(value: Any) -> bool:
        return (value.get("content") if isinstance(value, Mapping) else value) in contents

    result: Json = {}
    for key, value in data.items():
        if key.endswith("_special_tokens") and isinstance(value, list):
            result[key] = [item for item in value if not named(item)]
        elif key.endswith("_special_tokens") and isinstance(value, Mapping):
            result[key] = {role: item for role, item in value.items() if not named(item)}
        elif not (key.endswith("_token") and isinstance(value, str | Mapping) and named(value)):
            result[key] = value
    return result
