package mirror

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
)

// SendObject answers with an object, or the range of it that is asked for, and reports it. A transfer that breaks, as
// when the bytes turn out wrong, breaks the connection as well: SendObject does not return then.
func SendObject(w http.ResponseWriter, r *http.Request, c *Caller, a Artefact, o *cache.Object, from cache.Source) {
	n, err := o.Serve(w, r)
	a.Bytes, a.Source, a.Digest = n, string(from), o.Meta().Digests["sha256"]
	if err != nil {
		a.Error = err.Error()
		c.Report(a)
		panic(http.ErrAbortHandler) // the way to break off an answer whose header is out: net/http recovers it
	}
	c.Report(a)
}

// SendBytes answers a GET or HEAD with a list or other document made for this caller, and reports it.
func SendBytes(w http.ResponseWriter, r *http.Request, c *Caller, a Artefact, contentType string, body []byte, from cache.Source) {
	a.Source = string(from)
	w.Header().Set("Content-Type", contentType)
	if r.Method != http.MethodHead {
		n, err := w.Write(body)
		a.Bytes = int64(n)
		if err != nil {
			a.Error = err.Error()
		}
	}
	c.Report(a)
}

// SendWritten answers a GET or HEAD with a document that is too large to be held, written for this caller as it is read,
// and reports it. The errors of out may be left to the end: it is flushed. When write fails, the connection is broken and
// SendWritten does not return.
func SendWritten(w http.ResponseWriter, r *http.Request, c *Caller, a Artefact, contentType string, from cache.Source,
	write func(out *bufio.Writer) error,
) {
	a.Source = string(from)
	w.Header().Set("Content-Type", contentType)
	if r.Method == http.MethodHead {
		c.Report(a)
		return
	}
	body := &counter{w: w}
	out := bufio.NewWriterSize(body, 64<<10)
	err := write(out)
	if err == nil {
		err = out.Flush()
	}
	if a.Bytes = body.n; err != nil {
		a.Error = err.Error()
		c.Report(a)
		panic(http.ErrAbortHandler) // a part is out: only a broken connection tells that it is not all
	}
	c.Report(a)
}

// counter counts a body.
type counter struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// Fail answers for what could not be had, with a status that package clients understand: 404 for what upstream does not
// have, 502 for bytes or answers of no use and 503 for an upstream that is away. It reports the error; the caller is not
// told where upstream is.
func Fail(w http.ResponseWriter, c *Caller, a Artefact, err error) {
	a.Error = err.Error()
	c.Report(a)
	status, text := http.StatusBadGateway, "the registry's answer is of no use"
	switch errdefs.KindOf(err) {
	case errdefs.NotFound:
		status, text = http.StatusNotFound, "the registry has no such thing"
	case errdefs.Unavailable, errdefs.Deadline, errdefs.Canceled, errdefs.Exhausted:
		status, text = http.StatusServiceUnavailable, "the registry does not answer"
	case errdefs.Invalid:
		status, text = http.StatusBadRequest, err.Error()
	}
	// Our own words say more, without what a transport said, which has addresses.
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Msg != "" && !strings.Contains(e.Msg, "://") {
		msg := e.Msg
		if e.Err != nil {
			msg, _, _ = strings.Cut(msg, ": ")
		}
		text = strings.TrimSuffix(msg+". "+e.Hint, ". ")
	}
	if e, ok := errors.AsType[*cache.StatusError](err); ok {
		text = fmt.Sprintf("the registry answered %d %s", e.Status, http.StatusText(e.Status))
		if status == http.StatusServiceUnavailable && e.Status < 500 && e.Status != http.StatusTooManyRequests {
			status = http.StatusBadGateway // asking again does not help
		}
	}
	http.Error(w, strings.TrimLeft(strings.TrimSpace(a.Name+" "+a.Version)+": "+text, ": "), status)
}

// ReadOnly refuses what is not a GET or HEAD: package services publish nothing. It tells whether it did.
func ReadOnly(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return false
	}
	w.Header().Set("Allow", "GET, HEAD")
	http.Error(w, "this mirror is read only: "+r.Method+" is refused", http.StatusMethodNotAllowed)
	return true
}
