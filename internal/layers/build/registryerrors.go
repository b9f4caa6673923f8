package build

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sandsea/sandsea/api/errdefs"
)

// explain says what a registry's refusal, or the lack of its answer, means and what may help. What the registry writes
// is left out: it is somebody else's text, and addresses with secrets in them come back in it.
func (r *remote) explain(err error) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e
	}
	if isOwnWrite(err) {
		return err
	}
	if e := r.untrusted(err); e != nil { // first: where both kinds of HTTP were tried, the other's error says less
		return e
	}
	if e, ok := errors.AsType[*transport.Error](err); ok {
		return r.refusal(e)
	}
	host := r.ref.Context().RegistryStr()
	away := func(what string) *errdefs.Error {
		return errdefs.New(errdefs.Unavailable, r.object, "%s: %s", host, what).WithRetryAfter(5*time.Second).
			WithHint("Try again; see whether the node can reach %s", host)
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return errdefs.New(errdefs.FailedPrecondition, r.object, "the node knows no host %s", host).
			WithField("registry.reference", "").WithHint("Check the registry's name, or the node's name service")
	}
	switch {
	case errors.Is(err, errAddress):
		return errdefs.New(errdefs.Denied, r.object, "%s leads to an address that a registry has no business with", host).
			WithField("registry.reference", "").WithHint("Use a registry that answers at its own address")
	case errors.Is(err, errRedirects):
		return errdefs.New(errdefs.FailedPrecondition, r.object, "%s leads on more than %d times", host, maxRedirects).
			WithHint("Ask those who run the registry")
	case errors.Is(err, syscall.ECONNREFUSED):
		return away("connection refused")
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return away("the connection broke, again and again")
	case errors.Is(err, errStalled), errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		return away("no answer in time")
	}
	return away(short(err))
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[net.Error](err)
	return ok && t.Timeout()
}

func isOwnWrite(err error) bool {
	_, ok := errors.AsType[*writeError](err)
	return ok
}

// short is an error's text without the address that was asked, in which secrets may stand.
func short(err error) string {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	return clip(err.Error())
}

// refusal words an HTTP status.
func (r *remote) refusal(e *transport.Error) error {
	var code transport.ErrorCode
	if len(e.Errors) > 0 {
		code = e.Errors[0].Code
	}
	host := r.ref.Context().RegistryStr()
	switch e.StatusCode {
	case http.StatusUnauthorized:
		if r.auth.isAnonymous {
			return errdefs.New(errdefs.Denied, r.object, "%s has no such image for everybody: it does not exist, or asks for "+
				"credentials", host).WithField("registry.auth", "").
				WithHint("Check the name, or give credentials: --username NAME --password-stdin")
		}
		return errdefs.New(errdefs.Denied, r.object, "%s refuses these credentials", host).WithField("registry.auth", "").
			WithHint("Check user and password, and that they may read this image")
	case http.StatusForbidden:
		return errdefs.New(errdefs.Denied, r.object, "%s forbids to read it", host).WithField("registry.auth", "").
			WithHint("Give credentials that may: --username NAME --password-stdin")
	case http.StatusNotFound:
		what := "%s has no such image"
		if code == transport.ManifestUnknownErrorCode {
			what = "%s has no such tag or digest"
		}
		return errdefs.New(errdefs.NotFound, r.object, what, host).WithField("registry.reference", "").
			WithHint("Check repository and tag")
	case http.StatusTooManyRequests:
		hint := "Wait, then import again; what is here already is kept"
		if r.auth.isAnonymous {
			hint = "Wait, or give credentials, which are allowed more: --username NAME --password-stdin"
		}
		return errdefs.New(errdefs.Exhausted, r.object, "%s has served this node its share for now", host).
			WithRetryAfter(max(time.Duration(r.after.Load()), time.Second)).WithHint("%s", hint)
	case http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable,
		http.StatusGatewayTimeout:
		return errdefs.New(errdefs.Unavailable, r.object, "%s answers %d %s", host, e.StatusCode,
			http.StatusText(e.StatusCode)).WithRetryAfter(5 * time.Second).WithHint("Try again in a while")
	}
	return errdefs.New(errdefs.FailedPrecondition, r.object, "%s answers %d %s", host, e.StatusCode,
		http.StatusText(e.StatusCode)).WithHint("Check that it is a registry of images")
}

// untrusted words what is wrong with a registry's certificate; nil if nothing is.
func (r *remote) untrusted(err error) error {
	host := r.ref.Context().RegistryStr()
	say := func(what, hint string) error {
		return errdefs.New(errdefs.FailedPrecondition, r.object, "%s: %s", host, what).WithField("registry.insecure", "").
			WithHint("%s, or accept it as it is: --insecure", hint)
	}
	if e, ok := errors.AsType[x509.HostnameError](err); ok && e.Certificate != nil {
		return say("its certificate is for other names", "Use the name that it is for")
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		if e.Reason == x509.Expired {
			return say("its certificate has expired, or is not valid yet", "Renew it, or set the node's clock")
		}
		return say("its certificate is not valid", "Have it made anew")
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return say("its certificate is of an authority that this node does not know", "Install that authority's certificate "+
			"on the node")
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return say("its certificate cannot be verified", "Have it made anew")
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok || errors.Is(err, http.ErrSchemeMismatch) ||
		errors.Is(err, errPlainHTTP) {
		return say("it speaks plain HTTP, which anybody on the way can read and change", "Have it speak HTTPS")
	}
	return nil
}
