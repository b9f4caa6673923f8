package cluster_test

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/cluster"
)

func authority(t *testing.T) (*cluster.Authority, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cluster")
	a, err := cluster.EnsureAuthority(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a, dir
}

func server(t *testing.T, a *cluster.Authority) *cluster.Identity {
	t.Helper()
	id, err := a.Server(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func invite(t *testing.T, a *cluster.Authority, name string) *cluster.Identity {
	t.Helper()
	v, err := a.Invite(name, "127.0.0.1:7071", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	id, err := v.Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// meet lets a client and a server shake hands and tells whom the server met.
func meet(t *testing.T, dial, accept *tls.Config) (cluster.Peer, error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	type met struct {
		peer cluster.Peer
		err  error
	}
	done := make(chan met, 1)
	go func() {
		raw, err := l.Accept()
		if err != nil {
			done <- met{err: err}
			return
		}
		defer raw.Close()
		c := tls.Server(raw, accept)
		if err := c.HandshakeContext(t.Context()); err != nil {
			done <- met{err: err}
			return
		}
		state := c.ConnectionState()
		peer, err := cluster.PeerOf(&state)
		done <- met{peer, err}
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	err = tls.Client(raw, dial).HandshakeContext(t.Context())
	if err != nil {
		raw.Close()
	}
	m := <-done
	return m.peer, errors.Join(err, m.err)
}

func TestWhoMayMeetWhom(t *testing.T) {
	a, _ := authority(t)
	other, _ := authority(t)
	srv, n1, n2 := server(t, a), invite(t, a, "n1"), invite(t, a, "n2")
	stranger := server(t, other)
	nobody := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13} //nolint:gosec // a caller who does not care
	for name, c := range map[string]struct {
		dial, accept *tls.Config
		want         cluster.Peer
		ok           bool
	}{
		"a server reaches a node":                    {srv.DialNode("n1"), n1.Accept(), cluster.Peer{Role: cluster.Server}, true},
		"a node reaches a server":                    {n1.DialServer(), srv.Accept(), cluster.Peer{Role: cluster.Node, Name: "n1"}, true},
		"a node reaches a node":                      {n1.DialNode("n2"), n2.Accept(), cluster.Peer{Role: cluster.Node, Name: "n1"}, true},
		"a node does not pass for a server":          {n1.DialServer(), n2.Accept(), cluster.Peer{}, false},
		"a node does not pass for another":           {srv.DialNode("n1"), n2.Accept(), cluster.Peer{}, false},
		"a server does not pass for a node":          {n1.DialNode("n2"), srv.Accept(), cluster.Peer{}, false},
		"another cluster's server is not let in":     {stranger.DialNode("n1"), n1.Accept(), cluster.Peer{}, false},
		"another cluster's server is not believed":   {n1.DialServer(), stranger.Accept(), cluster.Peer{}, false},
		"who shows no certificate is not let in":     {nobody, n1.Accept(), cluster.Peer{}, false},
		"who shows no certificate reaches no server": {nobody, srv.Accept(), cluster.Peer{}, false},
		"another cluster's node of the name is not let in": {
			invite(t, other, "n1").DialNode("n2"), n2.Accept(), cluster.Peer{}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := meet(t, c.dial, c.accept)
			if c.ok != (err == nil) || got != c.want && c.ok {
				t.Errorf("met %+v, %v", got, err)
			}
		})
	}
}

func TestAnAuthorityIsMadeOnce(t *testing.T) {
	a, dir := authority(t)
	node := invite(t, a, "n1")
	again, err := cluster.EnsureAuthority(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := meet(t, server(t, again).DialNode("n1"), node.Accept()); err != nil {
		t.Errorf("a node that was invited before does not know the server of a later start: %v", err)
	}
	for _, name := range []string{"ca.key", "ca.crt"} {
		fi, err := os.Stat(filepath.Join(dir, name))
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, fi.Mode(), err)
		}
	}
}

func TestADamagedAuthorityIsNotReplaced(t *testing.T) {
	_, dir := authority(t)
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.EnsureAuthority(dir, time.Now()); !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("got %v", err)
	}
}

func TestJoinFiles(t *testing.T) {
	a, _ := authority(t)
	v, err := a.Invite("n2", "10.0.0.1:7071", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "n2.join")
	if err := v.Keep(path); err != nil {
		t.Fatal(err)
	}
	got, err := cluster.ReadInvitation(path)
	if err != nil || got != v {
		t.Fatalf("read %+v, %v", got, err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.ReadInvitation(path); !errors.Is(err, errdefs.Denied) {
		t.Errorf("a file that others can read: %v", err)
	}
	text, err := v.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"another name":     strings.Replace(string(text), `"name": "n2"`, `"name": "n3"`, 1),
		"another schema":   strings.Replace(string(text), "join/1", "join/2", 1),
		"no JSON":          "PEM",
		"another key":      strings.Replace(string(text), `"key": "`, `"key": "x`, 1),
		"longer than such": string(text) + strings.Repeat(" ", 64<<10),
	} {
		path := filepath.Join(t.TempDir(), "bad.join")
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := cluster.ReadInvitation(path); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAnInvitationSaysWhereTheStoreIs(t *testing.T) {
	a, _ := authority(t)
	if err := a.SetStore("0.0.0.0:7071"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Invite("n2", "", time.Now()); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("an address that is none: %v", err)
	}
	if err := a.SetStore("10.0.0.1:7071"); err != nil {
		t.Fatal(err)
	}
	if v, err := a.Invite("n2", "", time.Now()); err != nil || v.Store != "10.0.0.1:7071" {
		t.Errorf("%q, %v", v.Store, err)
	}
}

func TestNamesOfNodes(t *testing.T) {
	for _, good := range []string{"n2", "rack7-3", "0"} {
		if err := cluster.CheckName(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "-n", "n-", "N2", "a.b", "a b", "ä", strings.Repeat("n", 64), "n\n"} {
		if err := cluster.CheckName(bad); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestACertificateIsRefusedBeforeAndAfterItsTime(t *testing.T) {
	a, _ := authority(t)
	n := invite(t, a, "n2")
	for name, c := range map[string]struct {
		id   *cluster.Identity
		at   time.Time
		says string
	}{
		"now":                         {n, time.Now(), ""},
		"a clock that is an hour off": {n, time.Now().Add(-59 * time.Minute), ""},
		"before":                      {n, time.Now().Add(-2 * time.Hour), "node n2: begins at "},
		"after":                       {n, n.Expires.Add(time.Second), "node n2: ended at "},
		"a server's, after":           {server(t, a), n.Expires.Add(time.Second), "the server: ended at "},
	} {
		err := c.id.ValidAt(c.at)
		if c.says == "" && err != nil || c.says != "" && (!errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}
