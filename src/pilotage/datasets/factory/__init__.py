"""The bug factory: real packages, bugs by our modifiers, proven by the packages' own tests.

    sdist -> stable tests and the lines they pass -> one bug at a time, proven by the tests that pass its
    lines -> combinations, proven again -> issue text from the shortest failing test -> tasks

It runs the tests of the packages that it is given, in processes with limits but not in a sandbox: give it
packages that you would install. Needs the extra `factory` (libcst and pytest).
"""

from pilotage.datasets.factory.making import Factory, FactoryObserver, Made, make_bugs

__all__ = ["Factory", "FactoryObserver", "Made", "make_bugs"]
