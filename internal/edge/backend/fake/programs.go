package fake

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/tty"
)

// Program is what a command does; its result is the exit code. It must return soon after Ctx ends.
type Program func(p *Proc) int

// Proc is what a program sees.
type Proc struct {
	Ctx    context.Context
	Argv   []string
	Env    []string
	Cwd    string
	IDs    chronus.IDs
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Fork runs f as a child with the same descriptors; the child outlives its parent.
	Fork func(f func(p *Proc) int)
	// OOM is an out-of-memory kill of this process.
	OOM func()
	// Signals receives TERM and INT when the program asked for them by setting it.
	Trap func() <-chan syscall.Signal
}

// task is one process.
type task struct {
	b       *box
	number  int64
	main    bool
	cancel  context.CancelCauseFunc
	started time.Time
	gone    chan struct{}
	mu      sync.Mutex
	files   []*os.File          // guarded by mu
	sig     syscall.Signal      // guarded by mu: what killed it
	trap    chan syscall.Signal // guarded by mu
}

// kill ends a task and closes its descriptors, which frees it from any read or write.
func (t *task) kill(sig syscall.Signal) {
	t.mu.Lock()
	if t.sig == 0 {
		t.sig = sig
	}
	t.mu.Unlock()
	t.cancel(errors.New("the process ended"))
	for _, f := range t.files {
		_ = f.Close()
	}
}

// signal delivers a signal that may be caught.
func (t *task) signal(sig syscall.Signal) {
	t.mu.Lock()
	trap := t.trap
	t.mu.Unlock()
	if trap != nil && sig != syscall.SIGKILL {
		select {
		case trap <- sig:
		default:
		}
		return
	}
	switch sig {
	case 0, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGWINCH, syscall.SIGCONT:
	default:
		t.kill(sig)
	}
}

// reopen gives a descriptor of the same pipe or terminal that Go can wait on, whoever closes the one given.
func reopen(f *os.File, flag int) (*os.File, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var out *os.File
	err2 := conn.Control(func(fd uintptr) {
		out, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), flag|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	})
	return out, errors.Join(err, err2)
}

func openStdio(io chronus.Stdio) ([]*os.File, error) {
	var out []*os.File
	for i, f := range []*os.File{io.In, io.Out, io.Err} {
		if i == 2 && f == nil {
			f = io.Out
		}
		flag := syscall.O_WRONLY
		if i == 0 {
			flag = syscall.O_RDONLY
		}
		re, err := reopen(f, flag)
		if err != nil {
			for _, o := range out {
				_ = o.Close()
			}
			return nil, err
		}
		out = append(out, re)
	}
	return out, nil
}

// startTask begins a process; files become its own.
func (b *box) startTask(s chronus.Spawn, main bool, run Program, files []*os.File) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	t := &task{
		b: b, number: s.Number, main: main, cancel: cancel, gone: make(chan struct{}), files: files,
		started: time.Now(),
	}
	b.mu.Lock()
	if b.dead {
		b.mu.Unlock()
		cancel(nil)
		for _, f := range files {
			_ = f.Close()
		}
		return errors.New("PID 1 is gone")
	}
	g := b.groups[s.Number]
	if g == nil {
		g = &group{tasks: map[*task]struct{}{}}
		b.groups[s.Number] = g
	}
	g.tasks[t] = struct{}{}
	if main {
		b.pid++
		b.begun[s.Number] = chronus.Process{Number: s.Number, Pid: 100 + b.pid}
	}
	b.wg.Add(1)
	b.mu.Unlock()
	p := &Proc{
		Ctx: ctx, Argv: s.Argv, Env: s.Env, Cwd: s.Cwd, IDs: s.IDs,
		Stdin: files[0], Stdout: files[1], Stderr: files[2],
		Fork: func(f func(*Proc) int) { b.fork(s, f, files) },
		OOM: func() {
			b.mu.Lock()
			b.ooms++
			b.mu.Unlock()
			t.kill(syscall.SIGKILL)
		},
		Trap: func() <-chan syscall.Signal {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.trap = make(chan syscall.Signal, 16)
			return t.trap
		},
	}
	go t.run(p, run)
	return nil
}

func (b *box) fork(s chronus.Spawn, f Program, files []*os.File) {
	var own []*os.File
	for i, file := range files {
		flag := syscall.O_WRONLY
		if i == 0 {
			flag = syscall.O_RDONLY
		}
		re, err := reopen(file, flag)
		if err != nil {
			return
		}
		own = append(own, re)
	}
	_ = b.startTask(s, false, f, own)
}

func (t *task) run(p *Proc, run Program) {
	b := t.b
	defer b.wg.Done()
	code := run(p)
	t.cancel(errors.New("the process ended"))
	for _, f := range t.files {
		_ = f.Close()
	}
	t.mu.Lock()
	status := syscall.WaitStatus(code&0xff) << 8
	if t.sig != 0 {
		status = syscall.WaitStatus(t.sig)
	}
	t.mu.Unlock()
	b.mu.Lock()
	g := b.groups[t.number]
	delete(g.tasks, t)
	g.cpu += time.Millisecond
	var l *line
	if t.main {
		delete(b.begun, t.number)
	}
	if t.main && !b.dead { // nobody is left who would tell
		b.exits[t.number] = chronus.Exit{
			Number: t.number, Status: status, CPU: time.Millisecond, MaxRSS: 1 << 20, Wall: time.Since(t.started),
		}
		b.order = append(b.order, t.number)
		l = b.line
	}
	close(t.gone)
	b.mu.Unlock()
	if l != nil {
		l.wake()
	}
}

// lookup answers how exec would: *chronus.StartError when there is no such program.
func (b *box) lookup(s chronus.Spawn) (Program, error) {
	fail := func(step chronus.Step, errno syscall.Errno, interp bool) error {
		return &chronus.StartError{Step: step, Errno: errno, Interpreter: interp}
	}
	if strings.HasPrefix(s.Cwd, "/missing") {
		return nil, fail(chronus.StepCwd, syscall.ENOENT, false)
	}
	for _, a := range s.Argv {
		if len(a) > 131071 {
			return nil, fail(chronus.StepExec, syscall.E2BIG, false)
		}
	}
	switch s.Argv[0] {
	case "/etc/passwd":
		return nil, fail(chronus.StepExec, syscall.EACCES, false)
	case "/bad-interpreter":
		return nil, fail(chronus.StepExec, syscall.ENOENT, true)
	case "/no-more-pids":
		return nil, fail(chronus.StepFork, syscall.EAGAIN, false)
	}
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	p, ok := b.w.programs[s.Argv[0]]
	if !ok {
		return nil, fail(chronus.StepExec, syscall.ENOENT, false)
	}
	return p, nil
}

func pause(ctx context.Context, seconds string) {
	s, _ := strconv.ParseFloat(seconds, 64)
	timer := time.NewTimer(time.Duration(s * float64(time.Second)))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// programs are there in every World:
//
//	true; false; exit N; echo WORDS; err WORDS; cat; env; pwd; id; sleep SECONDS
//	abc           writes a to stdout, b to stderr, c to stdout
//	bytes N       writes N bytes of a known pattern (see Pattern)
//	count         reads its input and says how many bytes there were
//	background S  forks a child that holds the output for S seconds and then says "late"; exits at once
//	tree S        forks two children and sleeps S seconds
//	trap S        answers TERM with "caught" and goes on for S seconds
//	oom           is killed for want of memory
//	die SIGNAL    is killed by that signal number
//	tick N S      writes N lines, one every S seconds
//	size          says the size of the terminal that its input is, again whenever a line comes, until "end"
func programs() map[string]Program {
	return map[string]Program{
		"true":  func(*Proc) int { return 0 },
		"false": func(*Proc) int { return 1 },
		"exit": func(p *Proc) int {
			n, _ := strconv.Atoi(p.Argv[1])
			return n
		},
		"echo": func(p *Proc) int { return say(p.Stdout, strings.Join(p.Argv[1:], " ")+"\n") },
		"err":  func(p *Proc) int { return say(p.Stderr, strings.Join(p.Argv[1:], " ")+"\n") },
		"cat": func(p *Proc) int {
			if _, err := io.Copy(struct{ io.Writer }{p.Stdout}, struct{ io.Reader }{p.Stdin}); err != nil {
				return 1
			}
			return 0
		},
		"env": func(p *Proc) int { return say(p.Stdout, strings.Join(slices.Sorted(slices.Values(p.Env)), "\n")+"\n") },
		"pwd": func(p *Proc) int { return say(p.Stdout, p.Cwd+"\n") },
		"id": func(p *Proc) int {
			return say(p.Stdout, fmt.Sprintln(p.IDs.UID, p.IDs.GID, p.IDs.Groups))
		},
		"sleep": func(p *Proc) int {
			pause(p.Ctx, p.Argv[1])
			return 0
		},
		"abc": func(p *Proc) int {
			return say(p.Stdout, "a\n") + say(p.Stderr, "b\n") + say(p.Stdout, "c\n")
		},
		"bytes": func(p *Proc) int {
			n, _ := strconv.ParseInt(p.Argv[1], 10, 64)
			for off := int64(0); off < n; {
				part := Pattern(off, int(min(n-off, 64<<10)))
				if _, err := p.Stdout.Write(part); err != nil {
					return 1
				}
				off += int64(len(part))
			}
			return 0
		},
		"count": func(p *Proc) int {
			n, err := io.Copy(io.Discard, p.Stdin)
			if err != nil {
				return 1
			}
			return say(p.Stdout, fmt.Sprintln(n))
		},
		"background": func(p *Proc) int {
			p.Fork(func(p *Proc) int {
				pause(p.Ctx, p.Argv[1])
				return say(p.Stdout, "late\n")
			})
			return say(p.Stdout, "hi\n")
		},
		"tree": func(p *Proc) int {
			for range 2 {
				p.Fork(func(p *Proc) int { pause(p.Ctx, p.Argv[1]); return 0 })
			}
			say(p.Stdout, "so far\n")
			pause(p.Ctx, p.Argv[1])
			return 0
		},
		"trap": func(p *Proc) int {
			signals := p.Trap()
			say(p.Stdout, "ready\n")
			s, _ := strconv.ParseFloat(p.Argv[1], 64)
			timer := time.NewTimer(time.Duration(s * float64(time.Second)))
			defer timer.Stop()
			for {
				select {
				case sig := <-signals:
					say(p.Stdout, fmt.Sprintf("caught %d\n", int(sig)))
				case <-timer.C:
					return 0
				case <-p.Ctx.Done():
					return 0
				}
			}
		},
		"size": size,
		"oom":  func(p *Proc) int { p.OOM(); <-p.Ctx.Done(); return 0 },
		"tick": func(p *Proc) int {
			n, _ := strconv.Atoi(p.Argv[1])
			for i := range n {
				if say(p.Stdout, fmt.Sprintln("tick", i)) != 0 {
					return 1
				}
				if pause(p.Ctx, p.Argv[2]); p.Ctx.Err() != nil {
					return 1
				}
			}
			return 0
		},
	}
}

func size(p *Proc) int {
	f, ok := p.Stdin.(*os.File)
	if !ok {
		return 1
	}
	for lines := bufio.NewScanner(f); ; {
		s, err := tty.GetSize(f)
		if err != nil {
			return say(p.Stderr, "not a terminal\n") + 1
		}
		if say(p.Stdout, fmt.Sprintln(s.Columns, s.Rows)) != 0 || !lines.Scan() || lines.Text() == "end" {
			return 0
		}
	}
}

func say(w io.Writer, s string) int {
	if _, err := io.WriteString(w, s); err != nil {
		return 1
	}
	return 0
}

// Pattern is n bytes of an endless text whose every place can be told, from offset off.
func Pattern(off int64, n int) []byte {
	var b bytes.Buffer
	for line := off / 16; b.Len() < n+16; line++ {
		fmt.Fprintf(&b, "%015d\n", line)
	}
	skip := int(off % 16)
	return b.Bytes()[skip : skip+n]
}
