"""Two traces side by side: layers matched by site and call, measured, and the first that left its tolerance found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lumen_lab.equivalence.clipped import past_relus
from lumen_lab.equivalence.given import groups_of, parents, require_same_inputs, told_apart, tolerances
from lumen_lab.equivalence.layer_report import FIRST, HANDED_ON, NETWORK, LayerReport, LayerRow, UnmatchedLayer
from lumen_lab.equivalence.layers import LayerTensor, LayerTrace
from lumen_lab.equivalence.layouts import in_order, order_for
from lumen_lab.equivalence.measures import measured
from lumen_lab.equivalence.tolerance import Tolerance, default_tolerance
from lumen_lab.errors import LumenError

Call = tuple[str, int]
Layers = dict[Call, list[LayerTensor]]
Pair = tuple[LayerTensor, LayerTensor, str]
OTHER_SHAPE = "the call returns nothing of its shape there"
Reason = tuple[str, str]  # in words that are the same for the same reason, and in detail


def compare_layers(
    reference: LayerTrace,
    actual: LayerTrace,
    *,
    tolerance: Tolerance | Mapping[str, Tolerance] | None = None,
    replaced: Iterable[Sequence[str]] = (),
) -> LayerReport:
    """Match the layers of two executions by site, call and output, and report how far each is from the reference.

    ``tolerance``: one for all layers; or by site, beside the default of the two precisions; or that alone (None).
    ``replaced``: groups of paths that a rewrite replaced together, ``[entry.replaced for entry in log.applied()]``,
    each in order of execution. Only the last of a group must return what it did before: what runs inside a group or
    before its last is not compared. Give them whenever one network is the other rewritten (``compare_rewritten`` does
    so): a torch trace knows which modules a rewrite made, but not which of them together, and an ONNX graph neither.

    What has no counterpart is in ``unmatched`` with the reason. ``LumenError`` if nothing could be compared, if the two
    were given different inputs, and for tolerances or groups that are of neither.
    """
    reference, actual = told_apart(reference, actual)
    require_same_inputs(reference, actual)
    for_all, by_site = tolerances(tolerance, reference, actual)
    default = for_all or default_tolerance(reference.precision, actual.precision)
    replaced = groups_of(replaced, reference, actual)
    expected, found = by_call(reference, actual), by_call(actual, reference)
    found, clipped = past_relus(expected, found)
    expected, clipped_too = past_relus(found, expected)
    refused = refused_calls(expected, found, reference, actual, replaced)
    for call, relu in (clipped | clipped_too).items():
        refused[call] = "quantised without negative values, as the ReLU behind it leaves them", f"compared at {relu[0]}"
    pairs, unmatched = [], []
    for call, layers in expected.items():
        if call in found and call not in refused:
            matched, rest = match_outputs(layers, found[call], reference.name, actual.name)
            pairs += matched
            unmatched += rest
        else:
            reason = refused.get(call) or why_missing(call, layers, reference, actual)
            unmatched += _unmatched(layers, reference.name, reason)
    for call in (call for call in found if call not in expected):
        unmatched += _unmatched(found[call], actual.name, why_missing(call, found[call], actual, reference))
    if not pairs:
        raise LumenError(nothing_in_common(reference, actual, unmatched))
    rows = [measured_once(same, by_site, default) for same in distinct(pairs)]
    return LayerReport(
        reference.name,
        actual.name,
        (reference.precision, actual.precision),
        default,
        tuple(first_marked(rows)),
        tuple(sorted(unmatched, key=lambda layer: layer.found_in != reference.name)),
    )


def nothing_in_common(reference: LayerTrace, actual: LayerTrace, unmatched: Sequence[UnmatchedLayer]) -> str:
    """Why two traces could not be compared at all, in a sentence: the reason at each of the sites asked for."""
    both = f"{actual.name} and {reference.name} have no layer in common"
    if reference.chosen is None and actual.chosen is None:
        return f"{both}; trace the same network twice."
    reasons = {layer.site: ", ".join(filter(None, (layer.why, layer.detail))) for layer in unmatched}
    shown = [f"{site or NETWORK} ({reason})" for site, reason in list(reasons.items())[:3]]
    return f"{both}: {'; '.join(shown) or 'they were asked for other sites'}. Choose other sites, or leave them out."


def by_call(trace: LayerTrace, other: LayerTrace) -> Layers:
    """The tensors of each call in order, of the sites that both traces were asked for."""
    layers: Layers = {}
    for layer in trace.layers:
        if other.chosen is None or layer.site in other.chosen:
            layers.setdefault((layer.site, layer.call), []).append(layer)
    return layers


def refused_calls(
    expected: Layers, found: Layers, reference: LayerTrace, actual: LayerTrace, replaced: Sequence[tuple[str, ...]]
) -> dict[Call, Reason]:
    """Calls that both have and that must not be compared, with the reason."""
    between = between_replaced(replaced, reference, actual)
    outside = [{call: x for call, x in layers.items() if call not in between} for layers in (expected, found)]
    refused = standing_for_later(*reversed(outside), actual.name) | standing_for_later(*outside, reference.name)
    refused |= between
    rewritten = {path: "a rewrite" for group in replaced for path in group} | rewritten_in_one(reference, actual)
    counts = [Counter(site for site, _ in layers) for layers in (expected, found)]
    for site, number in expected.keys() & found.keys():
        inside = next((path for path in parents(site) if path in rewritten), None)
        if inside is not None:
            refused[site, number] = f"inside what {rewritten[inside]} put there", f"compared at {inside}"
        if counts[0][site] != counts[1][site]:
            refused[site, number] = other_count(site, reference, actual)
    return refused


def rewritten_in_one(reference: LayerTrace, actual: LayerTrace) -> dict[str, str]:
    """Paths where a rewrite made the module in one execution and not in the other, and its name."""
    expected, found = reference.rewritten, actual.rewritten
    if expected is None or found is None:
        return {}
    return {path: (found | expected)[path] for path in found | expected if found.get(path) != expected.get(path)}


def other_count(site: str, here: LayerTrace, there: LayerTrace) -> Reason:
    """The reason for calls that cannot be told apart."""
    counts = f"{here.calls[site]} in {here.name}, {there.calls[site]} in {there.name}"
    return "not called as often in both", counts


def standing_for_later(one: Layers, other: Layers, name: str) -> dict[Call, Reason]:
    """Calls whose tensor a later call of ``one`` returns too, where ``other`` has two different ones.

    A conv that a norm was folded into returns what the norm did, not what the conv did.
    """
    makers: dict[int, list[Call]] = {}
    for call, layers in one.items():
        for layer in layers:
            makers.setdefault(id(layer.values), []).append(call)
    refused = {}
    for calls in makers.values():
        both = [call for call in dict.fromkeys(calls) if call in other]
        for call in both[:-1]:
            if len(_values(one[call])) == 1 and not _values(other[call]) & _values(other[both[-1]]):
                refused[call] = f"one tensor in {name} stands for this and a later layer", f"compared at {both[-1][0]}"
    return refused


def _values(layers: Sequence[LayerTensor]) -> set[int]:
    return {id(layer.values) for layer in layers}


def between_replaced(replaced: Sequence[tuple[str, ...]], *traces: LayerTrace) -> dict[Call, Reason]:
    """Calls from the first of a group of modules replaced together up to, and without, the last.

    The order is that of the whole execution where a trace knows it, so that a site chosen alone is judged as it would
    be among all.
    """
    refused, orders = {}, [trace.finished for trace in traces]
    for group in replaced:
        last = last_of(group, *orders)
        reason = "between modules that a rewrite replaced together", f"compared from {last} on"
        before = {path for part in group for path in (part, *parents(part)) if not f"{last}.".startswith(f"{path}.")}
        for calls in orders:
            ends = [place for place, (site, _) in enumerate(calls) if site == last]
            starts = [place for place, (site, _) in enumerate(calls) if site in group and site != last]
            spans = {max((start for start in starts if start < end), default=end): end for end in ends}
            between = {call for start, end in spans.items() for call in calls[start:end]}
            refused |= dict.fromkeys(between | {call for call in calls if call[0] in before}, reason)
    return refused


def last_of(group: Sequence[str], *orders: Sequence[Call]) -> str:
    """The part of a group that runs last in an execution that has all of them; where none has, the last as listed."""
    for calls in orders:
        seen = [site for site, _ in calls if site in group]
        if set(seen) == set(group):
            return seen[-1]
    return group[-1]


def why_missing(call: Call, layers: Sequence[LayerTensor], here: LayerTrace, there: LayerTrace) -> Reason:
    """Why a call of ``here`` has no counterpart in ``there``."""
    site = call[0]
    around = (site, *parents(site))
    made = next((path for path in around if path in (here.rewritten or {})), None)
    gone = next((path for path in around if path in (there.rewritten or {})), None)
    if site in there.calls:
        return other_count(site, here, there)
    if site in there.absent:
        return f"in {there.name}: {there.absent[site]}", ""
    if gone is not None and gone not in (here.rewritten or {}):
        return f"replaced by {there.rewritten[gone]}", f"at {gone}"
    if all(layer.handed_on for layer in layers):
        return HANDED_ON, ""
    if made is not None and there.rewritten is not None and made not in there.rewritten:
        return f"made by {here.rewritten[made]}", f"at {made}"
    return f"in {there.name}: {there.otherwise}", ""


def match_outputs(
    expected: Sequence[LayerTensor], found: Sequence[LayerTensor], name: str, other: str
) -> tuple[list[Pair], list[UnmatchedLayer]]:
    """Pairs of the tensors that one call returned, in order where the numbers agree, else by their shapes.

    The second list has those of either side that fit none or several of the other's.
    """
    for r, a in ((expected, found), (own_tensors(expected), own_tensors(found))):
        orders = [order_for(*pair) for pair in zip(r, a, strict=False)]
        if len(r) == len(a) and None not in orders:
            left = [x for x in expected if x not in r]
            return list(zip(r, a, orders, strict=True)), _unmatched(left, name, (HANDED_ON, ""))
    return matched_by_shape(own_tensors(expected), own_tensors(found), name, other)


def own_tensors(layers: Sequence[LayerTensor]) -> list[LayerTensor]:
    """The distinct tensors of one call that it was not given."""
    first_of_each = {id(layer.values): layer for layer in reversed(layers) if not layer.handed_on}
    return sorted(first_of_each.values(), key=lambda layer: layer.output)


def matched_by_shape(
    expected: Sequence[LayerTensor], found: Sequence[LayerTensor], name: str, other: str
) -> tuple[list[Pair], list[UnmatchedLayer]]:
    """Pairs of tensors that fit each other and nothing else; what fits none or several is left over."""
    orders = {(r.output, a.output): order for r in expected for a in found if (order := order_for(r, a)) is not None}
    pairs, unmatched = [], []
    for r in expected:
        mine = [a for a in found if (r.output, a.output) in orders]
        if len(mine) == 1 and sum((x.output, mine[0].output) in orders for x in expected) == 1:
            pairs.append((r, mine[0], orders[r.output, mine[0].output]))
        else:
            unmatched += _unmatched([r], name, _no_single_fit(r, mine, found, other))
    taken = [a.output for _, a, _ in pairs]
    rest = [a for a in found if a.output not in taken and len(expected) + len(found) > 2]
    return pairs, unmatched + [
        layer for a in rest for layer in _unmatched([a], other, _no_single_fit(a, (), expected, name))
    ]


def _no_single_fit(layer: LayerTensor, fitting: Sequence, others: Sequence[LayerTensor], other: str) -> Reason:
    if fitting:
        return "several tensors of the call have its shape", f"{len(fitting)} in {other}"
    shapes = ", ".join(str(tuple(x.values.shape)) for x in others) or "none"
    return OTHER_SHAPE, f"{tuple(layer.values.shape)}, and in {other} {shapes}"


def _unmatched(layers: Iterable[LayerTensor], found_in: str, reason: Reason) -> list[UnmatchedLayer]:
    return [UnmatchedLayer(layer.site, layer.call, layer.output, found_in, *reason) for layer in layers]


def distinct(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Pairs grouped where they are the same two tensors, returned by several sites."""
    groups: dict[tuple[int, int], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((id(pair[0].values), id(pair[1].values)), []).append(pair)
    yield from groups.values()


def measured_once(same: Sequence[Pair], by_site: Mapping[str, Tolerance], default: Tolerance) -> LayerRow:
    """The row of the first of several pairs of the same tensors, with the others' sites.

    Its tolerance is that of the first of the sites that has one of its own.
    """
    r, a, order = same[0]
    tolerance = next((by_site[pair[0].site] for pair in same if pair[0].site in by_site), default)
    row = measured(r, replace(a, values=in_order(a.values, order, r.values.shape)), tolerance, order=order)
    return replace(row, also=tuple(dict.fromkeys(pair[0].site or NETWORK for pair in same[1:])))


def first_marked(rows: Sequence[LayerRow]) -> Iterator[LayerRow]:
    """The rows, the first that is outside its tolerance marked as such."""
    seen = False
    for row in rows:
        yield replace(row, status=FIRST) if row.outside and not seen else row
        seen = seen or row.outside
