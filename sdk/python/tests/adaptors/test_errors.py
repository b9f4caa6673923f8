"""The table that all adaptors share."""

from __future__ import annotations

import pytest

from sandsea import errors
from sandsea.adaptors._errors import Fault, fault, raising
from sandsea.errors import __all__ as names


class Broken(RuntimeError):
    """A framework's own word."""


def make(kind: type[errors.SandseaError]) -> errors.SandseaError:
    if issubclass(kind, errors.CommandFailed):
        e = kind.__new__(kind)
        Exception.__init__(e, "x")
        return e
    return kind("x")


@pytest.mark.parametrize("kind", [getattr(errors, n) for n in names])
def test_every_exception_has_its_place(kind: type[errors.SandseaError]) -> None:
    e = make(kind)
    passed = fault(e) in (Fault.COMMAND, Fault.FILE)
    assert passed == isinstance(e, (errors.CommandFailed, errors.FileError))
    with pytest.raises(kind if passed else Broken), raising(Broken):
        raise e


def test_the_platforms_own_timeout_is_never_the_commands() -> None:
    assert fault(errors.RequestTimeout("x")) is Fault.PLATFORM
    with pytest.raises(Broken) as e, raising(Broken):
        raise errors.RequestTimeout("no answer")
    assert not isinstance(e.value, TimeoutError)
    assert str(e.value) == "no answer"


def test_what_nobody_knows_is_the_platforms() -> None:
    assert fault(errors.SandseaError("x")) is Fault.PLATFORM
    assert fault(errors.Lost("x")) is Fault.PLATFORM
    assert fault(errors.SandboxEnded("x")) is Fault.ENDED
