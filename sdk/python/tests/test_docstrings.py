"""`help()` says something about everything that a user calls."""

from __future__ import annotations

import inspect

import pytest

import sandsea
import sandsea.sync


@pytest.mark.parametrize("module", [sandsea, sandsea.sync], ids=lambda m: m.__name__)
def test_every_public_name_is_explained(module: object) -> None:
    bare = []
    for name, found in inspect.getmembers(module, lambda o: inspect.isclass(o) or inspect.isfunction(o)):
        if name.startswith("_"):
            continue
        if not inspect.getdoc(found):
            bare.append(name)
        for method, call in vars(found).items() if inspect.isclass(found) else ():
            call = call.__func__ if isinstance(call, staticmethod | classmethod) else call
            if inspect.isfunction(call) and not method.startswith("_") and not inspect.getdoc(call):
                bare.append(f"{name}.{method}")
    assert bare == []
