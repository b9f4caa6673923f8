package client

import (
	"context"
	"errors"
	"io"
	"net/http"
)

// whole is a transport under which half an upload never looks like a whole one. Connect closes a request's body in good
// order also when the call was cancelled, and that may be faster than the end of the connection; so an end after the
// cancellation is an error, after which net/http drops the connection without the mark that says "complete".
type whole struct{ http.RoundTripper }

func (w whole) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil && r.Body != http.NoBody {
		r = r.Clone(r.Context())
		r.Body = wholeBody{r.Body, r.Context()}
	}
	return w.RoundTripper.RoundTrip(r)
}

// CloseIdleConnections is what http.Client looks for.
func (w whole) CloseIdleConnections() {
	if c, ok := w.RoundTripper.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// unbroken is a caller's own HTTP client over whole.
func unbroken(c *http.Client) *http.Client {
	own := *c
	if own.Transport == nil {
		own.Transport = http.DefaultTransport
	}
	if _, ok := own.Transport.(whole); !ok {
		own.Transport = whole{own.Transport}
	}
	return &own
}

type wholeBody struct {
	io.ReadCloser
	ctx context.Context //nolint:containedctx // the request's own, for as long as its body is read
}

func (b wholeBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) && b.ctx.Err() != nil {
		err = context.Cause(b.ctx)
	}
	return n, err
}

// unsent judges a failed send of an upload: nil when the server has answered already, so that its answer says why. When
// the caller has gone it is no such answer, though it looks the same.
func unsent(ctx context.Context, err error) error {
	if errors.Is(err, io.EOF) && ctx.Err() == nil {
		return nil
	}
	if err == nil {
		return context.Cause(ctx)
	}
	return err
}
