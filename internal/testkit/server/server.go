// Package server runs the real thing for tests: `sandsea up` with its keeper, spawner and aether on a data directory of its own,
// and a client for it; or, apart, `sandsea server` and `sandsea edge`.
//
// A Server can be killed part by part and started again on the same data. Down ends it with `sandsea down` and reports
// everything that is left: processes, mounts, control groups, loop devices, claims. What a test process that was killed
// left behind is ended by the next one. A Server's methods are for one goroutine; its Client is for all.
package server

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/testkit/output"
	"github.com/sandsea/sandsea/internal/testkit/process"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	readyLimit = 60 * time.Second
	downLimit  = 90 * time.Second
	endLimit   = 40 * time.Second
	goneLimit  = 30 * time.Second
)

// Server is one platform under test.
type Server struct {
	// Dir is the data directory, Tag the part of kernel names that is this server's.
	Dir string
	Tag string
	// Client acts as the admin.
	Client *client.Client
	// Binary is what runs.
	Binary string

	home   string // of Dir and what else is ours; removed by Down
	addr   string // HOST:PORT, the same after a restart
	daemon string // the command: up, server or edge
	netns  string // that the daemon runs in; empty: ours
	config []string
	cmd    *exec.Cmd
	ended  chan struct{} // closed when cmd has been waited for
	log    *output.Buffer
}

// homePrefix begins the directories of servers; the pid of the test process follows.
const homePrefix = "sandsea-test-"

// Config is what a server may need beside the defaults.
type Config struct {
	// TOML is the text of its configuration file.
	TOML string
	// Data is a directory to run on that the caller keeps; empty: a new one.
	Data string
	// Daemon is the command that is run with Args: "server" or "edge"; empty: "up". An edge has no Client.
	Daemon string
	Args   []string
	// Binary is what runs; empty: built from the tree.
	Binary string
	// Aether is the text of DIR/aether.toml; empty: there is none.
	Aether string
	// NetNS is the file of a network namespace that stands for the host's; empty: the test's own. The Client calls from
	// inside it.
	NetNS string
}

// OwnHost is a loopback address that nobody else listens at. A port of it is still free after a restart; one of
// 127.0.0.1 goes to whoever asks for any port meanwhile.
func OwnHost() string {
	return fmt.Sprintf("127.%d.%d.%d", 1+rand.N(254), rand.N(256), 1+rand.N(254))
}

// Launch starts a server and returns when it is ready.
func Launch(ctx context.Context, cfg Config) (_ *Server, err error) {
	sweep(ctx)
	home, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", homePrefix, os.Getpid()))
	if err != nil {
		return nil, err
	}
	s := &Server{home: home, Dir: filepath.Join(home, "data"), addr: OwnHost() + ":0", daemon: cmp.Or(cfg.Daemon, "up"), netns: cfg.NetNS, log: &output.Buffer{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Down(context.WithoutCancel(ctx)))
		}
	}()
	if err := os.Chmod(home, 0o711); err != nil {
		return s, err
	}
	if cfg.Data != "" {
		s.Dir = cfg.Data
	}
	if cfg.Aether != "" {
		if err := os.MkdirAll(s.Dir, 0o700); err != nil {
			return s, err
		}
		if err := os.WriteFile(filepath.Join(s.Dir, "aether.toml"), []byte(cfg.Aether), 0o600); err != nil {
			return s, err
		}
	}
	if cfg.TOML != "" {
		file := filepath.Join(home, "sandsea.toml")
		if err := os.WriteFile(file, []byte(cfg.TOML), 0o644); err != nil {
			return s, err
		}
		s.config = []string{"--config", file}
	}
	s.config = append(s.config, cfg.Args...)
	if s.Binary = cfg.Binary; s.Binary == "" {
		if s.Binary, err = binary(ctx, home); err != nil {
			return s, err
		}
	}
	return s, s.Up(ctx)
}

// Start is Launch for one test, which also takes it down.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	require.Root(t)
	s, err := Launch(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", s.Log())
		}
	})
	return s
}

// Log is what the daemons of this server have said.
func (s *Server) Log() string {
	text := s.log.String()
	for _, name := range []string{"keeper", "spawner", "aether"} {
		if b, err := os.ReadFile(filepath.Join(s.Dir, "run", name+".log")); err == nil && len(b) > 0 {
			text += fmt.Sprintf("--- %s\n%s", name, b)
		}
	}
	return text
}

// Up starts the daemon and returns when it is ready.
func (s *Server) Up(ctx context.Context) error {
	ready, err := s.Begin()
	if err != nil {
		return err
	}
	select {
	case url := <-ready:
		return s.connect(url)
	case <-s.ended:
		return fmt.Errorf("sandsea up ended: %s\n%s", s.cmd.ProcessState, s.Log())
	case <-time.After(readyLimit):
		return fmt.Errorf("sandsea up was not ready within %s\n%s", readyLimit, s.Log())
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Begin starts the daemon and does not wait; ready gets the URL.
func (s *Server) Begin() (ready <-chan string, err error) {
	if s.Running() {
		return nil, errors.New("the daemon runs already")
	}
	args := append([]string{s.daemon, "--data", s.Dir, "--listen", s.addr}, s.config...)
	argv := append([]string{s.Binary}, args...)
	if s.netns != "" { // which it becomes: the process's number stays
		argv = append([]string{"nsenter", "--net=" + s.netns}, argv...)
	}
	s.cmd = exec.Command(argv[0], argv[1:]...) //nolint:noctx // it ends by Down, or by its test
	s.cmd.Stderr = s.log
	s.cmd.Env = environ()
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	// Ctrl-C in a terminal is for the test.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	c := make(chan string, 1)
	s.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		defer close(ended)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if url, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
				c <- url
			}
		}
		_ = cmd.Wait()
	}(s.cmd, s.ended)
	return c, nil
}

func (s *Server) connect(url string) error {
	isNode := strings.HasPrefix(url, "node ") // "node NAME HOST:PORT"
	s.addr = strings.TrimPrefix(url[strings.LastIndexByte(url, ' ')+1:], "http://")
	id, err := os.ReadFile(filepath.Join(s.Dir, "id"))
	if err != nil {
		return err
	}
	s.Tag = string(id[:8])
	if s.Client == nil && !isNode {
		cfg := client.Config{URL: url, TokenFile: filepath.Join(s.Dir, "admin.token")}
		if s.netns != "" {
			cfg.HTTP = &http.Client{Transport: &http.Transport{DialContext: s.dial, MaxIdleConnsPerHost: 64}}
		}
		s.Client, err = client.New(cfg)
	}
	return err
}

// dial connects from inside the daemon's network namespace.
func (s *Server) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	ns, err := netns.Open(s.netns)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return netns.Dial(ctx, ns, network, addr)
}

// Running reports whether the daemon runs.
func (s *Server) Running() bool {
	if s.cmd == nil {
		return false
	}
	select {
	case <-s.ended:
		return false
	default:
		return true
	}
}

// Pid of a part: "up", "keeper", "spawner" or "aether"; 0 when it does not run.
func (s *Server) Pid(part string) int {
	if part == "up" {
		if !s.Running() {
			return 0
		}
		return s.cmd.Process.Pid
	}
	socket := filepath.Join(s.Dir, "run", part+".sock")
	for pid, argv := range commandLines() {
		if len(argv) <= 3 || argv[1] != part || !slices.Contains(argv, socket) {
			continue
		}
		// Each part leads a session; a child that has not called exec yet has its parent's arguments and does not.
		if session, err := process.Session(pid); err == nil && session == pid {
			return pid
		}
	}
	return 0
}

// Kill ends a part with SIGKILL and waits until it is gone: "up", "keeper", "spawner" or "aether".
func (s *Server) Kill(part string) error {
	pid := s.Pid(part)
	if pid == 0 {
		return fmt.Errorf("no %s runs", part)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill %s: %w", part, err)
	}
	if part == "up" {
		<-s.ended
		return nil
	}
	if !wait.For(goneLimit, func() bool { return !process.Alive(pid) }) {
		return fmt.Errorf("%s (pid %d) is still there after SIGKILL", part, pid)
	}
	return nil
}

// Terminate ends the daemon with SIGTERM, as a service manager does.
func (s *Server) Terminate() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-s.ended:
		if code := s.cmd.ProcessState.ExitCode(); code != 0 && code != 130 {
			return fmt.Errorf("sandsea up ended with %s\n%s", s.cmd.ProcessState, s.Log())
		}
		return nil
	case <-time.After(endLimit):
		return fmt.Errorf("sandsea up did not follow SIGTERM within %s", endLimit)
	}
}

// Down ends the server and everything in it, and reports what is left. The server is no more after it. Idempotent.
func (s *Server) Down(ctx context.Context) error {
	if s.home == "" {
		return nil
	}
	var errs []error
	if _, err := os.Stat(filepath.Join(s.Dir, "lock")); err == nil && s.Binary != "" {
		errs = append(errs, down(ctx, s.Binary, s.Dir))
	}
	if s.Running() {
		select {
		case <-s.ended:
		case <-time.After(goneLimit):
			errs = append(errs, errors.New("sandsea down left the daemon running"), s.Kill("up"))
		}
	}
	if err := Leftovers(s.Dir); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, os.RemoveAll(s.home))
	s.home = ""
	return errors.Join(errs...)
}

func down(ctx context.Context, binary, dir string) error {
	ctx, stop := context.WithTimeoutCause(ctx, downLimit, errors.New("sandsea down took too long"))
	defer stop()
	cmd := exec.CommandContext(ctx, binary, "down", "--data", dir)
	cmd.Env = environ()
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("sandsea down: %w\n%s", err, text)
	}
	return nil
}

// sweep ends what test processes that are no more have left.
func sweep(ctx context.Context) {
	found, err := filepath.Glob(filepath.Join(os.TempDir(), homePrefix+"*"))
	if err != nil {
		return
	}
	for _, home := range found {
		owner, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(home), homePrefix), "-")
		pid, err := strconv.Atoi(owner)
		if err != nil || process.Alive(pid) {
			continue
		}
		dir, bin := filepath.Join(home, "data"), filepath.Join(home, "sandsea")
		if _, err := os.Stat(bin); err == nil {
			if err := down(ctx, bin, dir); err != nil {
				continue
			}
		}
		_ = os.RemoveAll(home)
	}
}

// Addr is the address of the API.
func (s *Server) Addr() string { return s.addr }

// environ is ours without what would steer the platform.
func environ() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "SANDSEA_") })
}
