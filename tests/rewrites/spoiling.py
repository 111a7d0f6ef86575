"""A wrong version of a rewrite: what it has built, harmed in one way."""

import dataclasses


def spoiled(rule, change):
    """The rewrite with ``change`` done to every module that it builds."""

    def built(site):
        modules = rule.built(site)
        for module in modules.values():
            change(module)
        return modules

    return dataclasses.replace(rule, built=built)


def as_class(kind):
    """A change that makes a module one of another class, with the weights it has."""

    def change(module):
        module.__class__ = kind

    return change
