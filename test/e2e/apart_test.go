package e2e

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const patience = 30 * time.Second

// freeAddress is an address that nobody listens at: nodes must find the store at the same one after a restart.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", server.OwnHost()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// invite makes a join file as an operator does, and gives its path.
func invite(t *testing.T, s *server.Server, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name+".join")
	// As a shell makes it.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var says bytes.Buffer
	cmd := exec.CommandContext(t.Context(), s.Binary, "node", "invite", name, "--data", s.Dir)
	cmd.Stdout, cmd.Stderr = f, &says
	if err := cmd.Run(); err != nil {
		t.Fatalf("node invite: %v\n%s", err, says.String())
	}
	if fi, err := f.Stat(); err != nil || fi.Mode().Perm() != 0o600 || fi.Size() == 0 {
		t.Fatalf("join file: %v, %v", fi.Mode(), err)
	}
	return path
}

func joined(t *testing.T, s *server.Server, name string, sandboxes int) *server.Server {
	t.Helper()
	return server.Start(t, server.Config{
		Daemon: "edge", Args: []string{"--join", invite(t, s, name)}, Binary: s.Binary,
		TOML: fmt.Sprintf("max_sandboxes = %d\nwarm_sandboxes = 0\n", sandboxes),
	})
}

// nodes are what the server says of its nodes, by name.
func nodes(t *testing.T, s *server.Server) map[string]*sandseav1.Node {
	t.Helper()
	res, err := s.Client.Nodes.List(within(t, patience), connect.NewRequest(&sandseav1.ListNodesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*sandseav1.Node{}
	for _, n := range res.Msg.GetNodes() {
		out[n.GetName()] = n
	}
	return out
}

// place makes a sandbox and tells on which node it is.
func place(t *testing.T, s *server.Server) (*client.Sandbox, string) {
	t.Helper()
	sb, err := s.Client.Create(within(t, patience), spec(), "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return sb, info(t, sb).GetNode()
}

func stop(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	if err := sb.Stop(within(t, patience)); err != nil {
		t.Fatalf("stop: %v", err)
	}
}

// counts waits until the server has seen so many sandboxes on the nodes.
func counts(t *testing.T, s *server.Server, want map[string]int64) {
	t.Helper()
	wait.Until(t, patience, func() bool {
		all := nodes(t, s)
		for name, n := range want {
			if all[name].GetSandboxesRunning() != n {
				return false
			}
		}
		return true
	})
}

// TestApart runs a server and two edges as processes of their own on one machine.
func TestApart(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	s := server.Start(t, server.Config{
		Daemon: "server", Args: []string{"--cluster-listen", freeAddress(t), "--log-level", "debug"},
	})
	edges := map[string]*server.Server{"n1": joined(t, s, "n1", 1), "n2": joined(t, s, "n2", 3)}
	wait.Until(t, patience, func() bool {
		all := nodes(t, s)
		return all["n1"].GetState() == sandseav1.NodeState_NODE_STATE_READY && all["n2"].GetState() == sandseav1.NodeState_NODE_STATE_READY
	})
	if err := s.ImportBusybox(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}

	t.Run("placement uses both, and the image is where it is used", func(t *testing.T) {
		on := map[string]int{}
		var all []*client.Sandbox
		for range 4 {
			sb, name := place(t, s)
			on[name]++
			all = append(all, sb)
			if out := sh(t, sb, "echo from $(cat /etc/passwd | wc -l)"); out != "from 3\n" {
				t.Errorf("a sandbox on %s says %q", name, out)
			}
		}
		if on["n1"] != 1 || on["n2"] != 3 {
			t.Errorf("placed %v", on)
		}
		_, err := s.Client.Sandboxes.Create(within(t, patience), connect.NewRequest(&sandseav1.CreateSandboxRequest{Spec: spec(), ReadyTimeoutMs: 2000}))
		if e := errdefs.KindOf(err); e != errdefs.Exhausted {
			t.Errorf("a fifth sandbox: %v", err)
		}
		for _, sb := range all {
			stop(t, sb)
		}
		counts(t, s, map[string]int64{"n1": 0, "n2": 0})
	})

	t.Run("a node that refuses is followed by the next", func(t *testing.T) { refusal(t, s) })

	t.Run("the collector keeps what the catalogue names", func(t *testing.T) {
		files, err := server.Busybox(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Import(within(t, time.Minute), "other", append(files, server.File{Name: "other", Body: "x"}), nil); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Client.Images.Delete(within(t, patience), connect.NewRequest(&sandseav1.DeleteImageRequest{Ref: "other"})); err != nil {
			t.Fatal(err)
		}
		on := map[string]bool{}
		for range 4 {
			sb, name := place(t, s)
			defer stop(t, sb)
			on[name] = true
			sh(t, sb, "true")
		}
		if !on["n1"] || !on["n2"] {
			t.Errorf("placed on %v", on)
		}
	})
	counts(t, s, map[string]int64{"n1": 0, "n2": 0})

	one, two := place2(t, s)
	counter := "i=0; while true; do i=$((i+1)); echo $i; sleep 0.02; done"
	first := launch(t, one, counter)
	second := launch(t, two, counter)

	t.Run("an edge that dies leaves the other alone and its own sandboxes running", func(t *testing.T) {
		if err := edges["n2"].Kill("up"); err != nil {
			t.Fatal(err)
		}
		if _, err := two.Run(within(t, patience), client.Shell("echo x")); !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("a call to a node that is away: %v", err)
		}
		if out := sh(t, one, "echo here"); out != "here\n" {
			t.Errorf("the other node says %q", out)
		}
		record := filepath.Join(edges["n2"].Dir, "output", two.ID, fmt.Sprintf("%d.1", second))
		before := size(t, record)
		wait.Until(t, patience, func() bool { return size(t, record) > before })
		if err := edges["n2"].Up(within(t, patience)); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, patience, func() bool {
			_, err := two.Run(within(t, patience), client.Shell("true"))
			return err == nil
		})
		gapless(t, two, second)
	})

	t.Run("a server that dies leaves everything running", func(t *testing.T) {
		if err := s.Kill("up"); err != nil {
			t.Fatal(err)
		}
		record := filepath.Join(edges["n1"].Dir, "output", one.ID, fmt.Sprintf("%d.1", first))
		before := size(t, record)
		wait.Until(t, patience, func() bool { return size(t, record) > before })
		if err := s.Up(within(t, patience)); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, patience, func() bool {
			all := nodes(t, s)
			return all["n1"].GetSandboxesRunning() == 1 && all["n2"].GetSandboxesRunning() == 1
		})
		gapless(t, one, first)
		gapless(t, two, second)
	})

	t.Run("an edge restarts under its server", func(t *testing.T) {
		if err := edges["n1"].Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := edges["n1"].Up(within(t, patience)); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, patience, func() bool {
			_, err := one.Run(within(t, patience), client.Shell("true"))
			return err == nil
		})
		gapless(t, one, first)
	})

	t.Run("what an edge's down ends is ended for the server", func(t *testing.T) {
		if err := edges["n1"].Down(within(t, time.Minute)); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, patience, func() bool {
			for sb, err := range s.Client.List(within(t, patience), &sandseav1.ListSandboxesRequest{All: true}) {
				if err != nil {
					t.Fatal(err)
				}
				if sb.GetId() == one.ID {
					return sb.GetState() == sandseav1.SandboxState_SANDBOX_STATE_ENDED && sb.GetEnd().GetCause() == "stopped"
				}
			}
			return false
		})
	})
	stop(t, two)
	for name, d := range map[string]*server.Server{"server": s, "n2": edges["n2"]} {
		if text := d.Log(); strings.Contains(text, "connection to daemon broke") || strings.Contains(text, "panic") {
			t.Errorf("%s says:\n%s", name, text)
		}
	}
}

// TestAnEdgeThatCannotJoin starts edges that the cluster does not take, and one that it takes no more.
func TestAnEdgeThatCannotJoin(t *testing.T) {
	require.Root(t)
	s := server.Start(t, server.Config{Daemon: "server", Args: []string{"--cluster-listen", freeAddress(t)}})
	n1 := joined(t, s, "n1", 1)
	used := filepath.Join(n1.Dir, "node.join")
	dir := t.TempDir()
	try := func(join string) string {
		t.Helper()
		cmd := exec.CommandContext(within(t, patience), s.Binary, "edge", "--data", dir, "--listen", "127.0.0.1:0", "--join", join)
		out, err := cmd.CombinedOutput()
		if _, ended := errors.AsType[*exec.ExitError](err); !ended || cmd.ProcessState.ExitCode() != 1 {
			t.Fatalf("edge: %v\n%s", err, out)
		}
		return string(out)
	}
	if says := try(used); !strings.Contains(says, "node n1: runs at ") {
		t.Errorf("an invitation that is in use: %s", says)
	}
	authority, err := cluster.EnsureAuthority(t.TempDir(), time.Now().AddDate(-11, 0, 0))
	if err != nil {
		t.Fatal(err)
	}
	v, err := authority.Invite("n9", "127.0.0.1:1", time.Now().AddDate(-11, 0, 0))
	if err != nil {
		t.Fatal(err)
	}
	old := filepath.Join(t.TempDir(), "n9.join")
	if err := v.Keep(old); err != nil {
		t.Fatal(err)
	}
	if says := try(old); !strings.Contains(says, "certificate of node n9: ended at ") {
		t.Errorf("an invitation of eleven years ago: %s", says)
	}
	if _, err := os.Stat(filepath.Join(dir, "node.join")); !os.IsNotExist(err) {
		t.Errorf("a directory that has not joined keeps an invitation: %v", err)
	}

	// The store begins anew: it knows nothing of the node, which must say so and not go on unseen.
	if err := s.Terminate(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(s.Dir, "etcd")); err != nil {
		t.Fatal(err)
	}
	s.Client = nil // of a token that is no more
	if err := s.Up(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool { return !n1.Running() })
	if says := n1.Log(); !strings.Contains(says, "node n1: is not in the store any more") {
		t.Errorf("it says:\n%s", says)
	}
	if err := n1.Up(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool { return nodes(t, s)["n1"].GetState() == sandseav1.NodeState_NODE_STATE_READY })
}

// place2 makes a sandbox on each node.
func place2(t *testing.T, s *server.Server) (one, two *client.Sandbox) {
	t.Helper()
	for one == nil || two == nil {
		sb, name := place(t, s)
		switch {
		case name == "n1":
			one = sb
		case two == nil:
			two = sb
		default:
			stop(t, sb)
		}
	}
	return one, two
}

// refusal fills the emptier node behind the server's back and lets it place a sandbox before it has seen that.
func refusal(t *testing.T, s *server.Server) {
	one, two := place2(t, s)
	defer stop(t, two)
	stop(t, one)
	direct, number := asServer(t, s, "n1")
	img, err := s.Client.Images.Get(within(t, patience), connect.NewRequest(&sandseav1.GetImageRequest{Ref: "busybox"}))
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		// n1 has nothing of 1, n2 one of 3: n1 is the better one, as long as the server has not looked.
		counts(t, s, map[string]int64{"n1": 0, "n2": 1})
		settled(t, s)
		id, err := sandbox.Mint(number, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		req := connect.NewRequest(&nodev1.CreateRequest{
			Id: string(id), Project: "default", NodeEpoch: 1 << 30, Spec: spec(), By: "test", Digest: "d",
		})
		for _, l := range img.Msg.GetImage().GetLayers() {
			req.Msg.Layers = append(req.Msg.Layers, l.GetDigest())
		}
		req.Header().Set(sandboxpb.ProjectsHeader, "default")
		if _, err := direct.Edge.Create(within(t, patience), req); err != nil {
			t.Fatal(err)
		}
		sb, name := place(t, s)
		if name != "n2" {
			t.Errorf("placed on %s, which is full", name)
		}
		stop(t, sb)
		stop(t, s.Client.Sandbox(string(id)))
		if strings.Contains(s.Log(), "node refused a create") {
			return
		}
	}
	t.Error("the server never chose the node that refuses")
}

// settled waits until the server has looked at all nodes again and so has forgotten its own latest choices.
func settled(t *testing.T, s *server.Server) {
	t.Helper()
	later := time.Now().Add(time.Second)
	wait.Until(t, patience, func() bool {
		for _, n := range nodes(t, s) {
			if n.GetSeenAt().AsTime().Before(later) {
				return false
			}
		}
		return true
	})
}

// asServer calls a node as the server does.
func asServer(t *testing.T, s *server.Server, name string) (*nodeclient.Client, node.Number) {
	t.Helper()
	// An authority of our own that is the server's: it writes the server's certificate anew.
	dir := t.TempDir()
	for _, f := range []string{"ca.crt", "ca.key"} {
		b, err := os.ReadFile(filepath.Join(s.Dir, "cluster", f))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	authority, err := cluster.OpenAuthority(dir)
	if err != nil {
		t.Fatal(err)
	}
	id, err := authority.Server(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	n := nodes(t, s)[name]
	pool := nodeclient.NewPool(id)
	t.Cleanup(pool.Close)
	c, err := pool.Client(addressOf(t, s, name), name)
	if err != nil {
		t.Fatal(err)
	}
	return c, node.Number(n.GetNumber())
}

// addressOf reads a node's address in the server's log.
func addressOf(t *testing.T, s *server.Server, name string) string {
	t.Helper()
	for line := range strings.Lines(s.Log()) {
		if strings.Contains(line, "node registered") && strings.Contains(line, "name="+name+" ") {
			_, rest, _ := strings.Cut(line, "address=")
			return strings.Fields(rest)[0]
		}
	}
	t.Fatalf("%s is not in the server's log", name)
	return ""
}

// launch starts a shell line that goes on, and gives its number.
func launch(t *testing.T, sb *client.Sandbox, line string) int64 {
	t.Helper()
	for e, err := range sb.Start(within(t, patience), &sandseav1.StartRequest{Command: client.Shell(line), Detached: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if p := e.GetStarted(); p != nil {
			return p.GetNumber()
		}
	}
	t.Fatal("it did not start")
	return 0
}

// gapless reads what a counter has written so far and misses nothing.
func gapless(t *testing.T, sb *client.Sandbox, number int64) {
	t.Helper()
	var out []byte
	for e, err := range sb.Attach(within(t, patience), &sandseav1.AttachRequest{Number: number, NoFollow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.GetGap() != nil {
			t.Errorf("a gap: %v", e.GetGap())
		}
		out = append(out, e.GetData().GetData()...)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	for i, l := range lines {
		if l != fmt.Sprint(i+1) && i < len(lines)-1 {
			t.Fatalf("line %d is %q", i+1, l)
		}
	}
	if len(lines) < 3 {
		t.Errorf("%d lines", len(lines))
	}
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}
