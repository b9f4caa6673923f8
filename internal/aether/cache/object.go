package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Object is one caller's hold of an object that is in the cache or on its way there. Close it.
type Object struct {
	meta    Meta
	stale   bool
	file    *shared
	flight  *flight // nil: the object is whole
	digests []Digest
	closed  atomic.Bool
}

// Meta tells what is known now. Of an object under way, Digests is empty and Size may be -1.
func (o *Object) Meta() Meta {
	if o.flight == nil {
		return o.meta
	}
	o.flight.mu.Lock()
	defer o.flight.mu.Unlock()
	return o.flight.meta
}

// Stale tells that the object answers for an upstream that failed.
func (o *Object) Stale() bool { return o.stale }

// Close lets go of the object.
func (o *Object) Close() error {
	if o.closed.Swap(true) {
		return nil
	}
	o.file.release()
	if o.flight != nil {
		o.flight.leave()
	}
	return nil
}

// Bytes waits for the whole object and returns it. Use it for lists, whose size Options bounds.
func (o *Object) Bytes(ctx context.Context) ([]byte, error) {
	m, err := o.Wait(ctx)
	if err != nil {
		return nil, err
	}
	b := make([]byte, m.Size)
	if _, err := io.ReadFull(io.NewSectionReader(o.file, 0, m.Size), b); err != nil {
		return nil, fmt.Errorf("read %q from the package cache: %w", m.Key, err)
	}
	return b, nil
}

// Wait waits until the object is whole and verified, and returns its final Meta.
func (o *Object) Wait(ctx context.Context) (Meta, error) {
	if o.flight == nil {
		return o.meta, nil
	}
	return o.flight.settle(ctx)
}

// Reader reads the object from its beginning, and waits for bytes under way. An object whose Size is unknown cannot seek
// from its end. The reader is for one goroutine and lives no longer than its Object.
func (o *Object) Reader(ctx context.Context) io.ReadSeeker { return &reader{ctx: ctx, o: o} }

type reader struct {
	ctx  context.Context // of the one answer that is being written
	o    *Object
	off  int64
	idle func() // before it waits; may be nil
	err  error  // why it broke
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	have := r.o.meta.Size
	if r.o.flight != nil {
		var err error
		if have, err = r.o.flight.await(r.ctx, r.off, r.idle); err != nil {
			if !errors.Is(err, io.EOF) {
				r.err = err
			}
			return 0, err
		}
	}
	if r.off >= have {
		return 0, io.EOF
	}
	if int64(len(p)) > have-r.off {
		p = p[:have-r.off]
	}
	n, err := r.o.file.ReadAt(p, r.off)
	r.off += int64(n)
	if n > 0 {
		return n, nil
	}
	r.err = err
	return 0, err
}

// Seek implements io.Seeker.
func (r *reader) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += r.off
	case io.SeekEnd:
		size := r.o.Meta().Size
		if size < 0 {
			return 0, errors.New("size is not known yet")
		}
		offset += size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	r.off = offset
	return offset, nil
}

// Serve answers a GET or HEAD with the object, or the range of it that the request asks for, and returns how many bytes
// of body were written. It sets the Content-Type unless that is set, the ETag, and no other header.
//
// Of an object under way, the last byte of the answer is held back until the whole is verified, so that wrong bytes never
// make a whole answer. A non-nil error means that the answer is broken: the caller, when it has taken note, panics with
// http.ErrAbortHandler, as net/http wants it, to break the connection too.
func (o *Object) Serve(w http.ResponseWriter, r *http.Request) (int64, error) {
	m := o.Meta()
	h := w.Header()
	if h.Get("Content-Type") == "" {
		ct := m.ContentType
		if ct == "" {
			ct = "application/octet-stream"
		}
		h.Set("Content-Type", ct)
	}
	if tag := o.etag(m); tag != "" {
		h.Set("ETag", tag)
	}
	modified, _ := http.ParseTime(m.LastModified) // zero: unknown
	out := &writer{ResponseWriter: w, size: -1}
	content := &reader{ctx: r.Context(), o: o}
	if o.flight != nil {
		out.settle = func() error {
			_, err := o.flight.settle(r.Context())
			return err
		}
		content.idle = func() { _ = http.NewResponseController(w).Flush() }
		if m.Size == 0 { // there is no byte to hold back
			if err := out.settle(); err != nil {
				return 0, err
			}
		}
	}
	if m.Size >= 0 {
		http.ServeContent(out, r, "", modified, content)
		return out.written, errors.Join(content.err, out.err)
	}
	// The length is unknown, so there is no Range; the end is told by chunks.
	out.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return 0, nil
	}
	_, err := io.Copy(struct{ io.Writer }{out}, content)
	if err == nil {
		err = out.flush()
	}
	return out.written, errors.Join(err, out.err)
}

// etag of answers: the same while the object is under way as when it is whole, so that a client can resume.
func (o *Object) etag(m Meta) string {
	if len(o.digests) > 0 {
		return `"` + o.digests[0].Hex + `"`
	}
	if m.ETag != "" && !strings.HasPrefix(m.ETag, "W/") {
		return m.ETag
	}
	if m.LastModified == "" && m.Digests["sha256"] != "" {
		return `"` + m.Digests["sha256"] + `"`
	}
	return ""
}

// writer counts the body, and holds its last byte back until settle agrees, which may be nil.
type writer struct {
	http.ResponseWriter
	settle  func() error
	size    int64 // of the body, by its header; -1: unknown
	held    []byte
	written int64
	err     error
}

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(status int) {
	if n := w.Header().Get("Content-Length"); n != "" {
		if _, err := fmt.Sscan(n, &w.size); err != nil {
			w.size = -1
		}
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *writer) Write(p []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	if w.settle == nil || len(p) == 0 {
		return w.pass(p)
	}
	if err := w.flushHeld(); err != nil {
		return 0, err
	}
	whole := len(p)
	if w.size < 0 || w.written+int64(len(p)) >= w.size {
		// This may be, or is, the last byte.
		w.held = bytes.Clone(p[len(p)-1:])
		p = p[:len(p)-1]
	}
	n, err := w.pass(p)
	if err != nil {
		return n, err
	}
	if w.size >= 0 && w.held != nil {
		if err := w.flush(); err != nil {
			return n, err
		}
	}
	return whole, nil
}

// flush writes the last byte once the object is verified.
func (w *writer) flush() error {
	if w.held == nil {
		return nil
	}
	if err := w.settle(); err != nil {
		w.err = err
		return err
	}
	return w.flushHeld()
}

func (w *writer) flushHeld() error {
	p := w.held
	w.held = nil
	_, err := w.pass(p)
	return err
}

func (w *writer) pass(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := w.ResponseWriter.Write(p)
	w.written += int64(n)
	if err != nil {
		w.err = fmt.Errorf("client is gone: %w", errdefs.New(errdefs.Canceled, "answer", "was not read to its end").Wrap(err))
	}
	return n, err
}
