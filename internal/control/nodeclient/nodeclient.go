// Package nodeclient is the servers' end of the line to one node: node.v1 and, on the same door, the process and file
// services of its sandboxes.
//
// It speaks Connect over HTTP/1.1 on a pool of kept connections: each stream has a connection of its own, so that no
// stream waits for another's window, and nothing is compressed on a path that is a socket or a fast network. Between
// machines it is TLS with the cluster's certificates, and the node at an address must be the one that is meant. Streams
// have no time limit but their context's and that of a machine that has fallen silent. Safe for concurrent use.
package nodeclient

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/linux/tcp"
)

const (
	dialLimit = 2 * time.Second
	// lineLimit is how long a machine may be silent before the calls that are on their way to it break: twice the time
	// after which its node counts as unreachable.
	lineLimit = 20 * time.Second
	idleConns = 1024
	bufSize   = 64 << 10
	// maxMessage bounds an answer: two inline streams of 64 MiB and what goes around them.
	maxMessage = 160 << 20
)

// Client is the line to one node.
type Client struct {
	Edge    nodev1connect.EdgeServiceClient
	Process sandseav1connect.ProcessServiceClient
	File    sandseav1connect.FileServiceClient
	Network sandseav1connect.NetworkServiceClient
	// Address is where the node answers.
	Address string

	base string
	http *http.Client
}

// Pool makes clients and keeps one for each node and address. Close drops the idle connections.
type Pool struct {
	id *cluster.Identity

	mu      sync.Mutex
	clients map[place]*pooled // guarded by mu
}

type place struct{ address, name string }

type pooled struct {
	client    *Client
	transport *http.Transport
}

// NewPool makes a pool that calls other machines as id; nil: it reaches this machine's sockets only.
func NewPool(id *cluster.Identity) *Pool { return &Pool{id: id, clients: map[place]*pooled{}} }

// Client gives the client for the node of that name at an address: "unix:/path" or "host:port". It connects at the
// first call.
func (p *Pool) Client(address, name string) (*Client, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := place{address, name}
	if c, ok := p.clients[at]; ok {
		return c.client, nil
	}
	network, target, base := "tcp", address, "https://"+address
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, target, base = "unix", path, "http://node"
		if !strings.HasPrefix(path, "/") {
			return nil, errdefs.New(errdefs.Invalid, "node address "+address, "is no absolute path")
		}
	} else if _, _, err := net.SplitHostPort(address); err != nil {
		return nil, errdefs.New(errdefs.Invalid, "node address "+address, "is neither unix:/path nor host:port").Wrap(err)
	} else if p.id == nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "node address "+address,
			"is on another machine, and this server belongs to no cluster").WithHint("Use sandsea server in place of sandsea up")
	}
	dialer := &net.Dialer{Timeout: dialLimit}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, target)
		},
		MaxIdleConns: idleConns, MaxIdleConnsPerHost: idleConns, IdleConnTimeout: 90 * time.Second,
		DisableCompression: true, WriteBufferSize: bufSize, ReadBufferSize: bufSize,
	}
	if network == "tcp" {
		dialer.KeepAliveConfig = net.KeepAliveConfig{Enable: true, Idle: lineLimit / 2, Interval: lineLimit / 8, Count: 4}
		dialer.Control = func(_, _ string, c syscall.RawConn) error { return tcp.GiveUp(c, lineLimit) }
		transport.TLSClientConfig = p.id.DialNode(name)
	}
	httpClient := &http.Client{Transport: unbroken{transport}}
	opts := []connect.ClientOption{
		connect.WithAcceptCompression("gzip", nil, nil), connect.WithReadMaxBytes(maxMessage),
	}
	c := &Client{
		Edge:    nodev1connect.NewEdgeServiceClient(httpClient, base, opts...),
		Process: sandseav1connect.NewProcessServiceClient(httpClient, base, opts...),
		File:    sandseav1connect.NewFileServiceClient(httpClient, base, opts...),
		Network: sandseav1connect.NewNetworkServiceClient(httpClient, base, opts...),
		base:    base, http: httpClient,
		Address: address,
	}
	p.clients[at] = &pooled{c, transport}
	return c, nil
}

// Close drops all idle connections.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.clients {
		c.transport.CloseIdleConnections()
	}
}

// unbroken makes an abandoned stream end as what it is.
type unbroken struct{ http.RoundTripper }

func (t unbroken) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.ContentLength < 0 && r.Body != nil {
		r = r.Clone(r.Context())
		r.Body = unbrokenBody{r.Body, r.Context()}
	}
	return t.RoundTripper.RoundTrip(r)
}

// unbrokenBody is the body of a stream to a node. Connect closes it in good order also when the call was cancelled, and
// that may be faster than the end of the connection: the node would take half a file for a whole one. So an end after
// the cancellation is an error, after which net/http drops the connection without the chunk that says "complete".
type unbrokenBody struct {
	io.ReadCloser
	ctx context.Context //nolint:containedctx // the request's own, for as long as its body is read
}

func (u unbrokenBody) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) && u.ctx.Err() != nil {
		err = context.Cause(u.ctx)
	}
	return n, err
}

// Error turns what a call to the named node returned into its kind. A node's own answer passes as it is. Without an
// answer: Unavailable when nothing was sent, else Unknown for a call that changes something and Unavailable for one
// that does not; Canceled when the caller went away.
func Error(err error, node string, changes bool) error {
	if err == nil {
		return nil
	}
	if connect.IsWireError(err) {
		return errwire.FromConnect(err)
	}
	if ours, ok := errors.AsType[*errdefs.Error](err); ok {
		return ours
	}
	object := "node " + node
	if !Sent(err) {
		return errdefs.New(errdefs.Unavailable, object, "does not answer").WithRetryAfter(time.Second).
			WithHint("Try again in a second; its sandboxes may well run").Wrap(err)
	}
	switch code := connect.CodeOf(err); {
	case code == connect.CodeCanceled && !changes && errors.Is(err, context.Canceled): // a reset connection has the code too
		return errdefs.New(errdefs.Canceled, "", "the caller went away").Wrap(err)
	case changes:
		return errdefs.New(errdefs.Unknown, object, "gave no answer, it may have been done").Wrap(err)
	case code == connect.CodeDeadlineExceeded:
		return errdefs.New(errdefs.Deadline, object, "gave no answer in time").Wrap(err)
	case code == connect.CodeResourceExhausted, code == connect.CodeInvalidArgument:
		return errwire.FromConnect(err) // a message beyond a limit of ours
	default:
		return errdefs.New(errdefs.Unavailable, object, "the line broke").WithRetryAfter(time.Second).Wrap(err)
	}
}

// Sent reports whether a failed call may have reached the node.
func Sent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return !ok || op.Op != "dial"
}
