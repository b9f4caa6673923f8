"""What a command left."""

from __future__ import annotations

import dataclasses

from . import _models as m
from .errors import CommandFailed, CommandTimeout, InfraError, OutputLimitExceeded, start_failed


@dataclasses.dataclass(frozen=True)
class Result:
    """How a command ended, and what it wrote.

    `exit_code` is the command's own; 128 + signal after a signal, 124 after its time limit, 126 or 127 when it could
    not be started. The platform's own failures are never a Result: they raise `InfraError`.
    """

    exit_code: int
    stdout: str
    stderr: str
    stdout_bytes: bytes = dataclasses.field(repr=False)
    stderr_bytes: bytes = dataclasses.field(repr=False)
    #: completed, signal, timeout, oom or start_failure
    cause: str
    sandbox: str = ""
    number: int = 0
    argv: tuple[str, ...] = ()
    signal: str | None = None
    timed_out: bool = False
    oom: bool = False
    #: bytes that the command wrote are missing from this stdout or stderr
    truncated: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    #: why the command never ran (not_found, not_executable, ...), or None
    start_failure: str | None = None
    start_message: str | None = None
    start_errno: int = 0
    #: bytes that the command ever wrote to each stream
    stdout_total: int = 0
    stderr_total: int = 0
    #: overflow was "fail" and a stream grew beyond the limit
    output_exceeded: bool = False
    #: the answer was recorded by an earlier call with the same key
    replayed: bool = False
    #: in a shell session: the script could not be parsed and nothing of it was run
    syntax_error: bool = False
    #: in a shell session: the session is as it was before this command
    state_lost: bool = False

    def check(self) -> Result:
        """Return self, or raise CommandFailed when the exit code is not 0.

        It is CommandTimeout after a time limit, StartFailed when the command never ran, and OutputLimitExceeded,
        whatever the exit code, when overflow="fail" was asked for and there was more.
        """
        if self.exit_code == 0 and not self.output_exceeded:
            return self
        last = (self.start_message or self.stderr.strip() or self.stdout.strip()).rsplit("\n", 1)[-1][:200]
        line = self.argv[2] if len(self.argv) == 3 and self.argv[1] == "-c" else " ".join(self.argv)
        name = line.strip().split("\n", 1)[0]
        name = name if len(name) <= 80 else name[:77] + "..."
        if self.timed_out:
            raise CommandTimeout(f"`{name}` timed out after {self.wall_seconds:.1f} s in {self.sandbox[:8]}", self)
        if self.start_failure:
            raise start_failed(f"`{name}` never ran in {self.sandbox[:8]}: {last}", self)
        if self.output_exceeded:
            total = max(self.stdout_total, self.stderr_total)
            raise OutputLimitExceeded(f"`{name}` wrote {total} bytes in {self.sandbox[:8]}. Raise max_output", self)
        raise CommandFailed(f"`{name}` exited {self.exit_code} in {self.sandbox[:8]}: {last}", self)

    def __repr__(self) -> str:
        return f"<Result exit={self.exit_code} {self.wall_seconds:.1f}s>"


def make(
    sandbox: str,
    process: m.Process,
    stdout: bytes,
    stderr: bytes,
    *,
    cut: bool,
    errors: str,
    argv: tuple[str, ...],
    exceeded: bool = False,
    syntax_error: bool = False,
    state_lost: bool = False,
) -> Result:
    """Make the Result of an ended process. `cut` and `exceeded` are what the reader knows beyond the record."""
    r = process.result or m.Result()
    if r.infra_error:
        raise InfraError(f"sandbox {sandbox[:8]}: {r.infra_error}. Platform fault, not the command's")
    failure = r.start_failure.kind if r.start_failure else None
    cause = (
        "start_failure"
        if failure
        else "timeout"
        if r.timed_out
        else "oom"
        if r.oom
        else "signal"
        if r.signal
        else "completed"
    )
    return Result(
        exit_code=r.exit_code,
        stdout=stdout.decode(errors=errors),
        stderr=stderr.decode(errors=errors),
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        cause=cause,
        sandbox=sandbox,
        number=process.number,
        argv=argv,
        signal=r.signal_name or None,
        timed_out=r.timed_out,
        oom=r.oom,
        truncated=cut or r.truncated,
        wall_seconds=r.wall_us / 1e6,
        cpu_seconds=r.cpu_us / 1e6,
        peak_memory_bytes=r.peak_memory_bytes,
        start_failure=failure,
        start_message=r.start_failure.message if r.start_failure else None,
        start_errno=r.start_failure.errno if r.start_failure else 0,
        stdout_total=r.stdout_bytes,
        stderr_total=r.stderr_bytes,
        output_exceeded=exceeded or r.output_exceeded,
        replayed=r.replayed,
        syntax_error=syntax_error,
        state_lost=state_lost,
    )
