"""`python -m demo.lists`: find a task's lists of tests anew and write them into tasks/*.json.

Each release's tests run twice in fresh sandboxes: a test that turns must fail on the older release and pass on the
newer one both times, a test that stays must pass all four times. Tests that waver are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import signal

from sandsea import Client

from . import grader
from .images import Images, prepare
from .network import GRADE
from .rollout import Figures, open_sandbox
from .server import up
from .tasks import HERE, Task, load_all, names


async def find(client: Client, task: Task, images: Images) -> tuple[list[str], list[str]]:
    """The tests that turn and those that stay."""
    runs: list[dict[str, str]] = []
    for patch in ("", "", task.true_patch(), task.true_patch()):
        async with await open_sandbox(client, task, images, Figures(), phase=GRADE, networked=False) as sb:
            if patch:
                (await grader.apply(sb, task, patch)).check()
            report = await grader.run_tests(sb, task)
            if not report.canaries_right:
                print(report.result.stdout[-2000:], report.result.stderr[-2000:])
                raise ValueError(f"{task.name}: a canary came out wrong")
            runs.append(report.outcomes)
    names = sorted(set(runs[2]))
    ok = [[r.get(n) == grader.PASSED for r in runs] for n in names]
    f2p = [n for n, o in zip(names, ok, strict=True) if o == [False, False, True, True]]
    p2p = [n for n, o in zip(names, ok, strict=True) if all(o)]
    return f2p, p2p


async def run(url: str, token: pathlib.Path, chosen: list[Task]) -> None:
    async with Client(url, token_file=str(token)) as client:
        images = await prepare(client, chosen, print)
        for task in chosen:
            f2p, p2p = await find(client, task, images)
            path = HERE / "tasks" / f"{task.name}.json"
            doc = json.loads(path.read_text())
            doc["f2p"], doc["p2p"] = f2p, p2p
            path.write_text(json.dumps(doc, indent=1) + "\n")
            print(f"{task.name}: {len(f2p)} turn, {len(p2p)} stay")


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo.lists", description=__doc__)
    parser.add_argument("--binary", type=pathlib.Path, default=pathlib.Path("build/sandsea"))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("build/demo-data"))
    parser.add_argument("--task", action="append", choices=names(), help="only this task")
    args = parser.parse_args()
    # A termination or a lost terminal ends the server too, as ^C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)
    args.data.mkdir(parents=True, exist_ok=True)
    with up(args.binary.resolve(), args.data.resolve()) as (url, token):
        asyncio.run(run(url, token, [t for t in load_all() if not args.task or t.name in args.task]))


if __name__ == "__main__":
    main()
