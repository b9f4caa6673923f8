"""`python -m demo`: the whole job, from real releases to graded diffs.

Ends with one line: demo: ok … or demo: failed …
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from sandsea import Client, SandseaError

from . import cheats, grader, network, registry, server
from .images import Images, prepare
from .rollout import Figures, open_sandbox, roll_out
from .tasks import Task, load_all, names
from .view import View


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description="Repair tasks from real releases, rolled out and graded.")
    parser.add_argument("--binary", type=pathlib.Path, default=pathlib.Path("build/sandsea"))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("build/demo-data"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/demo.json"))
    parser.add_argument("--parallel", type=_positive, default=16, help="rollouts at a time")
    parser.add_argument("--task", action="append", choices=names(), help="only this task")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> int:
    args = parse()
    # A termination or a lost terminal ends the server too, as ^C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("demo: failed: interrupted", flush=True)
        return 130
    except (server.ServerError, registry.FetchError, SandseaError, httpx.HTTPError, ValueError) as e:
        print(f"demo: failed: {e}", flush=True)
    except Exception:
        traceback.print_exc()
        print("demo: failed by a fault of its own, see above", flush=True)
    return 1


def run(args: argparse.Namespace) -> int:
    chosen = [t for t in load_all() if not args.task or t.name in args.task]
    began = time.monotonic()
    data = args.data.resolve()
    data.mkdir(parents=True, exist_ok=True)
    print("starting a server of the demo's own", flush=True)
    with server.up(args.binary.resolve(), data) as (url, token):
        outcome = asyncio.run(
            job(url, token, chosen, args.parallel, lambda: server.egress(args.binary.resolve(), data))
        )
        tag = server.tag(data)
    left = server.left_behind(data, tag)
    outcome["left_behind"] = left
    outcome["seconds"] = round(time.monotonic() - began, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(f"left behind: {', '.join(left) or '0 processes, mounts, cgroups, loop devices, files'}")
    cheated = outcome["network"]
    summary = (
        f"{outcome['sandboxes']} sandboxes, {outcome['right']} verdicts right, {outcome['wrong']} wrong, "
        f"{len(left)} left behind, "
    )
    if cheated["missing"]:
        summary += f"network not shown: {cheated['missing']}, see above"
    elif cheated["refused"] == cheated["attempts"]:
        summary += f"{cheated['attempts']} cheats by network, all refused"
    else:
        summary += f"{cheated['refused']} of {cheated['attempts']} cheats by network refused"
    good = (
        outcome["wrong"] == 0
        and not left
        and outcome["right"] == len(chosen) * len(cheats.plan(True))
        and all(o["right"] for o in cheated["outcomes"])
    )
    print(f"demo: ok {summary}" if good else f"demo: failed {summary}", flush=True)
    return 0 if good else 1


async def job(
    url: str, token: pathlib.Path, chosen: list[Task], parallel: int, egress: Callable[[], str]
) -> dict[str, Any]:
    async with Client(url, token_file=str(token)) as client:
        print("fetching releases by index and hash, making layers", flush=True)
        images = await prepare(client, chosen, lambda text: print(text, flush=True))
        missing, why = await network.missing(client, images.base, egress)
        if missing:
            print(f"network: not shown, {missing}: {why}", flush=True)
        else:
            print(
                "network: agents reach pypi and golang, as of a day between their task's releases; graders nothing",
                flush=True,
            )
        figures = Figures()
        await show_tasks(client, chosen, images, figures, networked=not missing)
        out = await roll_all(client, chosen, images, figures, parallel, networked=not missing)
        return out | {"network": network_report(figures.network, missing)}


def network_report(outcomes: list[network.Outcome], missing: str) -> dict[str, Any]:
    """Say what became of the cheats by network, and give it as a document."""
    cheated = [o for o in outcomes if o.cheat]
    refused = [o for o in cheated if o.right]
    for o in outcomes:
        if not o.right:
            print(f"WRONG {o.task}: {o.what}: {o.said}")
    if not missing:
        rules = Counter(re.sub(r"^(as_of|deny) .*", r"\1", o.rule) for o in refused)
        named = ", ".join(f"{rule} {n}" for rule, n in rules.most_common())
        print(f"cheats by network: {len(refused)} of {len(cheated)} refused, with the rule in the flow log: {named}")
    return {
        "missing": missing,
        "attempts": len(cheated),
        "refused": len(refused),
        "outcomes": [dataclasses.asdict(o) for o in outcomes],
    }


async def show_tasks(client: Client, chosen: list[Task], images: Images, figures: Figures, *, networked: bool) -> None:
    """Show for each task that the old release fails and the new one passes."""
    print("the older release must fail, the newer one pass:", flush=True)
    slots = asyncio.Semaphore(4)

    async def one(task: Task) -> str:
        reports = []
        for patch in ("", task.true_patch()):
            async with (
                slots,
                await open_sandbox(client, task, images, figures, phase=network.GRADE, networked=networked) as sb,
            ):
                if patch:
                    (await grader.apply(sb, task, patch)).check()
                reports.append(await grader.run_tests(sb, task))
        old, new = reports
        turned = [t for t in task.f2p if old.outcomes.get(t) != grader.PASSED and new.outcomes.get(t) == grader.PASSED]
        stayed = [t for t in task.p2p if old.outcomes.get(t) == new.outcomes.get(t) == grader.PASSED]
        if len(turned) != len(task.f2p) or len(stayed) != len(task.p2p) or not task.f2p:
            raise ValueError(
                f"{task.name}: {len(turned)} of {len(task.f2p)} tests turn, {len(stayed)} of {len(task.p2p)} stay: "
                "the lists in demo/tasks do not hold here"
            )
        return (
            f"  {task.name:14}{task.old.version:>8} -> {task.new.version:8} {len(turned):3} turn, {len(stayed):3} stay"
        )

    for line in asyncio.as_completed([one(t) for t in chosen]):
        print(await line, flush=True)


async def roll_all(
    client: Client, chosen: list[Task], images: Images, figures: Figures, parallel: int, *, networked: bool
) -> dict[str, Any]:
    plan = cheats.plan(networked)
    work = [(task, kind, want) for kind, want in plan for task in chosen]
    view = View([t.name for t in chosen], [kind for kind, _ in plan])
    view.say(f"{len(work)} rollouts, {parallel} at a time, each graded in a fresh sandbox")
    slots = asyncio.Semaphore(parallel)
    records: list[dict[str, Any]] = []
    shown = len(figures.creates)
    began = time.monotonic()

    async def one(task: Task, kind: str, want: bool) -> None:
        async with slots:
            view.running += 1
            view.now(task.name, f"{kind}: rolling out")
            diff = await roll_out(client, task, kind, images, figures, networked=networked)
            view.now(task.name, f"{kind}: grading")
            async with await open_sandbox(
                client, task, images, figures, phase=network.GRADE, networked=networked
            ) as sb:
                verdict = await grader.grade(sb, task, diff)
            view.running -= 1
            right = (verdict.kind == "passed") == want
            text = f"{verdict.kind}: {verdict.reason}"
            if verdict.refused:
                text += f"; refused {', '.join(verdict.refused)}"
            if kind == "network":
                text += "; " + network.summary([o for o in figures.network if o.task == task.name])
            view.verdict(task.name, kind, right, text)
            records.append(
                {"task": task.name, "patch": kind, "verdict": verdict.kind, "reason": verdict.reason, "right": right}
            )

    await asyncio.gather(*(one(*item) for item in work))
    seconds = time.monotonic() - began
    rate = (len(figures.creates) - shown) / seconds
    right = sum(r["right"] for r in records)
    memory = sum(figures.memory) / max(1, len(figures.memory))
    print(
        f"\ncreates {len(figures.creates)}, {rate:.1f}/s while rolling out, "
        f"p50 {_ms(figures.creates, 50)}, p99 {_ms(figures.creates, 99)}; "
        f"first command p50 {_ms(figures.first_commands, 50)}; "
        f"{memory / 2**20:.1f} MiB a sandbox; {images.shared_bytes / 2**30:.2f} GiB shared"
    )
    return {
        "schema": "sandsea.demo/1",
        "sandboxes": figures.sandboxes,
        "right": right,
        "wrong": len(records) - right,
        "verdicts": records,
        "rollout_seconds": round(seconds, 1),
        "create_ms": {p: round(_rank(figures.creates, p) * 1000, 2) for p in (50, 90, 99, 100)},
        "first_command_ms": {p: round(_rank(figures.first_commands, p) * 1000, 2) for p in (50, 90, 99, 100)},
        "creates_per_second": round(rate, 1),
        "memory_bytes_per_sandbox": round(memory),
        "shared_bytes": images.shared_bytes,
    }


def _rank(samples: list[float], percent: int) -> float:
    """Nearest rank."""
    ordered = sorted(samples) or [0.0]
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _ms(samples: list[float], percent: int) -> str:
    return f"{_rank(samples, percent) * 1000:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
