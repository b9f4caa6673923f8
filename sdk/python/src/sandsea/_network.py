"""What may leave a sandbox, in the short forms of Python and as the API has it."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from typing import TypeVar

from . import _models as m
from . import errors

#: What may leave a sandbox: {"pypi": True, "example.org:443": True, "*.bad.example": False}, or a whole policy of the
#: API. Names, in the order in which they decide, True to allow and False to reject: a package service (pypi, npm,
#: golang, crates, debian, maven, rubygems), a repository ("git:git.example/team/repo"), a host name ("example.org",
#: "*.example.org" for all below it, "*"), an address or network, each of the last two with ports ("example.org:443",
#: "192.0.2.0/24:8000-8100", "[2001:db8::/32]:80,443") or with "udp://" before it. What nothing allows is rejected.
NetworkRules = Mapping[str, bool] | m.NetworkPolicy

#: What holds at one stage of a task: rules as above, or a phase of the API.
PhaseRules = Mapping[str, bool] | m.NetworkPhase

#: "2024-06-01", "2024-06-01T12:00:00Z", a date (its first moment in UTC) or a datetime with a time zone.
Moment = str | datetime.date

_V = TypeVar("_V")
_PACKAGES = ("crates", "debian", "golang", "maven", "npm", "pypi", "rubygems")
_SCHEMES = {"tcp": "NETWORK_PROTOCOL_TCP", "udp": "NETWORK_PROTOCOL_UDP"}
_DEFAULT_PHASE = "default"


def policy(
    rules: NetworkRules,
    *,
    as_of: Moment | None = None,
    deny: Sequence[str] = (),
    phases: Mapping[str, PhaseRules] | None = None,
    phase: str = "",
) -> m.NetworkPolicy:
    """The policy that these say. Raises InvalidRequest for what cannot be read; the server judges the rest."""
    if isinstance(deny, str):
        raise errors.InvalidRequest(f"deny {deny!r}: a string. Give a list of them")
    if isinstance(rules, m.NetworkPolicy):
        if as_of is not None or deny or phases is not None or phase:
            raise errors.InvalidRequest("a whole NetworkPolicy holds as_of, deny and phases. Set them there")
        return rules
    services, own = _split(_mapping("rules", rules))
    out = m.NetworkPolicy(services=services, phase=phase, as_of=moment(as_of), deny=list(deny))
    if phases is None:
        out.phases = [m.NetworkPhase(name=_DEFAULT_PHASE, rules=own)] if own else []
        return out
    if own:
        first = next(k for k in rules if k not in services)
        raise errors.InvalidRequest(
            f"{first!r}: with phases, rules that are no package service belong to one of them. Move it into a phase"
        )
    out.phases = [_phase(name, given) for name, given in _mapping("phases", phases).items()]
    return out


def _phase(name: str, rules: PhaseRules) -> m.NetworkPhase:
    if isinstance(rules, m.NetworkPhase):
        if rules.name not in ("", name):
            raise errors.InvalidRequest(f"phase {name!r} is named {rules.name!r}. Give it one name")
        return m.NetworkPhase(name, rules.rules, rules.as_of, rules.deny, rules.inbound, rules.inbound_closed)
    return m.NetworkPhase(
        name=name, rules=[rule(text, allow) for text, allow in _mapping(f"phase {name!r}", rules).items()]
    )


def _mapping(what: str, given: Mapping[str, _V]) -> Mapping[str, _V]:
    if not isinstance(given, Mapping):
        raise errors.InvalidRequest(f"{what}: {given!r} maps nothing. Give a dict; an empty one lets nothing out")
    return given


def _split(rules: Mapping[str, bool]) -> tuple[dict[str, bool], list[m.NetworkRule]]:
    """Package services, which hold before the rules of every phase, and the rules."""
    services: dict[str, bool] = {}
    own: list[m.NetworkRule] = []
    for text, allow in rules.items():
        r = rule(text, allow)
        if r.service in _PACKAGES:
            services[r.service] = allow
        else:
            own.append(r)
    return services, own


def rule(text: str, allow: bool) -> m.NetworkRule:
    """One rule from its short form."""
    if not isinstance(allow, bool):
        raise errors.InvalidRequest(f"{text!r}: {allow!r} is neither True nor False. True allows, False rejects")
    out = m.NetworkRule(reject=not allow)
    rest = text
    if "://" in rest:
        scheme, _, rest = rest.partition("://")
        if scheme not in _SCHEMES:
            raise errors.InvalidRequest(
                f"{text!r} is no network rule. Write {rest.split('/')[0]}, or tcp:// or udp:// before it"
            )
        out.protocol = _SCHEMES[scheme]
    if rest in _PACKAGES or rest.startswith("git:"):
        out.service = rest
        return out
    target, ports = _ports(text, rest)
    out.ports = ports
    if _is_network(target) or ":" in target or "/" in target:
        out.cidr = target
    elif target == "*" or "." in target:
        out.domain = target
    else:
        known = ", ".join(_PACKAGES)
        raise errors.InvalidRequest(
            f'{text!r} is no network rule. Package services: {known}. A host of that name is "{target}."'
        )
    return out


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _ports(text: str, rest: str) -> tuple[str, list[m.PortRange]]:
    """Target and ports. The colons of an IPv6 address are none of ports, unless brackets end it."""
    if rest.startswith("["):
        target, closed, after = rest[1:].partition("]")
        ports = after.removeprefix(":")
        if not closed or (after and not after.startswith(":")):
            raise errors.InvalidRequest(f"{text!r} is no network rule. Write [ADDRESS]:PORT")
        if not after:
            return target, []
    elif rest.count(":") == 1:
        target, _, ports = rest.partition(":")
    else:
        return rest, []
    try:
        return target, [_range(part) for part in ports.split(",")]
    except ValueError:
        raise errors.InvalidRequest(
            f'{text!r} is no network rule. Write ports as "443", "80,443" or "8000-8100"'
        ) from None


def _range(text: str) -> m.PortRange:
    first, _, last = text.partition("-")
    ports = m.PortRange(int(first), int(last or first))
    if not 0 < ports.first <= ports.last < 65536 or not text.replace("-", "", 1).isdecimal():
        raise ValueError(text)
    return ports


def moment(value: Moment | None) -> datetime.datetime | None:
    """A moment in UTC; a day is its first one."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            raise errors.InvalidRequest(
                f"as_of {value!r} is no date. Write it as 2024-06-01 or 2024-06-01T12:00:00Z"
            ) from None
        if value.tzinfo is None and value.time() == datetime.time():
            value = value.replace(tzinfo=datetime.timezone.utc)
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.timezone.utc)
    if value.tzinfo is None:
        raise errors.InvalidRequest(f"as_of {value} has no time zone. Add one, as datetime.timezone.utc")
    return value.astimezone(datetime.timezone.utc)
