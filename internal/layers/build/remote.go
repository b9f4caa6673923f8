package build

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

const (
	dialLimit   = 10 * time.Second
	answerLimit = 60 * time.Second
	// stallLimit is how long a download may give no byte before it counts as broken.
	stallLimit = 30 * time.Second
	// attempts is how often in a row something is asked for that comes to nothing.
	attempts     = 5
	firstPause   = 200 * time.Millisecond
	maxRedirects = 5
)

var manifestTypes = strings.Join([]string{
	string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1),
	string(types.DockerManifestSchema2), string(types.DockerManifestSchema1Signed), string(types.DockerManifestSchema1),
}, ", ")

var (
	errPlainHTTP = errors.New("plain HTTP is not allowed")
	errStalled   = fmt.Errorf("no byte came for %s", stallLimit)
	errAddress   = errors.New("an address that registries may not lead to")
	errRedirects = fmt.Errorf("more than %d redirects", maxRedirects)
)

// credentials are what is shown to a registry.
type credentials struct {
	authn.Authenticator
	isAnonymous bool
}

// remote is one registry during one import.
type remote struct {
	ref     name.Reference
	object  string // for messages
	limits  Limits
	auth    credentials
	plain   bool // http:// is allowed
	pause   func(context.Context, time.Duration) error
	base    *http.Transport
	client  *http.Client
	reader  *imageReader
	private atomic.Bool // the registry itself is on this network
	proxies atomic.Pointer[string]
	after   atomic.Int64 // nanoseconds, of the last Retry-After
}

func (b *Builder) newRemote(ref name.Reference, opts RegistryOptions) *remote {
	host, _, err := net.SplitHostPort(ref.Context().RegistryStr())
	if err != nil {
		host = ref.Context().RegistryStr()
	}
	r := &remote{
		ref: ref, object: familiar(ref), limits: b.limits, auth: opts.auth(),
		plain: opts.Insecure || isLoopback(host), pause: b.pause,
	}
	r.base = &http.Transport{
		DialContext: r.dial, TLSHandshakeTimeout: dialLimit, ResponseHeaderTimeout: answerLimit,
		ExpectContinueTimeout: time.Second, IdleConnTimeout: answerLimit, MaxIdleConnsPerHost: downloads,
		ForceAttemptHTTP2: true, DisableCompression: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: opts.Insecure}, //nolint:gosec // as asked for
		Proxy: func(req *http.Request) (*url.URL, error) {
			if b.proxy == nil {
				return nil, nil
			}
			u, err := b.proxy(req)
			if u != nil {
				host := u.Hostname()
				r.proxies.Store(&host)
			}
			return u, err
		},
	}
	return r
}

func (r *remote) close() { r.base.CloseIdleConnections() }

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// dial connects, but not to where a registry has no business to lead: addresses that only exist on a link, where clouds
// keep their secrets, and this network's unless the registry is in it itself.
func (r *remote) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	own := host == r.ref.Context().RegistryStr() || addr == r.ref.Context().RegistryStr()
	if p := r.proxies.Load(); p != nil && *p == host {
		own = true
	}
	d := net.Dialer{Timeout: dialLimit, Control: func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		ip := to.Addr().Unmap()
		inside := ip.IsPrivate() || ip.IsLoopback()
		switch {
		case ip.IsLinkLocalUnicast(), ip.IsMulticast(), ip.IsUnspecified():
			return errAddress
		case own && inside:
			r.private.Store(true)
		case inside && !r.private.Load():
			return errAddress
		}
		return nil
	}}
	return d.DialContext(ctx, network, addr)
}

// RoundTrip is under go-containerregistry's: every request goes through here.
func (r *remote) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !r.plain {
		return nil, errPlainHTTP
	}
	res, err := r.base.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode == http.StatusTooManyRequests {
		r.after.Store(int64(retryAfter(res.Header.Get("Retry-After"))))
	}
	return res, nil
}

// retryAfter reads seconds or a date; what makes no sense is a minute.
func retryAfter(s string) time.Duration {
	const most = 6 * time.Hour
	if n, err := strconv.ParseInt(s, 10, 32); err == nil && n >= 0 {
		return min(time.Duration(n)*time.Second, most)
	}
	if at, err := http.ParseTime(s); err == nil {
		return min(max(time.Until(at), 0), most)
	}
	return time.Minute
}

// connect asks the registry who it wants to see, and shows it.
func (r *remote) connect(ctx context.Context) error {
	return r.again(ctx, func() (bool, error) {
		rt, err := transport.NewWithContext(ctx, r.ref.Context().Registry, r.auth.Authenticator, r,
			[]string{r.ref.Scope(transport.PullScope)})
		if err != nil {
			return false, err
		}
		r.client = &http.Client{Transport: rt, CheckRedirect: func(_ *http.Request, via []*http.Request) error {
			if len(via) > maxRedirects {
				return errRedirects
			}
			return nil
		}}
		return false, nil
	})
}

// again tries until something works, cannot work, or came to nothing too often in a row.
func (r *remote) again(ctx context.Context, try func() (progress bool, err error)) error {
	wait, left := firstPause, attempts
	for {
		moved, err := try()
		if err == nil {
			return nil
		}
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		if moved {
			wait, left = firstPause, attempts
		}
		said := r.explain(err)
		if left--; left <= 0 || !errors.Is(said, errdefs.Unavailable) {
			return said
		}
		if err := r.pause(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
}

// pause waits.
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

// manifest gets what the reference names.
func (r *remote) manifest(ctx context.Context) (doc []byte, media types.MediaType, err error) {
	return r.get(ctx, "manifests", r.ref.Identifier())
}

// request asks for a part of the repository.
func (r *remote) request(ctx context.Context, kind, id string, change func(*http.Request)) (*http.Response, error) {
	u := url.URL{
		Scheme: r.ref.Context().Scheme(), Host: r.ref.Context().RegistryStr(),
		Path: fmt.Sprintf("/v2/%s/%s/%s", r.ref.Context().RepositoryStr(), kind, id),
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if change != nil {
		change(req)
	}
	res, err := r.client.Do(req)
	if err != nil {
		return nil, err
	}
	if err := transport.CheckError(res, http.StatusOK, http.StatusPartialContent); err != nil {
		_ = res.Body.Close()
		return nil, err
	}
	return res, nil
}

// get reads a document and verifies it, if id is a digest or the registry says one.
func (r *remote) get(ctx context.Context, kind, id string) (doc []byte, media types.MediaType, err error) {
	err = r.again(ctx, func() (bool, error) {
		ctx, stop := context.WithTimeoutCause(ctx, answerLimit, errStalled)
		defer stop()
		res, err := r.request(ctx, kind, id, func(req *http.Request) {
			if kind == "manifests" {
				req.Header.Set("Accept", manifestTypes)
			}
		})
		if err != nil {
			return false, err
		}
		defer res.Body.Close()
		if doc, err = r.reader.readDocument(res.Body, id); err != nil {
			return false, err
		}
		media = types.MediaType(res.Header.Get("Content-Type"))
		want := id
		if _, err := image.ParseDigest(want); err != nil {
			if want = res.Header.Get("Docker-Content-Digest"); !strings.HasPrefix(want, "sha256:") {
				return false, nil
			}
		}
		h := sha256.New()
		h.Write(doc)
		if got := image.FromHash(h); string(got) != want && !media.IsSchema1() {
			return false, r.wrong(want, string(got))
		}
		return false, nil
	})
	return doc, media, err
}

func (r *remote) wrong(want, got string) error {
	return errdefs.New(errdefs.DataLoss, r.object, "the registry gave %s for %s", got, clip(want)).
		WithHint("Nothing imported; the registry, or a proxy before it, has damaged it")
}

// fetch gets a blob into f and verifies it. After a break it goes on where it was, if the registry gives parts; else it
// begins anew.
func (r *remote) fetch(ctx context.Context, b ociBlob, f *os.File, on func(int64)) error {
	var have int64
	sum := sha256.New()
	err := r.again(ctx, func() (bool, error) {
		from := have
		ctx, stop := context.WithCancelCause(ctx)
		defer stop(nil)
		res, err := r.request(ctx, "blobs", b.digest, func(req *http.Request) {
			if have > 0 {
				req.Header.Set("Range", fmt.Sprintf("bytes=%d-", have))
			}
		})
		if err != nil {
			return false, err
		}
		defer res.Body.Close()
		skip := have
		if res.StatusCode == http.StatusPartialContent {
			if skip, err = r.partial(res, have); err != nil {
				return false, err
			}
		}
		stalled := time.AfterFunc(stallLimit, func() { stop(errStalled) })
		defer stalled.Stop()
		body := &meter{alive: aliveIn(ctx), r: res.Body, on: func(int64) { stalled.Reset(stallLimit) }}
		if _, err := io.CopyN(io.Discard, body, skip); err != nil {
			return false, err
		}
		// One byte more than there should be, to see that there is none.
		n, err := io.Copy(onlyWriter{io.MultiWriter(&writeErrors{f}, sum)}, &meter{
			alive: aliveIn(ctx), r: io.LimitReader(body, b.size-have+1), on: on,
		})
		have += n
		switch cause := context.Cause(ctx); {
		case have > b.size:
			return false, r.reader.bad("layer %s has more than the %d bytes that its manifest says", b.digest, b.size)
		case cause != nil:
			return have > from, cause
		case err != nil:
			return have > from, err
		case have < b.size:
			return have > from, io.ErrUnexpectedEOF
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	if got := image.FromHash(sum); string(got) != b.digest {
		return r.wrong(b.digest, string(got))
	}
	return nil
}

// partial tells how much of a part that came is here already.
func (r *remote) partial(res *http.Response, have int64) (skip int64, err error) {
	rest, ok := strings.CutPrefix(res.Header.Get("Content-Range"), "bytes ")
	first, _, _ := strings.Cut(rest, "-")
	from, err := strconv.ParseInt(first, 10, 64)
	if !ok || err != nil || from < 0 || from > have {
		return 0, fmt.Errorf("a part that was not asked for: %w", io.ErrUnexpectedEOF)
	}
	return have - from, nil
}

// writeErrors marks errors of our own file.
type writeErrors struct{ w io.Writer }

func (w *writeErrors) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	if err != nil {
		err = &writeError{err}
	}
	return n, err
}
