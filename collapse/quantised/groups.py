"""Groups the tensors of a quantised checkpoint: a weight with everything that is needed to read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from collapse.errors import CheckpointError, UnsupportedError
from collapse.quantised.cuts import Cut, cuts, weight_shape
from collapse.quantised.scheme import FORMS, Form, Scheme, stem_of


class Stored(Protocol):
    """What is known of a tensor without reading it."""

    @property
    def dtype(self) -> str:
        """The safetensors name of its element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes in the file."""

    @property
    def nbytes(self) -> int:
        """Its size in the file."""


@dataclass(frozen=True)
class Group:
    """One quantised weight.

    Attributes:
        stem: path of its module, with the dot.
        form: what its tensors are called within the module.
        companions: tensors of the files that it cannot be read without, or that belong to it alone.
        shape: sizes of the weight, `[out, in]`, experts before them; None where only its bytes tell them.
        numel: its number of elements, which the last packed word may round up.
        nbytes: size of all its tensors in the files.
        cuts: for each dimension of the weight, how its tensors are cut, or why they cannot be.
    """

    stem: str
    form: Form
    companions: tuple[str, ...]
    shape: tuple[int, ...] | None
    numel: int
    nbytes: int
    cuts: Mapping[int, Cut | str]

    @property
    def main(self) -> str:
        """The tensor with the quantised values; it stands for the weight in plans."""
        return self.stem + self.form.main

    @property
    def weight(self) -> str:
        """What the weight would be called if it were not quantised."""
        return self.stem + self.form.logical

    @property
    def members(self) -> tuple[str, ...]:
        """All its tensors in the files."""
        return (self.main, *self.companions)


@dataclass(frozen=True)
class Quantisation:
    """The scheme of a checkpoint and its groups."""

    scheme: Scheme
    groups: tuple[Group, ...]

    @cached_property
    def by_tensor(self) -> Mapping[str, Group]:
        """Tensor of the files -> its group; tensors that are not quantised are in none."""
        return {name: group for group in self.groups for name in group.members}


def quantisation(scheme: Scheme | None, tensors: Mapping[str, Stored]) -> Quantisation | None:
    """Group the tensors of the files.

    Raises `CheckpointError` for a weight without its companions and for companions without a weight,
    `UnsupportedError` for tensors that are quantised in a way that config.json does not tell.
    """
    groups = tuple(_groups(scheme, tensors)) if scheme else ()
    found = Quantisation(scheme, groups) if scheme else None
    _refuse_undeclared(tensors, found)
    return found


def _groups(scheme: Scheme, tensors: Mapping[str, Stored]) -> Iterator[Group]:
    for stem in dict.fromkeys(stem for name in tensors for stem in _stems(scheme.forms, name, tensors[name])):
        yield from (_group(scheme, form, stem, tensors) for form in _forms_at(scheme, stem, tensors))


def _stems(forms: tuple[Form, ...], name: str, info: Stored) -> Iterator[str]:
    """Yield the module of a tensor that is a companion, or that is quantised and must have some."""
    for form in forms:
        parts = form.companions + ((form.main,) if _is_low(info.dtype) or form.main != form.logical else ())
        yield from (stem for part in parts if (stem := stem_of(name, part)) is not None)


def _is_low(dtype: str) -> bool:
    return dtype.startswith(("F8", "F4")) or dtype in {"U8", "I8"}


def _forms_at(scheme: Scheme, stem: str, tensors: Mapping[str, Stored]) -> list[Form]:
    """Return the forms of the weights in one module: one for each main tensor that is there."""
    fitting: dict[str, Form] = {}
    for form in scheme.forms:
        companions = [part for part in form.companions if stem + part in tensors]
        if not (stem + form.main in tensors and (companions or _is_low(tensors[stem + form.main].dtype))):
            continue
        if form.main not in fitting or _lacking(form, stem, tensors) < _lacking(fitting[form.main], stem, tensors):
            fitting[form.main] = form
    owned = {part for form in fitting.values() for part in (form.main, *form.companions)}
    known = {part for form in scheme.forms for part in form.companions}
    for part in sorted(part for part in known if stem + part in tensors and part not in owned):
        raise CheckpointError("is a companion of a quantised weight that is not there", where=stem + part, fix=_FETCH)
    if len({form.logical for form in fitting.values()}) < len(fitting):
        raise CheckpointError("one weight is there in two forms", where=stem.removesuffix("."), fix=_FETCH)
    return list(fitting.values())


_FETCH = "give a complete checkpoint"


def _lacking(form: Form, stem: str, tensors: Mapping[str, Stored]) -> int:
    return sum(stem + part not in tensors for part in form.required)


def _group(scheme: Scheme, form: Form, stem: str, tensors: Mapping[str, Stored]) -> Group:
    lacking = next((part for part in _needed(form, stem, tensors) if stem + part not in tensors), None)
    if lacking is not None:
        reason = f"the quantised weight has no {stem}{lacking}, without which it cannot be read"
        raise CheckpointError(reason, where=stem + form.main, fix=_FETCH)
    parts = [part for part in (form.main, *form.companions) if stem + part in tensors]
    shapes = {part: tensors[stem + part].shape for part in parts}
    main = tensors[stem + form.main]
    if form.main == form.logical and not _is_low(main.dtype) and scheme.method != "bitsandbytes-4bit":
        reason = f"is {main.dtype} and yet has {stem}{form.required[0]}: its values are not quantised ones"
        raise UnsupportedError(reason, where=stem + form.main, fix="give a checkpoint that was saved compressed")
    _require_tables(scheme, stem, shapes)
    shape, numel = weight_shape(scheme, form, shapes, main.nbytes)
    return Group(
        stem=stem,
        form=form,
        companions=tuple(stem + part for part in parts[1:]),
        shape=shape,
        numel=numel,
        nbytes=sum(tensors[stem + part].nbytes for part in parts),
        cuts=cuts(scheme, form, shapes),
    )


_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")  # of bitsandbytes: scales that are quantised themselves


def _needed(form: Form, stem: str, tensors: Mapping[str, Stored]) -> tuple[str, ...]:
    """Return the companions without which this weight cannot be read; scales that are bytes need their own scales."""
    scales = tensors.get(f"{stem}weight.absmax")
    nested = any(stem + part in tensors for part in _NESTED) or (scales is not None and scales.dtype == "U8")
    return form.required + (_NESTED if nested and form.optional == _NESTED else ())


def _require_tables(scheme: Scheme, stem: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """GPTQ and AWQ pack rows and columns, so their values, zeros and scales have both."""
    for part in ("qweight", "qzeros", "scales") if scheme.method in {"gptq", "awq"} else ():
        if part in shapes and len(shapes[part]) != 2:
            reason = f"has the shape {list(shapes[part])}, not rows and columns"
            raise CheckpointError(reason, where=stem + part, fix=_FETCH)


def _refuse_undeclared(tensors: Mapping[str, Stored], known: Quantisation | None) -> None:
    """A weight that is quantised in another way than config.json says would look like tensors that nothing claims."""
    grouped = known.by_tensor if known else {}
    for form in (form for forms in FORMS.values() for form in forms):
        for name, info in tensors.items():
            stem = stem_of(name, form.main)
            if stem is None or name in grouped or not (_is_low(info.dtype) or info.dtype == "I32"):
                continue
            beside = next((stem + part for part in form.required if stem + part in tensors), None)
            if beside is not None:
                said = f"quant_method is {known.scheme.method}" if known else "there is no quantization_config"
                reason = f"is quantised, as {beside} beside it says, but {said}"
                raise UnsupportedError(reason, where=name, fix="give the config.json that belongs to these files")
