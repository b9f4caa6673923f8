package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// openCluster opens a store that nodes can reach.
func openCluster(t *testing.T) (*Store, *cluster.Authority) {
	t.Helper()
	a, err := cluster.EnsureAuthority(filepath.Join(t.TempDir(), "cluster"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	id, err := a.Server(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), Config{Dir: t.TempDir(), CallTimeout: patience, Listener: ln, Identity: id})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, a
}

func dialAs(t *testing.T, s *Store, id *cluster.Identity) *Store {
	t.Helper()
	d, err := Dial(t.Context(), []string{"https://" + s.Address()}, id.DialServer(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func invite(t *testing.T, a *cluster.Authority, name string) *cluster.Identity {
	t.Helper()
	v, err := a.Invite(name, "127.0.0.1:1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	id, err := v.Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func registration(t *testing.T, name string) []byte {
	t.Helper()
	b, err := json.Marshal(node.Registration{Number: 7, Name: name, Address: "127.0.0.1:9"})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestANodeKeepsItsRecords(t *testing.T) {
	s, a := openCluster(t)
	n := dialAs(t, s, invite(t, a, "n7"))
	lease, err := n.Lease(t.Context(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	put := store.Put(keys.Node(7), registration(t, "n7"))
	put.Lease = lease.ID()
	res, err := n.Txn(t.Context(), []store.Cond{{Key: keys.NodeDataID("x"), Absent: true}}, []store.Op{
		store.Put(keys.NodeDataID("x"), []byte("{}")), store.Put(keys.NodeNext, []byte("8")), put,
		store.Put(keys.EndedSandbox("default", "s1"), []byte("{}")), store.Get(keys.NodeNext),
	}, []store.Op{store.Get(keys.NodeNext)})
	if err != nil || !res.Succeeded {
		t.Fatalf("%+v, %v", res, err)
	}
	if page, err := n.Range(t.Context(), keys.Nodes, store.RangeOptions{}); err != nil || len(page.Pairs) != 1 {
		t.Errorf("%+v, %v", page, err)
	}
	for e, err := range n.Watch(t.Context(), keys.Nodes, 1) {
		if err != nil || e.Key != keys.Node(7) {
			t.Errorf("%+v, %v", e, err)
		}
		break
	}
	if err := lease.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	if page, err := s.Range(t.Context(), keys.Nodes, store.RangeOptions{}); err != nil || len(page.Pairs) != 0 {
		t.Errorf("%+v, %v", page, err)
	}
}

func TestANodeReachesNothingElse(t *testing.T) {
	s, a := openCluster(t)
	secret := keys.Token("t1")
	if _, err := s.Txn(t.Context(), nil, []store.Op{store.Put(secret, []byte("hash")), store.Put(keys.Image("i"), []byte("{}"))}, nil); err != nil {
		t.Fatal(err)
	}
	n := dialAs(t, s, invite(t, a, "n7"))
	at := func(name, address string) []byte {
		b, err := json.Marshal(node.Registration{Number: 7, Name: name, Address: address})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	txn := func(ops ...store.Op) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := n.Txn(ctx, nil, ops, nil)
			return err
		}
	}
	span := func(prefix string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := n.Range(ctx, prefix, store.RangeOptions{})
			return err
		}
	}
	raw := func(do func(ctx context.Context, c *clientv3.Client) error) func(context.Context) error {
		return func(ctx context.Context) error { return do(ctx, n.cli) }
	}
	for name, call := range map[string]func(context.Context) error{
		"reads a token":             txn(store.Get(secret)),
		"writes a token":            txn(store.Put(secret, []byte("mine"))),
		"lists tokens":              span(keys.IAM),
		"lists everything":          span("/"),
		"reads an image":            txn(store.Get(keys.Image("i"))),
		"writes an image":           txn(store.Put(keys.Image("i"), []byte("{}"))),
		"reads ends":                span(keys.Ended),
		"deletes an end":            txn(store.Delete(keys.EndedSandbox("default", "s1"))),
		"deletes a registration":    txn(store.Delete(keys.Node(7))),
		"deletes all registrations": txn(store.Op{Kind: store.OpDeletePrefix, Key: keys.Nodes}),
		"registers another":         txn(store.Put(keys.Node(7), registration(t, "n8"))),
		"registers a socket":        txn(store.Put(keys.Node(7), at("n7", "unix:/run/docker.sock"))),
		"registers a socket's port": txn(store.Put(keys.Node(7), at("n7", "unix:/run/x.sock:80"))),
		"registers another number":  txn(store.Put(keys.Node(8), registration(t, "n7"))),
		"hides it in a transaction": txn(store.Get(keys.NodeNext), store.Get(secret)),
		"asks by a condition": func(ctx context.Context) error {
			_, err := n.Txn(ctx, []store.Cond{{Key: secret, Present: true}}, []store.Op{store.Get(keys.NodeNext)}, nil)
			return err
		},
		"asks in the other branch": func(ctx context.Context) error {
			_, err := n.Txn(ctx, []store.Cond{{Key: keys.NodeNext, Present: true}}, nil, []store.Op{store.Get(secret)})
			return err
		},
		"watches tokens": func(ctx context.Context) error {
			for _, err := range n.Watch(ctx, keys.IAM, 1) {
				return err
			}
			return nil
		},
		"reads on past its records": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Get(ctx, keys.Nodes, clientv3.WithRange("\xff"))
			return err
		}),
		"reads on to the end": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Get(ctx, keys.Nodes, clientv3.WithFromKey())
			return err
		}),
		"reads what an end replaces": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Put(ctx, keys.EndedSandbox("default", "s1"), "{}", clientv3.WithPrevKV())
			return err
		}),
		"takes a snapshot": raw(func(ctx context.Context, c *clientv3.Client) error {
			r, err := c.Snapshot(ctx)
			if err == nil {
				_, err = r.Read(make([]byte, 1))
			}
			return err
		}),
		"compacts": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Compact(ctx, 2)
			return err
		}),
		"lists leases": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Leases(ctx)
			return err
		}),
		"adds a user": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.UserAdd(ctx, "root", "x")
			return err
		}),
		"lists members": raw(func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.MemberList(ctx)
			return err
		}),
	} {
		t.Run(name, func(t *testing.T) {
			ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
			defer stop()
			if err := call(ctx); err == nil || ctx.Err() != nil {
				t.Errorf("it may: %v", err)
			}
		})
	}
	if res, err := s.Txn(t.Context(), nil, []store.Op{store.Get(secret)}, nil); err != nil || string(res.Pairs[0].Value) != "hash" {
		t.Errorf("%+v, %v", res, err)
	}
}

// TestANodeFindsNoPages asks for what etcd tells over HTTP beside its calls: its command line, its counters, its health.
func TestANodeFindsNoPages(t *testing.T) {
	s, a := openCluster(t)
	for _, protocol := range []string{"http/1.1", "h2"} {
		line := invite(t, a, "n7").DialServer()
		line.NextProtos = []string{protocol}
		c := &http.Client{Transport: &http.Transport{TLSClientConfig: line, ForceAttemptHTTP2: protocol == "h2"}}
		defer c.CloseIdleConnections()
		for _, page := range []string{"/metrics", "/health", "/version", "/debug/vars", "/"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+s.Address()+page, nil)
			if err != nil {
				t.Fatal(err)
			}
			res, err := c.Do(req)
			if err != nil {
				continue
			}
			res.Body.Close()
			if res.StatusCode < http.StatusBadRequest {
				t.Errorf("%s over %s: %s", page, protocol, res.Status)
			}
		}
	}
}

func TestWhoIsNoNodeReachesNothing(t *testing.T) {
	s, a := openCluster(t)
	srv, err := a.Server(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	other, err := cluster.EnsureAuthority(filepath.Join(t.TempDir(), "cluster"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	plain, err := Dial(t.Context(), []string{"http://" + s.Address()}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plain.Close() })
	for name, c := range map[string]*Store{
		"a server":               dialAs(t, s, srv),
		"another cluster's node": dialAs(t, s, invite(t, other, "n7")),
		"no certificate":         plain,
	} {
		_, err := c.Txn(t.Context(), nil, []store.Op{store.Get(keys.NodeNext)}, nil)
		if err == nil || errors.Is(err, errdefs.Unknown) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWhoIsNotAnsweredHearsWhy reads why a store cannot be reached in the error of a call.
func TestWhoIsNotAnsweredHearsWhy(t *testing.T) {
	s, a := openCluster(t)
	other, err := cluster.EnsureAuthority(filepath.Join(t.TempDir(), "cluster"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	v, err := a.Invite("n7", "127.0.0.1:1", time.Now().Add(48*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	early, err := v.Identity()
	if err != nil {
		t.Fatal(err)
	}
	nobody, err := Dial(t.Context(), []string{"127.0.0.1:1"}, invite(t, a, "n7").DialServer(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nobody.Close() })
	for want, c := range map[string]*Store{
		"connection refused":                      nobody,
		"certificate signed by unknown authority": dialAs(t, s, invite(t, other, "n7")),
		"remote error: tls: expired certificate":  dialAs(t, s, early), // what is too early is called so too
	} {
		wait.Until(t, 30*time.Second, func() bool {
			_, err := c.Txn(t.Context(), nil, []store.Op{store.Get(keys.NodeNext)}, nil)
			return errors.Is(err, errdefs.Unavailable) && strings.Contains(err.Error(), "no member answers: ") && strings.Contains(err.Error(), want)
		})
	}
}

// TestANodeNeedsNoProxy reaches a store while the environment names a proxy, as for imports.
func TestANodeNeedsNoProxy(t *testing.T) {
	const inside = "SANDSEA_TEST_INSIDE_PROXY"
	if os.Getenv(inside) == "" { // the environment is read once in a process
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), inside+"=1", "HTTPS_PROXY=http://127.0.0.1:1", "NO_PROXY=", "no_proxy=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	s, a := openCluster(t)
	_, port, err := net.SplitHostPort(s.Address())
	if err != nil {
		t.Fatal(err)
	}
	// Loopback needs no proxy anyhow; this is another name of it.
	n, err := Dial(t.Context(), []string{"0.0.0.0:" + port}, invite(t, a, "n7").DialServer(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	wait.Until(t, 30*time.Second, func() bool {
		_, err = n.Txn(t.Context(), nil, []store.Op{store.Get(keys.NodeNext)}, nil)
		return err == nil
	})
}
