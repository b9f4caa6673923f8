package wire

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// greetLimit is how long either side waits for the other's first words.
const greetLimit = 5 * time.Second

var errNoGreeting = errors.New("the peer does not greet")

// batch bounds the encoded sandboxes of one message of a Sync.
const batch = 1 << 20

// hello begins a connection; the answer is one too.
type hello struct {
	DataID  string `json:"data_id"`
	Version int    `json:"version"`
}

// version of the messages. Fields are only ever added; another version is refused at the greeting.
const version = 1

// Conn is the edge's end. All methods may be called at once, and the calls for one sandbox act in the order in which
// they were made. A Conn that broke answers errdefs.Unavailable for ever: dial anew, and Sync.
type Conn struct {
	peer   *peer
	reader sync.WaitGroup

	mu  sync.Mutex
	udp func(netip.AddrPort) (*os.File, error) // guarded by mu
}

// Dial connects to the Aether that listens at socket and checks that it serves the data directory with this id.
func Dial(ctx context.Context, socket, dataID string) (*Conn, error) {
	conn, err := scm.Dial(ctx, socket)
	if err != nil {
		return nil, unavailable(kindHello, err)
	}
	cred, err := conn.Peer()
	if err == nil && int(cred.UID) != os.Geteuid() {
		err = errdefs.New(errdefs.Denied, "aether", "the process at its socket began as uid %d", cred.UID).
			WithHint("See who made %s", socket)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	c := &Conn{}
	c.peer = newPeer(conn, c.answer)
	reading := context.WithoutCancel(ctx)
	c.reader.Go(func() { _ = c.peer.serve(reading) }) // its error is told to the calls
	ctx, stop := context.WithTimeoutCause(ctx, greetLimit, errNoGreeting)
	defer stop()
	var got hello
	if _, err := c.peer.call(ctx, kindHello, hello{DataID: dataID, Version: version}, &got); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// ServeUDP sets what makes a transparent socket of the gate, bound to an address that is not the gate's, from which
// Aether answers datagrams. Aether owns the file. Without it, sandboxes get no answers over UDP.
func (c *Conn) ServeUDP(open func(netip.AddrPort) (*os.File, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.udp = open
}

func (c *Conn) answer(k kind, body json.RawMessage) (any, *os.File, error) {
	if k != kindUDP {
		return nil, nil, errdefs.New(errdefs.Invalid, "edge", "unknown call %q", k)
	}
	var to netip.AddrPort
	if err := json.Unmarshal(body, &to); err != nil {
		return nil, nil, errdefs.New(errdefs.Invalid, "edge", "udp: %v", err)
	}
	c.mu.Lock()
	open := c.udp
	c.mu.Unlock()
	if open == nil {
		return nil, nil, errdefs.New(errdefs.Unavailable, "edge", "makes no sockets for datagrams")
	}
	f, err := open(to)
	return struct{}{}, f, err
}

// Sync tells all sandboxes that there are; those that Aether knows beyond them are dropped. Connections that the policies
// told do not allow are cut when it returns.
func (c *Conn) Sync(ctx context.Context, all []Sandbox) error {
	if _, err := c.peer.call(ctx, kindSync, struct{}{}, nil); err != nil {
		return err
	}
	for len(all) > 0 {
		n, size := 0, 0
		for n < len(all) && (n == 0 || size < batch) {
			b, err := json.Marshal(all[n])
			if err != nil {
				return err
			}
			size += len(b)
			n++
		}
		if _, err := c.peer.call(ctx, kindAdd, all[:n], nil); err != nil {
			return err
		}
		all = all[n:]
	}
	_, err := c.peer.call(ctx, kindSynced, struct{}{}, nil)
	return err
}

// Put tells a new sandbox, or another policy or phase of one. It returns when that is in force and the connections that
// it does not allow are cut.
func (c *Conn) Put(ctx context.Context, s Sandbox) error {
	_, err := c.peer.call(ctx, kindPut, s, nil)
	return err
}

// Drop forgets a sandbox: its connections are cut, its names stand for nothing. errdefs.NotFound if there is none.
func (c *Conn) Drop(ctx context.Context, id string) (Counters, error) {
	var n Counters
	_, err := c.peer.call(ctx, kindDrop, id, &n)
	return n, err
}

// Counters gives those of the sandboxes named, or of all; unknown ones are left out.
func (c *Conn) Counters(ctx context.Context, ids []string) (map[string]Counters, error) {
	var m map[string]Counters
	_, err := c.peer.call(ctx, kindCounters, ids, &m)
	return m, err
}

// CA gives the certificate, in PEM, of the authority with which Aether ends the TLS of this sandbox. It is the same for
// the sandbox's life, and there whether or not the policy inspects.
func (c *Conn) CA(ctx context.Context, id string) ([]byte, error) {
	var pem []byte
	_, err := c.peer.call(ctx, kindCA, id, &pem)
	return pem, err
}

// Denials hands on what the kernel's walls rejected.
func (c *Conn) Denials(ctx context.Context, all []Denial) error {
	_, err := c.peer.call(ctx, kindDenials, all, nil)
	return err
}

// Services tells what the package services have to draw on.
func (c *Conn) Services(ctx context.Context) ([]ServiceState, error) {
	var all []ServiceState
	_, err := c.peer.call(ctx, kindServices, struct{}{}, &all)
	return all, err
}

// Upstreams tells what the package services draw on, as upstream.Discover found it; before that, none of them answers.
func (c *Conn) Upstreams(ctx context.Context, all upstream.Upstreams) error {
	_, err := c.peer.call(ctx, kindUpstreams, all, nil)
	return err
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.peer.gone }

// Close ends the connection; Aether goes on with what it knows. Idempotent.
func (c *Conn) Close() error {
	err := c.peer.conn.Close()
	c.reader.Wait()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}
