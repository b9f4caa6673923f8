// Package client is the Go client of a Sandsea server.
//
// A Client is safe for concurrent use and keeps its connections. Every error it returns can be asked for its kind with
// errors.Is(err, errdefs.NotFound) and reads as one sentence with the way out. A command that fails is a result, not an
// error.
//
//	c, err := client.New(client.Config{})                    // SANDSEA_URL, SANDSEA_TOKEN, or the local default
//	sb, err := c.Create(ctx, &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}})
//	res, err := sb.Run(ctx, client.Shell("pytest -q"))
//	err = sb.Stop(ctx)
package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
)

// The defaults of a server on this machine.
const (
	DefaultURL       = "http://127.0.0.1:7070"
	DefaultTokenFile = "/var/lib/sandsea/admin.token"
)

// Config says where the server is and who asks. Empty fields come from SANDSEA_URL, SANDSEA_TOKEN and
// SANDSEA_TOKEN_FILE, then from the local default.
type Config struct {
	URL   string
	Token string
	// TokenFile is read when Token is empty.
	TokenFile string
	// HTTP replaces the transport.
	HTTP *http.Client
}

// Client speaks to one server. The service clients are the whole API; the methods are the convenient part of it.
type Client struct {
	Sandboxes sandseav1connect.SandboxServiceClient
	Processes sandseav1connect.ProcessServiceClient
	Files     sandseav1connect.FileServiceClient
	Images    sandseav1connect.ImageServiceClient
	Nodes     sandseav1connect.NodeServiceClient
	IAM       sandseav1connect.IAMServiceClient

	url string
}

// New makes a client. It does not connect: a server that is away shows at the first call.
func New(cfg Config) (*Client, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if cfg.HTTP == nil {
		cfg.HTTP = &http.Client{Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			MaxIdleConns:        1024,
			MaxIdleConnsPerHost: 1024,
			IdleConnTimeout:     90 * time.Second,
			DisableCompression:  true,
		}}
	}
	opts := []connect.ClientOption{
		connect.WithInterceptors(interceptor{token: cfg.Token, url: cfg.URL}),
		connect.WithReadMaxBytes(256 << 20),
	}
	return &Client{
		Sandboxes: sandseav1connect.NewSandboxServiceClient(cfg.HTTP, cfg.URL, opts...),
		Processes: sandseav1connect.NewProcessServiceClient(cfg.HTTP, cfg.URL, opts...),
		Files:     sandseav1connect.NewFileServiceClient(cfg.HTTP, cfg.URL, opts...),
		Images:    sandseav1connect.NewImageServiceClient(cfg.HTTP, cfg.URL, opts...),
		Nodes:     sandseav1connect.NewNodeServiceClient(cfg.HTTP, cfg.URL, opts...),
		IAM:       sandseav1connect.NewIAMServiceClient(cfg.HTTP, cfg.URL, opts...),
		url:       cfg.URL,
	}, nil
}

// URL is the server's address.
func (c *Client) URL() string { return c.url }

// complete fills the empty fields from the environment and checks them.
func (cfg Config) complete() (Config, error) {
	if cfg.URL == "" {
		cfg.URL = os.Getenv("SANDSEA_URL")
	}
	if cfg.URL == "" {
		cfg.URL = DefaultURL
	}
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return cfg, errdefs.New(errdefs.Invalid, "", "server address %q", cfg.URL).WithField("SANDSEA_URL", "").
			WithHint("Write it as http://HOST:PORT")
	}
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	if cfg.Token == "" && cfg.TokenFile == "" {
		cfg.Token = os.Getenv("SANDSEA_TOKEN")
		cfg.TokenFile = os.Getenv("SANDSEA_TOKEN_FILE")
	}
	if cfg.Token != "" {
		return cfg, nil
	}
	file, named := cfg.TokenFile, true
	if file == "" {
		file, named = DefaultTokenFile, false
	}
	cfg.Token, err = readToken(file)
	if err == nil || (!named && errors.Is(err, fs.ErrNotExist)) {
		// Without a local token the first call says unauthenticated, or that no server is there.
		return cfg, nil
	}
	if named || !errors.Is(err, fs.ErrPermission) {
		return cfg, err
	}
	return cfg, errdefs.New(errdefs.Unauthenticated, "", "no token: SANDSEA_TOKEN unset, %s unreadable for uid %d",
		file, os.Getuid()).WithHint("Set SANDSEA_TOKEN_FILE").Wrap(err)
}

// readToken reads a secret and refuses one that others can read.
func readToken(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return "", errdefs.New(errdefs.FailedPrecondition, file, "others can read it (%#o)", st.Mode().Perm()).
			WithHint("Run: chmod 600 %s", file)
	}
	buf := make([]byte, 4096)
	n, err := f.Read(buf)
	if err != nil {
		return "", fmt.Errorf("token file %s: %w", file, err)
	}
	return strings.TrimSpace(string(buf[:n])), nil
}

// interceptor adds the token and restores errors.
type interceptor struct{ token, url string }

func (i interceptor) restore(err error) error {
	if err == nil {
		return nil
	}
	if _, refused := errors.AsType[*net.OpError](err); refused {
		return errdefs.New(errdefs.Unavailable, "", "cannot reach %s: %s", i.url, rootCause(err)).
			WithHint("Start it: sudo sandsea up").Wrap(err)
	}
	return errwire.FromConnect(err)
}

// rootCause is the innermost message, as "connection refused".
func rootCause(err error) string {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err.Error()
		}
		err = next
	}
}

func (i interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", "Bearer "+i.token)
		res, err := next(ctx, req)
		if err != nil {
			return nil, i.restore(err)
		}
		return res, nil
	}
}

func (i interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", "Bearer "+i.token)
		return streamConn{StreamingClientConn: conn, restore: i.restore}
	}
}

func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// streamConn restores the errors of a stream; io.EOF passes, it is the stream's own word.
type streamConn struct {
	connect.StreamingClientConn
	restore func(error) error
}

func (s streamConn) Receive(m any) error { return s.pass(s.StreamingClientConn.Receive(m)) }
func (s streamConn) Send(m any) error    { return s.pass(s.StreamingClientConn.Send(m)) }

func (s streamConn) pass(err error) error {
	if err == nil || isEOF(err) {
		return err
	}
	return s.restore(err)
}
