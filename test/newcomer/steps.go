package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/testkit/output"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	// readyLimit bounds a start of the platform, stepLimit one command, importLimit the image's import.
	readyLimit  = 60 * time.Second
	stepLimit   = 2 * time.Minute
	importLimit = 20 * time.Minute
	buildLimit  = 40 * time.Minute
	// nobody is who has no rights.
	nobody = 65534
)

// debianPackages are those of the end-to-end tests' image too, so that a machine makes it once.
var debianPackages = []string{"python3-minimal", "python3-pip", "sudo", "procps"}

// newcomer is somebody with a README.
type newcomer struct {
	source, binary, python string
	say                    func(format string, args ...any)

	home   string // everything of ours
	tree   string // the clone, or the repository
	readme string
	env    []string
	daemon *exec.Cmd
	gone   chan struct{} // closed when daemon has ended
	log    output.Buffer
	path   time.Duration // from the clone to the first output, by what leads there
}

func (n *newcomer) short() bool { return n.binary != "" }

func (n *newcomer) data() string { return filepath.Join(n.home, "data") }

// arrive makes a place for everything, so that a platform that runs on this machine is not disturbed: the settings that the
// README names lead there.
func (n *newcomer) arrive(ctx context.Context) error {
	var err error
	if n.home, err = os.MkdirTemp("", "sandsea-newcomer-"); err != nil {
		return err
	}
	if err := os.Chmod(n.home, 0o755); err != nil {
		return err
	}
	addr, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	n.env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "SANDSEA_") || strings.HasPrefix(kv, "HOME=") || strings.HasPrefix(kv, "TERM=")
	})
	n.env = append(n.env, "SANDSEA_DATA="+n.data(), "SANDSEA_LISTEN="+addr, "SANDSEA_URL=http://"+addr,
		"SANDSEA_TOKEN_FILE="+filepath.Join(n.data(), "admin.token"), "TERM=xterm", "HOME="+os.Getenv("HOME"))
	n.tree = filepath.Join(n.home, "sandsea")
	return nil
}

// freeAddress is one that nobody listens on.
func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// leave ends what a failed step left, and removes all of ours.
func (n *newcomer) leave() error {
	if n.home == "" {
		return nil
	}
	var errs []error
	if n.daemon != nil {
		ctx, stop := context.WithTimeoutCause(context.Background(), stepLimit, errors.New("down took too long"))
		defer stop()
		if out := n.sh(ctx, "sudo build/sandsea down --yes"); out.code != 0 {
			errs = append(errs, fmt.Errorf("down: %s", out))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(n.home))...)
}

// line is the README's line that begins so.
func (n *newcomer) line(begins string) (string, error) {
	for block := range strings.SplitSeq(n.readme, "```") {
		for l := range strings.Lines(block) {
			l = strings.TrimSpace(l)
			if l == begins || strings.HasPrefix(l, begins+" ") || strings.HasPrefix(l, begins+"\t") {
				return l, nil
			}
		}
	}
	return "", fmt.Errorf("the README does not say %q", begins)
}

// listings are the README's blocks of Python.
func (n *newcomer) listings() []string {
	var out []string
	for _, m := range regexp.MustCompile("(?s)```python\n(.*?)```").FindAllStringSubmatch(n.readme, -1) {
		out = append(out, m[1])
	}
	return out
}

// outcome is how a command went.
type outcome struct {
	stdout, stderr string
	code           int
	took           time.Duration
}

func (o outcome) String() string {
	return fmt.Sprintf("exit %d, stdout %q, stderr %q", o.code, clip(o.stdout), clip(o.stderr))
}

func clip(s string) string { return s[:min(len(s), 2000)] }

// command is a shell line in the clone. Root is its own sudo where there is none.
func (n *newcomer) command(ctx context.Context, line string) *exec.Cmd {
	const sudo = `command -v sudo >/dev/null || sudo() { "$@"; }; `
	cmd := exec.CommandContext(ctx, "bash", "-c", sudo+line)
	cmd.Dir, cmd.Env = n.tree, n.env
	return cmd
}

// sh runs a line that need not be the README's.
func (n *newcomer) sh(ctx context.Context, line string) outcome {
	cmd := n.command(ctx, line)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	began := time.Now()
	err := cmd.Run()
	o := outcome{out.String(), errs.String(), cmd.ProcessState.ExitCode(), time.Since(began)}
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		o.stderr += err.Error()
	}
	return o
}

// does runs the README's line that begins so, with more variables, and wants an exit code.
func (n *newcomer) does(ctx context.Context, limit time.Duration, begins string, code int, vars ...string) (outcome, error) {
	line, err := n.line(begins)
	if err != nil {
		return outcome{}, err
	}
	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s took more than %s", begins, limit))
	defer stop()
	o := n.sh(ctx, strings.Join(append(vars, line), "\n"))
	if o.code != code {
		return o, fmt.Errorf("%s: want exit %d, got %s", begins, code, o)
	}
	return o, nil
}

// clone is step 1.
func (n *newcomer) clone(ctx context.Context) error {
	source, err := filepath.Abs(n.source)
	if err != nil {
		return err
	}
	if n.short() {
		n.tree = source
		if n.binary, err = filepath.Abs(n.binary); err != nil {
			return err
		}
		if n.binary != filepath.Join(n.tree, "build/sandsea") {
			return fmt.Errorf("%s is not the build/sandsea that the README speaks of", n.binary)
		}
	} else {
		began := time.Now()
		if out, err := exec.CommandContext(ctx, "git", "clone", "-q", source, n.tree).CombinedOutput(); err != nil {
			return fmt.Errorf("git clone: %w: %s", err, out)
		}
		n.path = time.Since(began)
	}
	text, err := os.ReadFile(filepath.Join(n.tree, "README.md"))
	if err != nil {
		return err
	}
	n.readme = string(text)
	if n.short() {
		return nil
	}
	o, err := n.does(ctx, buildLimit, "make build", 0)
	if err != nil {
		return err
	}
	n.path += o.took
	if o, err = n.does(ctx, buildLimit, "make demo", 0); err != nil {
		return err
	}
	if !regexp.MustCompile(`(?m)^demo: ok `).MatchString(o.stdout) {
		return fmt.Errorf("make demo: %s", o)
	}
	return nil
}

// up is step 2: without root it says how, and as told it works.
func (n *newcomer) up(ctx context.Context) error {
	binary, err := os.ReadFile(filepath.Join(n.tree, "build/sandsea"))
	if err != nil {
		return err
	}
	// Where everybody may go: the clone may lie in root's own home.
	if err := os.WriteFile(filepath.Join(n.home, "sandsea.nobody"), binary, 0o755); err != nil {
		return err
	}
	cmd := n.command(ctx, "./sandsea.nobody up")
	cmd.Dir, cmd.Env = n.home, append(slices.Clone(n.env), "HOME=/")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, _ := cmd.CombinedOutput()
	_, told, ok := strings.Cut(strings.TrimSpace(string(out)), "up needs root, clients do not. Run: ")
	if !ok || cmd.ProcessState.ExitCode() != 1 || told != "sudo sandsea up" {
		return fmt.Errorf("without root: exit %d, %s", cmd.ProcessState.ExitCode(), out)
	}
	took, err := n.start(ctx)
	n.path += took
	return err
}

// start runs the README's up until it is ready.
func (n *newcomer) start(ctx context.Context) (time.Duration, error) {
	line, err := n.line("sudo build/sandsea up")
	if err != nil {
		return 0, err
	}
	began := time.Now()
	n.daemon = n.command(context.WithoutCancel(ctx), "exec "+strings.TrimPrefix(line, "sudo "))
	out, in := io.Pipe()
	n.daemon.Stdout, n.daemon.Stderr = in, &n.log
	n.daemon.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := n.daemon.Start(); err != nil {
		return 0, err
	}
	gone, ready := make(chan struct{}), make(chan struct{})
	n.gone = gone
	go func(cmd *exec.Cmd) {
		_ = cmd.Wait()
		_ = in.Close()
		close(gone)
	}(n.daemon)
	go func() {
		said := ""
		buf := make([]byte, 1024)
		for {
			k, err := out.Read(buf)
			before := strings.Contains(said, "ready http://")
			said += string(buf[:k])
			if !before && strings.Contains(said, "ready http://") {
				close(ready)
			}
			if err != nil {
				return
			}
		}
	}()
	select {
	case <-ready:
		return time.Since(began), nil
	case <-gone:
		return 0, fmt.Errorf("up ended: %s", clip(n.log.String()))
	case <-time.After(readyLimit):
		return 0, fmt.Errorf("up is not ready after %s: %s", readyLimit, clip(n.log.String()))
	}
}

const (
	importLine = "sudo build/sandsea image import debian:bookworm --include python3,git"
	helloLine  = `sudo build/sandsea run -- python3 -c 'print("hello")'`
)

// tooEarly is step 3: the error names the README's next line.
func (n *newcomer) tooEarly(ctx context.Context) error {
	o, err := n.does(ctx, stepLimit, helloLine, 125)
	if err != nil {
		return err
	}
	hint := strings.TrimPrefix(importLine, "sudo build/")
	if !strings.HasSuffix(strings.TrimSpace(o.stderr), hint) || o.stdout != "" {
		return fmt.Errorf("the way out is not %q: %s", hint, o)
	}
	return nil
}

// importImage is step 4. In short form the image comes from this machine's cache.
func (n *newcomer) importImage(ctx context.Context) error {
	line, err := n.line(importLine)
	if err != nil {
		return err
	}
	if n.short() {
		file, err := server.Debian(ctx, debianPackages...)
		if err != nil {
			return fmt.Errorf("an image without a download: %w", err)
		}
		line = fmt.Sprintf("sudo build/sandsea image import rootfs:%s --name debian:bookworm+git,python3", file)
	} else if err := n.mistakes(ctx, line); err != nil {
		return err
	}
	ctx, stop := context.WithTimeoutCause(ctx, importLimit, fmt.Errorf("the import took more than %s", importLimit))
	defer stop()
	o := n.sh(ctx, line)
	if o.code != 0 || !strings.HasPrefix(o.stdout, "sha256:") {
		return fmt.Errorf("%s: %s", line, o)
	}
	n.path += o.took
	hello, err := n.does(ctx, stepLimit, helloLine, 0)
	if err == nil && hello.stdout != "hello\n" {
		err = fmt.Errorf("%s: %s", helloLine, hello)
	}
	n.path += hello.took
	return err
}

// mistakes are those of an import: a name that is not right, and Ctrl-C midway.
func (n *newcomer) mistakes(ctx context.Context, line string) error {
	if o := n.sh(ctx, strings.Replace(line, "python3", "pyton3", 1)); o.code != 1 || !strings.Contains(o.stderr, "no package pyton3. Did you mean python3?") {
		return fmt.Errorf("a typo: %s", o)
	}
	cmd := n.command(ctx, "exec "+strings.TrimPrefix(line, "sudo "))
	var said output.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return err
	}
	if !wait.For(importLimit, func() bool { return strings.Contains(said.String(), "download") }) {
		return fmt.Errorf("the import never downloads: %s", said.String())
	}
	_ = cmd.Process.Signal(os.Interrupt)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(said.String(), "interrupted: no image was made") {
		return fmt.Errorf("Ctrl-C in an import: exit %d, %s", code, said.String())
	}
	if o := n.sh(ctx, "sudo build/sandsea image ls"); o.stdout != "" {
		return fmt.Errorf("after Ctrl-C: %s", o)
	}
	return nil
}

// network is step 5: a sandbox has no way out, its log says what to do, and then packages come as they were on a day. The
// short form looks at the first half only.
func (n *newcomer) network(ctx context.Context) error {
	o := n.sh(ctx, "id=$(sudo build/sandsea create) && sudo build/sandsea net log $id; sudo build/sandsea stop $id")
	if o.code != 0 || !strings.Contains(o.stderr, "Let something out: sandsea net set s") {
		return fmt.Errorf("the log of a sandbox without a network: %s", o)
	}
	if n.short() {
		return nil
	}
	if _, err := n.does(ctx, importLimit, "sudo build/sandsea image import debian:bookworm --include python3,python3-pip", 0); err != nil {
		return err
	}
	create, err := n.line("id=$(sudo build/sandsea create --image pip")
	if err != nil {
		return err
	}
	install, err := n.line("sudo build/sandsea exec $id -- pip install")
	if err != nil {
		return err
	}
	o = n.sh(ctx, "id=$(sudo build/sandsea create --image pip)\n"+install+"\nsudo build/sandsea stop $id >&2")
	if strings.Contains(o.stdout, "Successfully installed") {
		return fmt.Errorf("there is a way out of the sandbox: %s", o)
	}
	o = n.sh(ctx, create+"\necho $id")
	vars := "id=" + strings.TrimSpace(o.stdout)
	for _, tt := range []struct {
		begins string
		code   int
		text   string
	}{
		{"sudo build/sandsea exec $id -- pip install", 0, "flask-3.0.3"},
		{"sudo build/sandsea exec $id -- python3", 1, ""},
		{"sudo build/sandsea net log $id", 0, "example.org"},
		{"sudo build/sandsea net check $id", 0, "2024-06-01"},
		{"sudo build/sandsea endpoint $id", 0, "Sandsea-Endpoint-Token: "},
	} {
		o, err := n.does(ctx, stepLimit, tt.begins, tt.code, vars)
		if err != nil {
			return err
		}
		if !strings.Contains(o.stdout, tt.text) {
			return fmt.Errorf("%s does not say %q: %s", tt.begins, tt.text, o)
		}
	}
	if o := n.sh(ctx, vars+"\nsudo build/sandsea stop $id && sudo build/sandsea image rm pip"); o.code != 0 {
		return fmt.Errorf("clean up: %s", o)
	}
	return nil
}

// limits is step 6: memory, time and output are told apart by text, exit code and JSON.
func (n *newcomer) limits(ctx context.Context) error {
	for _, tt := range []struct {
		begins string
		code   int
		text   string
		json   map[string]any
	}{
		{"sudo build/sandsea run --memory 64M", 137, "out of memory, limit 64 MiB. Raise --memory (exit 137)", map[string]any{"oom": true, "timed_out": false, "cause": "oom"}},
		{"sudo build/sandsea run --timeout 2s", 124, "timed out after 2 s, all its processes ended. Raise --timeout (exit 124)", map[string]any{"oom": false, "timed_out": true, "cause": "timeout"}},
		{"sudo build/sandsea run --output 1M --json", 0, "", map[string]any{"truncated": true, "cause": "completed"}},
	} {
		o, err := n.does(ctx, stepLimit, tt.begins, tt.code)
		if err != nil {
			return err
		}
		if !strings.Contains(o.stderr, tt.text) {
			return fmt.Errorf("%s does not say %q: %s", tt.begins, tt.text, o)
		}
		line, err := n.line(tt.begins)
		if err != nil {
			return err
		}
		if !strings.Contains(line, "--json") {
			o = n.sh(ctx, strings.Replace(line, " run ", " run --json ", 1))
		}
		var doc map[string]any
		if err := json.Unmarshal([]byte(o.stdout), &doc); err != nil || o.code != tt.code {
			return fmt.Errorf("%s --json: %w, %s", tt.begins, err, o)
		}
		for k, v := range tt.json {
			if doc[k] != v {
				return fmt.Errorf("%s --json: %s is %v, want %v", tt.begins, k, doc[k], v)
			}
		}
	}
	return nil
}

// session is step 7.
func (n *newcomer) session(ctx context.Context) error {
	create, err := n.line(`id=$(sudo build/sandsea create`)
	if err != nil {
		return err
	}
	o := n.sh(ctx, create+"\necho $id")
	id := strings.TrimSpace(o.stdout)
	if !regexp.MustCompile(`^s[0-9a-z]{26}$`).MatchString(id) {
		return fmt.Errorf("%s: %s", create, o)
	}
	vars := "id=" + id
	if _, err := n.does(ctx, stepLimit, "sudo build/sandsea exec $id", 0, vars); err != nil {
		return err
	}
	if err := n.shell(ctx, vars); err != nil {
		return err
	}
	for _, begins := range []string{
		"sudo build/sandsea cp README.md", "sudo build/sandsea cp $id:/tmp/f", "sudo build/sandsea logs", "sudo build/sandsea top", "sudo build/sandsea stop $id",
	} {
		if _, err := n.does(ctx, stepLimit, begins, 0, vars); err != nil {
			return err
		}
	}
	defer os.Remove("/tmp/f")
	if got, err := os.ReadFile("/tmp/f"); err != nil || string(got) != "state\n" {
		return fmt.Errorf("what cp brought back is %q, %w", got, err)
	}
	return nil
}

// shell opens the shell on a terminal, kills its client and comes back to it.
func (n *newcomer) shell(ctx context.Context, vars string) error {
	first, err := n.person(ctx, "sudo build/sandsea shell", vars)
	if err != nil {
		return err
	}
	if err := first.says("marker=before; echo ready-$((40 + 2))\r", "ready-42"); err != nil {
		return err
	}
	if err := first.cmd.Process.Kill(); err != nil {
		return err
	}
	_, _ = first.ends()
	second, err := n.person(ctx, "sudo build/sandsea exec --attach 2", vars)
	if err != nil {
		return err
	}
	if err := second.says("echo still-$marker\r", "still-before"); err != nil {
		return err
	}
	if err := second.says("exit 5\r", ""); err != nil {
		return err
	}
	if code, text := second.ends(); code != 5 {
		return fmt.Errorf("come back: exit %d, %s", code, clip(text))
	}
	return nil
}

// person is somebody at a terminal.
type person struct {
	cmd  *exec.Cmd
	pty  *os.File
	seen output.Buffer
	done chan struct{}
}

// person runs the README's line that begins so on a terminal.
func (n *newcomer) person(ctx context.Context, begins, vars string) (*person, error) {
	line, err := n.line(begins)
	if err != nil {
		return nil, err
	}
	pty, err := tty.Open()
	if err != nil {
		return nil, err
	}
	peer, err := tty.Peer(pty)
	if err != nil {
		return nil, errors.Join(err, pty.Close())
	}
	defer peer.Close()
	if err := tty.SetSize(pty, tty.Size{Columns: 80, Rows: 24}); err != nil {
		return nil, errors.Join(err, pty.Close())
	}
	p := &person{cmd: n.command(ctx, vars+"\nexec "+strings.TrimPrefix(line, "sudo ")), pty: pty, done: make(chan struct{})}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = peer, peer, peer
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, pty.Close())
	}
	go func() {
		defer close(p.done)
		_, _ = io.Copy(&p.seen, pty) // until the program has ended
	}()
	return p, nil
}

// says types text and waits for what it brings.
func (p *person) says(text, want string) error {
	if _, err := io.WriteString(p.pty, text); err != nil {
		return err
	}
	if want == "" || wait.For(stepLimit, func() bool { return strings.Contains(p.seen.String(), want) }) {
		return nil
	}
	return fmt.Errorf("typed %q and never saw %q in %q", text, want, clip(p.seen.String()))
}

func (p *person) ends() (int, string) {
	_ = p.cmd.Wait()
	<-p.done
	_ = p.pty.Close()
	return p.cmd.ProcessState.ExitCode(), p.seen.String()
}

// notebook runs a listing as a notebook does: await is allowed at its top.
const notebook = `
import ast, asyncio, sys
code = compile(sys.stdin.read(), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
async def main():
    result = eval(code, {"__name__": "__main__"})
    if result is not None:
        await result
asyncio.run(main())
`

// sdk is step 8.
func (n *newcomer) sdk(ctx context.Context) error {
	python := n.python
	if !n.short() {
		for _, begins := range []string{"python3 -m venv venv", "venv/bin/pip install ./sdk/python"} {
			if _, err := n.does(ctx, buildLimit, begins, 0); err != nil {
				return err
			}
		}
		python = filepath.Join(n.tree, "venv/bin/python")
	}
	if python == "" {
		n.say("    no Python with the SDK here (-python): left out")
		return nil
	}
	list := n.listings()
	if len(list) < 2 {
		return fmt.Errorf("the README has %d listings of Python, want a file and a notebook", len(list))
	}
	file, cells := filepath.Join(n.home, "listing.py"), filepath.Join(n.home, "notebook.py")
	for name, text := range map[string]string{file: list[0], cells: notebook} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	ctx, stop := context.WithTimeoutCause(ctx, stepLimit, errors.New("the SDK took too long"))
	defer stop()
	if o := n.sh(ctx, python+" "+file); o.code != 0 || !regexp.MustCompile(`^0 Python 3\.`).MatchString(o.stdout) {
		return fmt.Errorf("the listing as a file: %s", o)
	}
	cmd := n.command(ctx, python+" "+cells)
	cmd.Stdin = strings.NewReader(list[1])
	if out, err := cmd.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "Python 3.") {
		return fmt.Errorf("the listing in a notebook: %w, %s", err, clip(string(out)))
	}
	return nil
}

// killed is step 9: the daemon dies under a command that runs, and nothing is lost.
func (n *newcomer) killed(ctx context.Context) error {
	cmd := n.command(ctx, "exec build/sandsea run -- sh -c 'i=0; while [ $i -lt 40 ]; do i=$((i + 1)); echo $i; sleep 0.2; done; exit 9'")
	var out, errs output.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		return err
	}
	if !wait.For(stepLimit, func() bool { return strings.Contains(out.String(), "\n5\n") }) {
		return fmt.Errorf("the command does not run: %s", errs.String())
	}
	if err := n.daemon.Process.Kill(); err != nil {
		return err
	}
	<-n.gone
	if _, err := n.start(ctx); err != nil {
		return err
	}
	_ = cmd.Wait()
	var want strings.Builder
	for i := range 40 {
		fmt.Fprintln(&want, i+1)
	}
	if code := cmd.ProcessState.ExitCode(); code != 9 || out.String() != want.String() {
		return fmt.Errorf("lost something: exit %d, %d bytes of %d, %s", code, len(out.String()), want.Len(), errs.String())
	}
	if !strings.Contains(errs.String(), "sandsea: link lost, back in ") {
		return fmt.Errorf("does not say that the link was lost: %s", errs.String())
	}
	return nil
}

// end is step 10.
func (n *newcomer) end(ctx context.Context) error {
	if o := n.sh(ctx, "sudo build/sandsea create --count 3"); o.code != 0 {
		return fmt.Errorf("create: %s", o)
	}
	o, err := n.does(ctx, stepLimit, "sudo build/sandsea stop --all", 2)
	if err != nil {
		return err
	}
	if !strings.Contains(o.stderr, "no terminal to ask on. Add --yes") {
		return fmt.Errorf("stop --all: %s", o)
	}
	if o := n.sh(ctx, "sudo build/sandsea stop --all --yes"); o.code != 0 || !strings.Contains(o.stderr, "stopped ") {
		return fmt.Errorf("stop --all --yes: %s", o)
	}
	if _, err := n.does(ctx, stepLimit, "sudo build/sandsea down", 0); err != nil {
		return err
	}
	<-n.gone
	n.daemon = nil
	return server.Leftovers(n.data())
}
