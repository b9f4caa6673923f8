package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Limits of a fetch.
const (
	maxRedirects = 10
	attempts     = 3                // of a request, and of resuming a body that makes no progress
	headerLimit  = 20 * time.Second // until the answer's header
	idleLimit    = 30 * time.Second // without a byte of the body
	maxPause     = 5 * time.Second  // between tries, whatever upstream wishes
)

// errSilent marks an upstream that took the request and says nothing: asking again would only double the wait.
var errSilent = errors.New("silent")

// Client fetches from the upstreams of one service. It is safe for concurrent use.
type Client struct {
	rt          http.RoundTripper
	credentials []Credential
	received    atomic.Int64
	// pause waits between tries.
	pause func(ctx context.Context, d time.Duration) error
}

// NewClient makes the Client of an upstream. Connections are rt's: it verifies TLS, and must neither follow redirects
// nor add credentials; http.Transport does neither.
func NewClient(rt http.RoundTripper, u Upstream) *Client {
	return &Client{rt: rt, credentials: u.Credentials, pause: pause}
}

// Received is how many bytes of bodies came since the client was made.
func (c *Client) Received() int64 { return c.received.Load() }

// Get fetches rawURL with header, which may be nil. It follows redirects, never from https to http, and sends
// credentials only to their own origin. A failed connection and the answers 429, 502, 503 and 504 are tried again; a body
// that breaks off is resumed by Range if its ETag is still the same. Every other answer is returned as it is. The
// Response's Request has the URL that answered.
//
// The bytes are asked for as they are, unless header has "Accept-Encoding: gzip": then the transport may have them
// compressed on the way, and what is read is plain all the same. Errors are errdefs.Unavailable.
func (c *Client) Get(ctx context.Context, rawURL string, header http.Header) (*http.Response, error) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Host == "" {
		return nil, errdefs.New(errdefs.Invalid, "upstream", "%q is not a URL", rawURL)
	}
	resp, err := c.retry(ctx, u, header)
	if err != nil {
		return nil, err
	}
	resp.Body = &body{client: c, ctx: ctx, resp: resp, header: header, from: resp.Body, left: attempts}
	return resp, nil
}

// retry asks until there is an answer worth returning.
func (c *Client) retry(ctx context.Context, u *url.URL, header http.Header) (*http.Response, error) {
	for try := 1; ; try++ {
		resp, err := c.follow(ctx, u, header)
		wait := 100 * time.Millisecond << (2 * try) // 0.4 s, 1.6 s
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = resp.Body.Close()
			}
			return nil, context.Cause(ctx)
		case err == nil && !transient(resp.StatusCode):
			return resp, nil
		case errdefs.KindOf(err) == errdefs.Denied || errors.Is(err, errSilent):
			return nil, err
		case try == attempts && err != nil:
			return nil, errdefs.New(errdefs.Unavailable, "upstream "+u.Host, "does not answer: %v", err).Wrap(err)
		case try == attempts:
			return resp, nil
		case err == nil:
			if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s >= 0 {
				wait = time.Duration(s) * time.Second
			}
			_ = resp.Body.Close()
		}
		if err := c.pause(ctx, min(wait, maxPause)); err != nil {
			return nil, err
		}
	}
}

func transient(status int) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// follow asks once, and again wherever the answer sends it.
func (c *Client) follow(ctx context.Context, u *url.URL, header http.Header) (*http.Response, error) {
	for range maxRedirects {
		resp, err := c.once(ctx, u, header)
		if err != nil {
			return nil, err
		}
		switch resp.StatusCode {
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		default:
			return resp, nil
		}
		_ = resp.Body.Close()
		next, err := u.Parse(resp.Header.Get("Location"))
		if err != nil || next.Host == "" || next.Scheme != "https" && next.Scheme != "http" {
			return nil, errdefs.New(errdefs.Denied, "upstream "+u.Host, "redirects to something that is no web address")
		}
		if u.Scheme == "https" && next.Scheme == "http" {
			return nil, errdefs.New(errdefs.Denied, "upstream "+u.Host, "redirects from https to http, which is not followed")
		}
		if next.User != nil {
			next.User = nil // a redirect brings no credentials
		}
		u = next
	}
	return nil, errdefs.New(errdefs.Denied, "upstream "+u.Host, "redirects more than %d times", maxRedirects)
}

// once asks once. The header must come within its limit.
func (c *Client) once(ctx context.Context, u *url.URL, header http.Header) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(headerLimit, func() {
		cancel(errdefs.New(errdefs.Unavailable, "upstream "+u.Host, "sent no answer within %s", headerLimit).Wrap(errSilent))
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		timer.Stop()
		cancel(nil)
		return nil, err
	}
	if header != nil {
		req.Header = header.Clone()
	}
	if req.Header.Get("Accept-Encoding") == "gzip" {
		req.Header.Del("Accept-Encoding") // http.Transport undoes only what it asked for itself
	} else {
		req.Header.Set("Accept-Encoding", "identity")
	}
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "sandsea")
	}
	near := map[string]int{} // by header
	for _, cr := range c.credentials {
		if n := cr.nearness(u.Path); cr.covers(u) && n >= near[cr.Header] {
			near[cr.Header] = n
			req.Header.Set(cr.Header, cr.Value)
		}
	}
	resp, err := c.rt.RoundTrip(req)
	timer.Stop()
	if err != nil {
		cause := context.Cause(ctx)
		cancel(nil)
		if cause != nil {
			return nil, cause
		}
		return nil, err
	}
	resp.Body = &guarded{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, host: u.Host, received: &c.received}
	return resp, nil
}

// guarded is a body that must not pause for longer than the limit.
type guarded struct {
	io.ReadCloser
	ctx      context.Context // of this one request
	cancel   context.CancelCauseFunc
	host     string
	received *atomic.Int64
}

// Read implements io.Reader.
func (g *guarded) Read(p []byte) (int, error) {
	timer := time.AfterFunc(idleLimit, func() {
		g.cancel(errdefs.New(errdefs.Unavailable, "upstream "+g.host, "sent nothing for %s", idleLimit))
	})
	n, err := g.ReadCloser.Read(p)
	timer.Stop()
	g.received.Add(int64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := context.Cause(g.ctx); cause != nil {
			err = cause
		}
	}
	return n, err
}

// Close implements io.Closer.
func (g *guarded) Close() error {
	g.cancel(nil)
	return g.ReadCloser.Close()
}

// body resumes a transfer that broke off.
type body struct {
	client *Client
	ctx    context.Context // of the fetch
	resp   *http.Response  // the first answer
	header http.Header
	from   io.ReadCloser
	got    int64
	left   int // tries since the last byte
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	for {
		n, err := b.from.Read(p)
		b.got += int64(n)
		if n > 0 {
			b.left = attempts
			if err != nil && !errors.Is(err, io.EOF) {
				err = nil // told again by the next Read
			}
			return n, err
		}
		if err == nil || errors.Is(err, io.EOF) && !b.short() {
			return 0, err
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if rerr := b.resume(err); rerr != nil {
			return 0, rerr
		}
	}
}

// short tells whether bytes are missing.
func (b *body) short() bool { return b.resp.ContentLength >= 0 && b.got < b.resp.ContentLength }

// resume asks for the rest, or returns why that cannot be: cause, with a few words.
func (b *body) resume(cause error) error {
	if err := context.Cause(b.ctx); err != nil {
		return err
	}
	broke := errdefs.New(errdefs.Unavailable, "upstream "+b.resp.Request.URL.Host, "broke off after %d bytes: %v", b.got, cause).Wrap(cause)
	tag := b.resp.Header.Get("ETag")
	if b.resp.StatusCode != http.StatusOK || tag == "" || strings.HasPrefix(tag, "W/") || b.resp.Uncompressed {
		return broke
	}
	for b.left > 0 {
		b.left--
		_ = b.from.Close()
		if err := b.client.pause(b.ctx, 200*time.Millisecond); err != nil {
			return err
		}
		h := http.Header{}
		if b.header != nil {
			h = b.header.Clone()
		}
		h.Del("If-None-Match")
		h.Del("If-Modified-Since")
		h.Set("Range", fmt.Sprintf("bytes=%d-", b.got))
		h.Set("If-Range", tag)
		resp, err := b.client.follow(b.ctx, b.resp.Request.URL, h)
		if err != nil {
			continue
		}
		want := fmt.Sprintf("bytes %d-", b.got)
		if resp.StatusCode != http.StatusPartialContent || resp.Header.Get("ETag") != tag || !strings.HasPrefix(resp.Header.Get("Content-Range"), want) {
			_ = resp.Body.Close()
			return broke
		}
		b.from = resp.Body
		return nil
	}
	return broke
}

// Close implements io.Closer.
func (b *body) Close() error { return b.from.Close() }

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
