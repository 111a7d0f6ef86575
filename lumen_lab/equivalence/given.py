"""What a comparison of two executions is given, checked: the same inputs, tolerances and groups that are of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lumen_lab.equivalence.layers import LayerTensor, LayerTrace, require_sites
from lumen_lab.equivalence.layouts import in_order, order_for, possible_orders
from lumen_lab.equivalence.tolerance import DEFAULT_TOLERANCES, Tolerance
from lumen_lab.errors import LumenError

ROUNDED = {"float16": 2**-10, "float32": 2**-22}  # of the largest value: as far as rounding to that type goes


def told_apart(reference: LayerTrace, actual: LayerTrace) -> tuple[LayerTrace, LayerTrace]:
    """The two traces under names that differ."""
    if reference.name != actual.name:
        return reference, actual
    return tuple(replace(t, name=f"{t.name} ({w})") for t, w in ((reference, "reference"), (actual, "actual")))


def require_same_inputs(reference: LayerTrace, actual: LayerTrace) -> None:
    """``LumenError`` if two executions were given different inputs, where both know theirs.

    The same values in another layout, in a type that rounds them, or as integers of an encoding are the same input.
    An exported graph may lack an input that nothing reads: those of the shorter list must then be among the others.
    """
    fewer, more = sorted((reference.inputs or (), actual.inputs or ()), key=len)
    same = [[same_input(x, y) for y in more] for x in fewer]
    fits = all(row[place] if len(fewer) == len(more) else any(row) for place, row in enumerate(same))
    if not fits:
        shapes = [_shapes(trace.inputs) for trace in (reference, actual)]
        differ = f"{shapes[0]} and {shapes[1]}" if shapes[0] != shapes[1] else f"other values of {shapes[0]}"
        raise LumenError(
            f"The two executions, {reference.name} and {actual.name}, were given different inputs ({differ}); "
            "trace both with the same."
        )


def same_input(one: LayerTensor, other: LayerTensor) -> bool:
    """Whether two inputs hold the same values, in one order of axes or another, as far as their types can tell."""
    orders = {order_for(one, other), *possible_orders(one, other)} - {None}
    turned = (replace(other, values=in_order(other.values, order, one.values.shape)) for order in orders)
    return any(_same_values(one, x) for x in turned)


def _same_values(one: LayerTensor, other: LayerTensor) -> bool:
    (low, high), a, b = _range(one, other), one.real, other.real
    gap = np.abs(np.clip(a, low, high) - np.clip(b, low, high))
    scale = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (a, b))
    step = max(layer.scale or ROUNDED.get(str(layer.values.dtype), 0.0) * scale for layer in (one, other))
    return bool(np.all((gap <= step) | (a == b) | (np.isnan(a) & np.isnan(b))))


def _range(*layers: LayerTensor) -> tuple[float, float]:
    """What all of the encodings can hold."""
    low, high = -np.inf, np.inf
    for layer in (layer for layer in layers if layer.scale is not None):
        limits = np.iinfo(layer.values.dtype)
        ends = [layer.scale * (end - (layer.zero_point or 0)) for end in (limits.min, limits.max)]
        low, high = max(low, ends[0]), min(high, ends[1])
    return low, high


def _shapes(inputs: Sequence[LayerTensor]) -> str:
    return ", ".join(str(tuple(x.values.shape)) for x in inputs)


def tolerances(
    tolerance: Tolerance | Mapping[str, Tolerance] | None, *traces: LayerTrace
) -> tuple[Tolerance | None, Mapping[str, Tolerance]]:
    """(the tolerance for all layers, None for the default; those of single sites); ``LumenError`` for other things."""
    if tolerance is None or isinstance(tolerance, Tolerance):
        return tolerance, {}
    values = tolerance.values() if isinstance(tolerance, Mapping) else [tolerance]
    for strange in (value for value in values if not isinstance(value, Tolerance)):
        named = isinstance(strange, str) and strange in DEFAULT_TOLERANCES
        would_do = f"DEFAULT_TOLERANCES[{strange!r}]" if named else "Tolerance('mine', max_of_scale=1e-3)"
        raise LumenError(f"A tolerance is a Tolerance, or a map of sites to such, found {strange!r}; write {would_do}.")
    require_sites(tolerance, known_paths(*traces), " and ".join(trace.name for trace in traces))
    return None, tolerance


def groups_of(replaced: Iterable[Sequence[str]], *traces: LayerTrace) -> tuple[tuple[str, ...], ...]:
    """The groups of paths as tuples; ``LumenError`` for one that is empty, no list of paths, or of another network.

    Only traces of torch modules know all paths; where there are none, unknown ones pass. A path inside what a rewrite
    put there, be it that of another group, may be gone by now or lie outside the sites of a trace.
    """
    if isinstance(replaced, str) or not isinstance(replaced, Iterable):
        raise LumenError(f"replaced is a list of groups of paths, found {replaced!r}; write [('norm2', 'fc1')].")
    groups = list(replaced)
    for group in groups:
        paths_only = isinstance(group, list | tuple) and all(isinstance(path, str) for path in group)
        if not (group and paths_only):
            raise LumenError(f"A group of replaced paths is like ('norm2', 'fc1'), found {group!r}; leave out others.")
    if any(trace.modules is not None for trace in traces):
        made = {path for paths in (*groups, *(trace.rewritten or () for trace in traces)) for path in paths}
        asked = [path for group in groups for path in group if not made & set(parents(path))]
        require_sites(asked, known_paths(*traces), " and ".join(trace.name for trace in traces))
    return tuple(map(tuple, groups))


def parents(path: str) -> Iterator[str]:
    """The modules around a module, innermost first, the network itself left out."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def known_paths(*traces: LayerTrace) -> dict[str, None]:
    """Every path that one of the traces knows, in order."""
    return dict.fromkeys(path for t in traces for path in (*t.calls, *t.absent, *sorted(t.modules or ())))
