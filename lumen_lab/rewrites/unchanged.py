"""What two networks have in common, module by module: weights, settings, classes, hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lumen_lab.rewrites.record import LogEntry

INTERNAL = frozenset(vars(nn.Module()))
MARK = "rewritten_by"


def changed_elsewhere(before: nn.Module, after: nn.Module, entries: Iterable[LogEntry]) -> list[str]:
    """What differs between two networks outside of the modules that ``entries`` replaced: "path.weight", …"""
    replaced = {path for entry in entries for path in entry.replaced}

    def kept(model: nn.Module) -> dict[str, nn.Module]:
        return {path: module for path, module in model.named_modules() if not replaced & set(with_ancestors(path))}

    return differences(kept(before), kept(after))


def is_copy(before: nn.Module, after: nn.Module) -> bool:
    """Whether two modules are certainly the same: alike in all that is plain, and holding nothing else."""
    old, new = dict(before.named_modules()), dict(after.named_modules())
    return not differences(old, new) and not any(map(holds_more, (*old.values(), *new.values())))


def differences(before: Mapping[str, nn.Module], after: Mapping[str, nn.Module]) -> list[str]:
    """Where the modules of two networks differ, by path."""
    found = [path or "the network itself" for path in {**before, **after} if (path in before) != (path in after)]
    for path in before.keys() & after.keys():
        old, new = state_of(before[path]), state_of(after[path])
        found += [f"{path}.{name}".lstrip(".") for name in {**old, **new} if not alike(old.get(name), new.get(name))]
    return sorted(found)


def state_of(module: nn.Module) -> dict[str, object]:
    """What a module holds itself, by name: parameters, buffers, plain settings, its class and how many hooks it has."""
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    settings = {name: value for name, value in vars(module).items() if is_plain(value) and name != MARK}
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    return {**settings, **tensors, "__class__": type(module), "hooks": hooks}


def holds_more(module: nn.Module) -> bool:
    """Whether a module has attributes that cannot be compared, such as functions."""
    return any(name not in INTERNAL and not is_plain(value) for name, value in vars(module).items())


def is_plain(value: object) -> bool:
    """Whether a setting can be compared with ``==``: numbers, text, types and tuples or lists of them."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def alike(old: object, new: object) -> bool:
    """Equal bit for bit; a NaN is like a NaN."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return type(old) is type(new) and old == new
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    return torch.equal(old, new) or bool(((old == new) | ((old != old) & (new != new))).all())


def with_ancestors(path: str) -> list[str]:
    """The path and those of all modules around it: "a.b" gives "a" and "a.b"."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
