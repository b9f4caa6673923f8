// Package client is the Go client of a Sandsea server.
//
// A Client is safe for concurrent use and keeps its connections. Every error it returns can be asked for its kind with
// errors.Is(err, errdefs.NotFound) and reads as one sentence with the way out. A command that fails is a result, not an
// error. A call that changes something and whose answer is lost ends with errdefs.Unknown: it may have been done.
//
//	c, err := client.New(client.Config{})                    // SANDSEA_URL, SANDSEA_TOKEN, or the local default
//	sb, err := c.Create(ctx, &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}}, "")
//	res, err := sb.Run(ctx, client.Shell("pytest -q"))
//	err = sb.Stop(ctx)
package client

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
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

// Config says where the server is and who asks. Empty fields come from SANDSEA_URL, SANDSEA_TOKEN, SANDSEA_TOKEN_FILE
// and SANDSEA_PROJECT, then from the local default.
type Config struct {
	URL   string
	Token string
	// TokenFile is read when Token is empty.
	TokenFile string
	// Project is one of those that the token covers; empty means the token's own.
	Project string
	// HTTP replaces the transport.
	HTTP *http.Client
}

// Client speaks to one server. The service clients are the whole API; the methods are the convenient part of it.
type Client struct {
	Sandboxes sandseav1connect.SandboxServiceClient
	Processes sandseav1connect.ProcessServiceClient
	Files     sandseav1connect.FileServiceClient
	Images    sandseav1connect.ImageServiceClient
	Network   sandseav1connect.NetworkServiceClient
	Nodes     sandseav1connect.NodeServiceClient
	IAM       sandseav1connect.IAMServiceClient

	url    string
	taking sync.WaitGroup // creates that are being taken back
}

// New makes a client. It does not connect: a server that is away shows at the first call.
func New(cfg Config) (*Client, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if cfg.HTTP == nil {
		cfg.HTTP = &http.Client{Transport: Transport()}
	} else {
		cfg.HTTP = unbroken(cfg.HTTP)
	}
	opts := []connect.ClientOption{
		connect.WithInterceptors(interceptor{token: cfg.Token, project: cfg.Project, url: cfg.URL}),
		connect.WithReadMaxBytes(256 << 20),
	}
	return &Client{
		Sandboxes: sandseav1connect.NewSandboxServiceClient(cfg.HTTP, cfg.URL, opts...),
		Processes: sandseav1connect.NewProcessServiceClient(cfg.HTTP, cfg.URL, opts...),
		Files:     sandseav1connect.NewFileServiceClient(cfg.HTTP, cfg.URL, opts...),
		Images:    sandseav1connect.NewImageServiceClient(cfg.HTTP, cfg.URL, opts...),
		Network:   sandseav1connect.NewNetworkServiceClient(cfg.HTTP, cfg.URL, opts...),
		Nodes:     sandseav1connect.NewNodeServiceClient(cfg.HTTP, cfg.URL, opts...),
		IAM:       sandseav1connect.NewIAMServiceClient(cfg.HTTP, cfg.URL, opts...),
		url:       cfg.URL,
	}, nil
}

// Transport is what a Client uses when it is given none: for those who wrap it to watch calls or to bound them.
func Transport() http.RoundTripper {
	return whole{&http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
		MaxIdleConns:        1024,
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true,
	}}
}

// URL is the server's address.
func (c *Client) URL() string { return c.url }

// complete fills the empty fields from the environment and checks them.
func (cfg Config) complete() (Config, error) {
	cfg.URL = cmp.Or(cfg.URL, os.Getenv("SANDSEA_URL"), DefaultURL)
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return cfg, errdefs.New(errdefs.Invalid, "", "server address %q", cfg.URL).WithField("SANDSEA_URL", "").
			WithHint("Write it as http://HOST:PORT")
	}
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	cfg.Project = cmp.Or(cfg.Project, os.Getenv("SANDSEA_PROJECT"))
	if cfg.Token == "" && cfg.TokenFile == "" {
		cfg.Token = os.Getenv("SANDSEA_TOKEN")
		cfg.TokenFile = os.Getenv("SANDSEA_TOKEN_FILE")
	}
	if cfg.Token = strings.TrimSpace(cfg.Token); cfg.Token != "" {
		if !isToken(cfg.Token) {
			// Said here and without it: below, the error for a header that cannot be sent may show the token.
			return cfg, errdefs.New(errdefs.Unauthenticated, "", "the token is none: it has letters that no token has").
				WithHint("Set SANDSEA_TOKEN_FILE")
		}
		return cfg, nil
	}
	if cfg.TokenFile != "" {
		cfg.Token, err = readToken(cfg.TokenFile)
		return cfg, err
	}
	cfg.Token, err = readToken(DefaultTokenFile)
	return cfg, defaultTokenError(err, os.Getuid())
}

// defaultTokenError says what it means that the local server's own token could not be read. That there is none is no
// error yet: the first call says unauthenticated, or that no server is there.
func defaultTokenError(err error, uid int) error {
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, fs.ErrPermission):
		return errdefs.New(errdefs.Unauthenticated, "", "no token: SANDSEA_TOKEN unset, %s unreadable for uid %d",
			DefaultTokenFile, uid).WithHint("Set SANDSEA_TOKEN_FILE").Wrap(err)
	}
	return err
}

// readToken reads a secret and refuses one that others can read.
func readToken(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", tokenFileError(file, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return "", tokenFileError(file, err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return "", errdefs.New(errdefs.FailedPrecondition, file, "others can read it (%#o)", st.Mode().Perm()).
			WithHint("Run: chmod 600 %s", file)
	}
	buf := make([]byte, maxToken)
	n, err := io.ReadFull(f, buf)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", tokenFileError(file, err)
	}
	token := strings.TrimSpace(string(buf[:n]))
	if token == "" || n == maxToken || !isToken(token) {
		return "", errdefs.New(errdefs.Unauthenticated, file, "holds no token").WithHint("Set SANDSEA_TOKEN_FILE to the right file")
	}
	return token, nil
}

// isToken reports whether s has only letters that a token may have.
func isToken(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// maxToken is more than any token has.
const maxToken = 4096

func tokenFileError(file string, err error) error {
	return errdefs.New(errdefs.Unauthenticated, file, "token file: %s", rootCause(err)).
		WithHint("Set SANDSEA_TOKEN_FILE to the right file").Wrap(err)
}

// projectHeader chooses one of the projects that a token covers.
const projectHeader = "Sandsea-Project"

// repeatable are the calls that change nothing, or nothing more when they are made again.
var repeatable = map[string]bool{
	sandseav1connect.SandboxServiceGetProcedure: true, sandseav1connect.SandboxServiceListProcedure: true,
	sandseav1connect.SandboxServiceWatchProcedure: true, sandseav1connect.SandboxServiceStopProcedure: true,
	sandseav1connect.SandboxServiceStopManyProcedure: true, sandseav1connect.SandboxServiceExtendTTLProcedure: true,
	sandseav1connect.ProcessServiceAttachProcedure: true, sandseav1connect.ProcessServiceSendInputProcedure: true,
	sandseav1connect.ProcessServiceCloseInputProcedure: true, sandseav1connect.ProcessServiceListProcedure: true,
	sandseav1connect.FileServiceReadProcedure: true, sandseav1connect.FileServiceStatProcedure: true,
	sandseav1connect.FileServiceListProcedure: true, sandseav1connect.FileServiceDownloadTarProcedure: true,
	sandseav1connect.FileServiceReadBatchProcedure: true, sandseav1connect.FileServiceWatchProcedure: true,
	sandseav1connect.ImageServiceUploadProcedure: true, sandseav1connect.ImageServiceImportProcedure: true,
	sandseav1connect.ImageServiceGetProcedure: true, sandseav1connect.ImageServiceListProcedure: true,
	sandseav1connect.NodeServiceGetProcedure: true, sandseav1connect.NodeServiceListProcedure: true,
	sandseav1connect.NetworkServiceSetPolicyProcedure: true, sandseav1connect.NetworkServiceSetPhaseProcedure: true,
	sandseav1connect.NetworkServiceCheckProcedure: true, sandseav1connect.NetworkServiceLogProcedure: true,
	sandseav1connect.NetworkServiceEndpointProcedure:     true,
	sandseav1connect.SandboxServiceCapabilitiesProcedure: true, sandseav1connect.IAMServiceWhoAmIProcedure: true,
}

// interceptor says who asks and restores errors.
type interceptor struct{ token, project, url string }

func (i interceptor) identify(h http.Header) {
	if i.token != "" {
		h.Set("Authorization", "Bearer "+i.token)
	}
	if i.project != "" {
		h.Set(projectHeader, i.project)
	}
}

// restore gives an error its kind. safe says that the call can be made again whatever became of it.
func (i interceptor) restore(err error, safe bool) error {
	if err == nil {
		return nil
	}
	if connect.IsWireError(err) {
		return errwire.FromConnect(err)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return errdefs.New(errdefs.Unavailable, "", "cannot reach %s: %s", i.url, rootCause(err)).
			WithHint("%s", i.startHint()).Wrap(err)
	}
	switch connect.CodeOf(err) {
	case connect.CodeInternal:
		if strings.Contains(err.Error(), "contains invalid UTF-8") { // nothing was sent
			return errdefs.New(errdefs.Invalid, "", "a text of the request is not UTF-8").
				WithHint("Carry names that are not in a tar stream").Wrap(err)
		}
	case connect.CodeCanceled:
		if !broken(err) { // as the library calls a connection that was reset
			return errdefs.New(errdefs.Canceled, "", "the call was given up before its answer").Wrap(err)
		}
	case connect.CodeDeadlineExceeded:
		if safe {
			return errdefs.New(errdefs.Deadline, "", "no answer from %s in time", i.url).Wrap(err)
		}
		return errdefs.New(errdefs.Unknown, "", "no answer from %s in time, it may have been done", i.url).Wrap(err)
	case connect.CodeResourceExhausted:
		if !broken(err) {
			return errwire.FromConnect(err) // a message beyond a limit of ours
		}
	case connect.CodeInvalidArgument: // the library's word for an answer that it cannot decode
		if safe {
			return errdefs.New(errdefs.DataLoss, "", "the answer of %s cannot be read", i.url).
				WithHint("Check that nothing on the way changes what the server sends").Wrap(err)
		}
		return errdefs.New(errdefs.Unknown, "", "the answer of %s cannot be read, it may have been done", i.url).Wrap(err)
	case connect.CodeUnimplemented, connect.CodeUnknown:
		if !broken(err) {
			return errdefs.New(errdefs.FailedPrecondition, i.url, "is no Sandsea server: %s", rootCause(err)).
				WithHint("Check SANDSEA_URL").Wrap(err)
		}
	}
	if safe {
		return errdefs.New(errdefs.Unavailable, "", "the connection to %s broke: %s", i.url, rootCause(err)).Wrap(err)
	}
	return errdefs.New(errdefs.Unknown, "", "the connection to %s broke, it may have been done: %s", i.url, rootCause(err)).Wrap(err)
}

func (i interceptor) startHint() string {
	u, err := url.Parse(i.url)
	if err == nil {
		if ip := net.ParseIP(u.Hostname()); u.Hostname() == "localhost" || ip != nil && ip.IsLoopback() {
			return "Start it: sudo sandsea up"
		}
	}
	return "Check that it runs there, or set SANDSEA_URL"
}

// broken reports whether a connection ended in the middle.
func broken(err error) bool {
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
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
		i.identify(req.Header())
		res, err := next(ctx, req)
		if err != nil {
			return nil, i.restore(err, repeatable[req.Spec().Procedure])
		}
		return res, nil
	}
}

func (i interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		i.identify(conn.RequestHeader())
		return &streamConn{StreamingClientConn: conn, i: i, safe: repeatable[spec.Procedure]}
	}
}

func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// streamConn restores the errors of a stream; io.EOF passes, it is the stream's own word. A stream sends from one
// goroutine and receives in one, which alone writes safe.
type streamConn struct {
	connect.StreamingClientConn
	i    interceptor
	safe bool
}

func (s *streamConn) Receive(m any) error {
	err := s.StreamingClientConn.Receive(m)
	if err == nil {
		s.safe = true // the server has answered: it is known to have begun
		return nil
	}
	if errors.Is(err, io.EOF) && !isConnectError(err) {
		return err
	}
	return s.i.restore(err, s.safe)
}

func (s *streamConn) Send(m any) error {
	err := s.StreamingClientConn.Send(m)
	if err == nil || errors.Is(err, io.EOF) && !isConnectError(err) {
		return err
	}
	return s.i.restore(err, false)
}

// isConnectError tells a stream that broke from one that ended: both may hold io.EOF.
func isConnectError(err error) bool {
	_, ok := errors.AsType[*connect.Error](err)
	return ok
}
