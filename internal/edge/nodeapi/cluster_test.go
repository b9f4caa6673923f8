package nodeapi_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// identities of one cluster: its server, this node, and another.
func identities(t *testing.T) (server, self, other *cluster.Identity) {
	t.Helper()
	a, err := cluster.EnsureAuthority(filepath.Join(t.TempDir(), "cluster"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if server, err = a.Server(time.Now()); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]**cluster.Identity{"n42": &self, "other": &other} {
		v, err := a.Invite(name, "127.0.0.1:1", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if *to, err = v.Identity(); err != nil {
			t.Fatal(err)
		}
	}
	return server, self, other
}

// overNetwork serves the door on an address too and calls it there.
func (d *door) overNetwork(t *testing.T, self *cluster.Identity, caller *tls.Config) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d.server.ServeCluster(ln, self)
	transport := &http.Transport{TLSClientConfig: caller}
	t.Cleanup(transport.CloseIdleConnections)
	d.dial(&http.Client{Transport: transport}, "https://"+ln.Addr().String(), "default")
}

func blobOf(t *testing.T, body []byte) (*posix.Store, image.Digest) {
	t.Helper()
	blobs, err := posix.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	h.Write(body)
	if err := blobs.Put(t.Context(), image.FromHash(h), bytes.NewReader(body)); err != nil {
		t.Fatal(err)
	}
	return blobs, image.FromHash(h)
}

// readBlob reads all that a node gives.
func (d *door) readBlob(ctx context.Context, digest string, offset int64) ([]byte, error) {
	st, err := d.edge.ReadBlob(ctx, connect.NewRequest(&nodev1.ReadBlobRequest{Digest: digest, Offset: offset}))
	if err != nil {
		return nil, err
	}
	defer st.Close()
	var all []byte
	for st.Receive() {
		all = append(all, st.Msg().GetData()...)
	}
	return all, st.Err()
}

func TestAServerMayCallEverything(t *testing.T) {
	server, self, _ := identities(t)
	d := newDoor(t)
	id := d.create(t)
	d.overNetwork(t, self, server.DialNode("n42"))
	if _, err := d.edge.Roster(t.Context(), connect.NewRequest(&nodev1.RosterRequest{})); err != nil {
		t.Error(err)
	}
	if _, err := d.proc.Run(t.Context(), run(id, "abc")); err != nil {
		t.Error(err)
	}
}

func TestANodeMayReadBlobsAndNothingElse(t *testing.T) {
	body := bytes.Repeat([]byte("blob "), 200_000)
	blobs, digest := blobOf(t, body)
	_, self, other := identities(t)
	d := newDoor(t, func(c *nodeapi.Config) { c.Blobs = blobs })
	id := d.create(t)
	d.overNetwork(t, self, other.DialNode("n42"))

	for _, offset := range []int64{0, 1, 700_000, int64(len(body))} {
		if got, err := d.readBlob(t.Context(), string(digest), offset); err != nil || !bytes.Equal(got, body[offset:]) {
			t.Errorf("from %d: %d bytes, %v", offset, len(got), err)
		}
	}
	if _, err := d.readBlob(t.Context(), string(digest), -1); kindOf(err) != errdefs.Invalid {
		t.Errorf("a negative offset: %v", err)
	}
	if _, err := d.readBlob(t.Context(), "sha256:"+string(make([]byte, 64)), 0); kindOf(err) != errdefs.Invalid {
		t.Errorf("no digest: %v", err)
	}
	_, absent := blobOf(t, []byte("another"))
	if _, err := d.readBlob(t.Context(), string(absent), 0); kindOf(err) != errdefs.NotFound {
		t.Errorf("a blob that is not there: %v", err)
	}

	for name, call := range map[string]func() error{
		"roster": func() error {
			_, err := d.edge.Roster(t.Context(), connect.NewRequest(&nodev1.RosterRequest{}))
			return err
		},
		"stop": func() error {
			_, err := d.edge.Stop(t.Context(), connect.NewRequest(&nodev1.StopRequest{Id: id}))
			return err
		},
		"run": func() error {
			_, err := d.proc.Run(t.Context(), run(id, "abc"))
			return err
		},
		"stat": func() error {
			_, err := d.file.Stat(t.Context(), connect.NewRequest(&sandseav1.StatFileRequest{Id: id, Path: "/"}))
			return err
		},
		"follow": func() error {
			st, err := d.edge.Follow(t.Context(), connect.NewRequest(&nodev1.FollowRequest{}))
			if err == nil {
				st.Receive()
				err = st.Err()
				_ = st.Close()
			}
			return err
		},
	} {
		if err := call(); kindOf(err) != errdefs.Denied {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAReaderThatStallsGivesItsPlaceBack(t *testing.T) {
	blobs, large := blobOf(t, make([]byte, 32<<20)) // more than sockets hold
	h := sha256.New()
	h.Write([]byte("small"))
	small := image.FromHash(h)
	if err := blobs.Put(t.Context(), small, bytes.NewReader([]byte("small"))); err != nil {
		t.Fatal(err)
	}
	_, self, other := identities(t)
	d := newDoor(t, func(c *nodeapi.Config) { c.Blobs = blobs })
	d.server.SetStall(2 * time.Second)
	d.overNetwork(t, self, other.DialNode("n42"))
	for range nodeapi.BlobsAtOnce {
		st, err := d.edge.ReadBlob(t.Context(), connect.NewRequest(&nodev1.ReadBlobRequest{Digest: string(large)}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		if !st.Receive() { // now it has its place
			t.Fatal(st.Err())
		}
	}
	ctx, stop := context.WithTimeout(t.Context(), edgetest.Patience)
	defer stop()
	if got, err := d.readBlob(ctx, string(small), 0); err != nil || string(got) != "small" {
		t.Errorf("behind readers that stall: %q, %v", got, err)
	}
}

func TestAStrangerReachesNothing(t *testing.T) {
	_, self, _ := identities(t)
	stranger, _, _ := identities(t)
	d := newDoor(t)
	d.overNetwork(t, self, stranger.DialNode("n42"))
	if _, err := d.edge.Roster(t.Context(), connect.NewRequest(&nodev1.RosterRequest{})); err == nil || connect.IsWireError(err) {
		t.Errorf("another cluster's server was answered: %v", err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if err := d.server.Serve(ln); !errors.Is(err, errdefs.Internal) {
		t.Errorf("a network address without certificates: %v", err)
	}
}

// layers refuse what they do not know.
type layers struct{ collected chan struct{} }

func (l layers) Ensure(context.Context, []image.Digest) error {
	return errdefs.New(errdefs.Refused, "node", "image: not here")
}

func (l layers) Collected() { close(l.collected) }

func TestACreateWithoutItsLayersIsRefused(t *testing.T) {
	d := newDoor(t, func(c *nodeapi.Config) { c.Layers = layers{} })
	id := d.ID()
	if _, err := d.edge.Create(t.Context(), connect.NewRequest(d.request(id))); kindOf(err) != errdefs.Refused {
		t.Errorf("got %v", err)
	}
	if _, err := d.Runner.Get(id); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("something is left of it: %v", err)
	}
}

// A stop of the edge does not wait for commands, and says what is true of them.
func TestAStopEndsCallsThatWait(t *testing.T) {
	for name, c := range map[string]struct {
		key  string
		want errdefs.Kind
	}{
		"with a key it can be asked again":          {"k", errdefs.Unavailable},
		"without a key its answer is not to be had": {"", errdefs.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDoor(t)
			id := d.create(t)
			ran, attached, started := make(chan error, 1), make(chan error, 1), make(chan error, 1)
			go func() {
				r := run(id, "sleep", "60")
				r.Msg.Key = c.key
				_, err := d.proc.Run(context.Background(), r)
				ran <- err
			}()
			wait.Until(t, edgetest.Patience, func() bool { return d.World.Tasks(sandbox.ID(id)) == 1 })
			go func() {
				st, err := d.proc.Attach(context.Background(), connect.NewRequest(&sandseav1.AttachRequest{Id: id, Number: 1}))
				if err == nil {
					for st.Receive() {
					}
					err = st.Err()
				}
				attached <- err
			}()
			begun := make(chan struct{})
			go func() {
				st, err := d.proc.Start(context.Background(), connect.NewRequest(&sandseav1.StartRequest{
					Id: id, Command: &sandseav1.Command{Argv: []string{"sleep", "60"}}, Key: c.key + "2",
				}))
				if err == nil {
					st.Receive()
					close(begun)
					for st.Receive() {
					}
					err = st.Err()
				}
				started <- err
			}()
			<-begun
			ctx, stop := context.WithTimeout(t.Context(), edgetest.Patience)
			defer stop()
			if err := d.server.Shutdown(ctx); err != nil {
				t.Errorf("the stop waited for commands: %v", err)
			}
			if err := <-ran; kindOf(err) != c.want {
				t.Errorf("run: %v", err)
			}
			if err := <-attached; kindOf(err) != errdefs.Unavailable {
				t.Errorf("attach: %v", err)
			}
			if err := <-started; kindOf(err) != errdefs.Unavailable {
				t.Errorf("start: %v", err)
			}
			if n := d.World.Tasks(sandbox.ID(id)); n != 2 {
				t.Errorf("%d of 2 commands live", n)
			}
		})
	}
}
