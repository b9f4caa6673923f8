package apiserver

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/apiserver/entries"
	"github.com/sandsea/sandsea/internal/control/apiserver/strictjson"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// RequestHeader carries the request's id in every answer.
const RequestHeader = "Sandsea-Request"

// ProjectHeader lets a caller choose one of the projects that it covers.
const ProjectHeader = "Sandsea-Project"

// call is what the door knows of one procedure.
type call struct {
	right  string // as "sandbox.create"
	input  protoreflect.MessageType
	stream connect.StreamType
	body   int64 // the most that a request message may have
}

// bodyLimit is the largest request message of a procedure.
func bodyLimit(procedure string) int64 {
	if procedure == sandseav1connect.FileServiceWriteBatchProcedure {
		return MaxBatchBody
	}
	return MaxBody
}

// services in the public API, with the word that rights use.
var services = map[protoreflect.Name]string{
	"SandboxService": "sandbox", "ProcessService": "process", "FileService": "file", "NetworkService": "network",
	"ImageService": "image", "NodeService": "node", "IAMService": "iam",
}

// allCalls reads the procedures from the descriptors, so that a new one cannot be forgotten here.
func allCalls() map[string]call {
	out := map[string]call{}
	for _, file := range []protoreflect.FileDescriptor{
		sandseav1.File_sandsea_v1_sandbox_proto, sandseav1.File_sandsea_v1_process_proto,
		sandseav1.File_sandsea_v1_file_proto, sandseav1.File_sandsea_v1_network_proto, sandseav1.File_sandsea_v1_image_proto,
		sandseav1.File_sandsea_v1_node_proto,
	} {
		for i := range file.Services().Len() {
			sd := file.Services().Get(i)
			for j := range sd.Methods().Len() {
				m := sd.Methods().Get(j)
				in, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
				if err != nil {
					panic("apiserver: a message of our own is not registered: " + err.Error())
				}
				c := call{right: services[sd.Name()] + "." + snake(string(m.Name())), input: in}
				switch {
				case m.IsStreamingClient():
					c.stream = connect.StreamTypeClient
				case m.IsStreamingServer():
					c.stream = connect.StreamTypeServer
				}
				procedure := fmt.Sprintf("/%s/%s", sd.FullName(), m.Name())
				c.body = bodyLimit(procedure)
				out[procedure] = c
			}
		}
	}
	return out
}

// snake turns "ExtendTTL" into "extend_ttl".
func snake(s string) string {
	var b strings.Builder
	upper := func(i int) bool { return i >= 0 && i < len(s) && s[i] >= 'A' && s[i] <= 'Z' }
	for i := range len(s) {
		if upper(i) && i > 0 && (!upper(i-1) || i+1 < len(s) && !upper(i+1)) {
			b.WriteByte('_')
		}
		b.WriteByte(s[i])
	}
	return strings.ToLower(b.String())
}

type contextKey int

const (
	callerKey contextKey = iota
	requestKey
	addressKey
)

// caller is who the call in ctx comes from. The door has put it there.
func caller(ctx context.Context) iam.Caller {
	c, _ := ctx.Value(callerKey).(iam.Caller)
	return c
}

func requestID(ctx context.Context) string {
	id, _ := ctx.Value(requestKey).(string)
	return id
}

func newRequestID() string {
	var b [5]byte
	_, _ = rand.Read(b[:]) // never fails: the runtime ends the process instead
	return "r-" + strings.ToLower(base32.StdEncoding.EncodeToString(b[:]))
}

// ServeHTTP is the door: health, limits, who is there, what they may, and what the request says, in this order. What is
// for a server inside a sandbox has a door of its own.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := newRequestID()
	w.Header().Set(RequestHeader, id)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	r = r.WithContext(context.WithValue(r.Context(), requestKey, id))
	defer func() {
		if p := recover(); p != nil {
			if p == http.ErrAbortHandler { //nolint:errorlint // the value itself is the signal
				panic(p)
			}
			s.log.Error("panic in a handler", "request", id, "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
			s.fail(w, r, errdefs.New(errdefs.Internal, "request "+id, "a handler broke"))
		}
	}()
	switch r.URL.Path {
	case "/healthz", "/readyz", "/":
		s.plain(w, r)
		return
	}
	if strings.HasPrefix(r.URL.Path, endpointPrefix) {
		s.endpoints.ServeHTTP(w, r)
		return
	}
	c, known := s.calls[r.URL.Path]
	if !known {
		s.status(w, r, http.StatusNotFound, errdefs.New(errdefs.Invalid, "", "no call %q", clip(r.URL.Path)).
			WithHint("Calls are as /sandsea.v1.SandboxService/Create"))
		return
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		s.status(w, r, http.StatusMethodNotAllowed, errdefs.New(errdefs.Invalid, "", "method %s", clip(r.Method)).
			WithHint("Use POST"))
		return
	}
	if ok, want := accepted(r.Header, c.stream); !ok {
		w.Header().Set("Accept-Post", want)
		s.status(w, r, http.StatusUnsupportedMediaType,
			errdefs.New(errdefs.Invalid, "", "content type %q", clip(r.Header.Get("Content-Type"))).
				WithField("Content-Type", want).WithHint("Use one of: %s", want))
		return
	}
	who, err := s.admit(r, c)
	if err == nil && c.stream != connect.StreamTypeClient {
		var done func()
		if done, err = s.roomFor(r, c); err == nil {
			defer done()
			err = s.readBody(w, r, c)
		}
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	ctx := context.WithValue(context.WithValue(r.Context(), callerKey, who), addressKey, addressFrom(r))
	s.mux.ServeHTTP(w, r.WithContext(ctx))
}

// admit authenticates and authorises.
func (s *Server) admit(r *http.Request, c call) (iam.Caller, error) {
	who, err := s.iam.Authenticate(r.Context(), r.Header)
	if err != nil {
		return who, err
	}
	if c.right != "iam.who_am_i" { // everybody may know who they are
		if err := who.Authorize(c.right); err != nil {
			return who, err
		}
	}
	switch chosen := r.Header.Values(ProjectHeader); {
	case len(chosen) > 1:
		return who, errdefs.New(errdefs.Invalid, "", "%d %s headers", len(chosen), ProjectHeader).WithHint("Send one")
	case len(chosen) == 1:
		if err := iam.CheckProject(chosen[0]); err != nil {
			return who, err
		}
		if !sandboxpb.Covers(who.Covers, chosen[0]) {
			return who, errdefs.New(errdefs.Denied, "project "+chosen[0], "is none of %s", who.Principal).
				WithHint("Leave out SANDSEA_PROJECT, or ask an admin for the right")
		}
		// Inside a chosen project the caller sees that one and what is below it.
		who.Project, who.Covers = chosen[0], []string{chosen[0]}
	}
	return who, nil
}

// roomFor waits until a message that may be large can be held. It is held until done is called.
func (s *Server) roomFor(r *http.Request, c call) (done func(), err error) {
	if c.body <= MaxBody || r.ContentLength >= 0 && r.ContentLength <= MaxBody && !packed(r.Header) {
		return func() {}, nil
	}
	limit := time.NewTimer(bodyWait)
	defer limit.Stop()
	select {
	case s.large <- struct{}{}:
		return func() { <-s.large }, nil
	case <-r.Context().Done():
		return nil, context.Cause(r.Context())
	case <-limit.C:
		e := errdefs.New(errdefs.Exhausted, "", "%d calls with large messages are in work for %s", largeAtOnce, bodyWait).
			WithHint("Try again, or send less at a time").WithRetryAfter(time.Second)
		e.Limit = fmt.Sprintf("%d large messages", largeAtOnce)
		return nil, e
	}
}

// packed reports whether a message may be larger than its body, in whatever protocol.
func packed(h http.Header) bool {
	for _, name := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		if v := h.Get(name); v != "" && v != "identity" {
			return true
		}
	}
	return false
}

// readBody takes the one message of a request in, within a limit of size and time, checks JSON strictly and counts the
// entries of a binary message. Handlers see the same bytes. What is packed or framed its codec checks. A stream from the
// client is read by its handler, frame by frame.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request, c call) error {
	tooLarge := errdefs.New(errdefs.Invalid, "", "the body is larger than %d MiB", c.body>>20).
		WithField("", fmt.Sprintf("%d MiB", c.body>>20)).WithHint("Send large data as a file: sandsea cp")
	if r.ContentLength > c.body+5 {
		return tooLarge
	}
	ctl := http.NewResponseController(w)
	// A connection without deadlines (a test's recorder) is read without one.
	_ = ctl.SetReadDeadline(time.Now().Add(bodyWait))
	body, err := readAll(http.MaxBytesReader(w, r.Body, c.body+5), r.ContentLength)
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return tooLarge
		}
		return errdefs.New(errdefs.Invalid, "", "the body did not arrive: %v", err).
			WithHint("Send it within %s", bodyWait).Wrap(err)
	}
	_ = ctl.SetReadDeadline(time.Time{})
	if c.stream == connect.StreamTypeUnary {
		switch plainType(r.Header) {
		case "application/json":
			err = strictjson.Check(body, c.input)
		case "application/proto":
			err = entries.Wire(body, c.input.Descriptor())
		}
		if err != nil {
			return err
		}
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return nil
}

func readAll(r io.Reader, size int64) ([]byte, error) {
	if size < 0 {
		return io.ReadAll(r)
	}
	b := make([]byte, size)
	_, err := io.ReadFull(r, b)
	if err != nil {
		return nil, err
	}
	// At the end the server sees that nothing more comes and watches for the client to go away.
	var one [1]byte
	if n, err := r.Read(one[:]); n != 0 || !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("body longer than its declared length: %w", err)
	}
	return b, nil
}

// plainType is the content type of a body that is not packed; empty when it is.
func plainType(h http.Header) string {
	t, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if enc := h.Get("Content-Encoding"); err != nil || enc != "" && enc != "identity" {
		return ""
	}
	return t
}

// accepted reports whether the content type can carry the call, and names those that can.
func accepted(h http.Header, stream connect.StreamType) (ok bool, want string) {
	types := []string{"application/json", "application/proto"}
	if stream != connect.StreamTypeUnary {
		types = []string{"application/connect+json", "application/connect+proto"}
	}
	want = strings.Join(append(types, "application/grpc", "application/grpc-web"), ", ")
	values := h.Values("Content-Type")
	if len(values) != 1 {
		return false, want
	}
	t, params, err := mime.ParseMediaType(values[0])
	if err != nil {
		return false, want
	}
	if cs, has := params["charset"]; has && !strings.EqualFold(cs, "utf-8") {
		return false, want
	}
	if t == types[0] || t == types[1] {
		return true, want
	}
	base, codec, _ := strings.Cut(t, "+")
	return (base == "application/grpc" || base == "application/grpc-web") && (codec == "" || codec == "proto" ||
		codec == "json"), want
}

// plain answers the pages that need no token.
func (s *Server) plain(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		s.status(w, r, http.StatusMethodNotAllowed, errdefs.New(errdefs.Invalid, "", "method %s",
			clip(r.Method)).WithHint("Use GET"))
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	switch r.URL.Path {
	case "/healthz":
		_, _ = io.WriteString(w, "ok\n")
	case "/readyz":
		if !s.ready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "starting\n")
			return
		}
		_, _ = io.WriteString(w, "ready\n")
	default:
		_, _ = io.WriteString(w, "Sandsea API. Connect, gRPC and gRPC-Web on this port, JSON by POST:\n"+
			"  curl -H \"Authorization: Bearer $SANDSEA_TOKEN\" -H 'Content-Type: application/json' -d '{}' \\\n"+
			"    URL/sandsea.v1.SandboxService/List\n")
	}
}

// fail writes an error in the caller's protocol.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	if werr := s.errors.Write(w, r, s.outward(r.Context(), r.URL.Path, err)); werr != nil {
		s.log.Debug("error not delivered", "request", requestID(r.Context()), "err", werr)
	}
}

// status writes an error of HTTP itself: its status is the protocol's word, the body is like any other error.
func (s *Server) status(w http.ResponseWriter, r *http.Request, code int, err error) {
	s.fail(statusWriter{w, code}, r, err)
}

type statusWriter struct {
	http.ResponseWriter
	code int
}

func (w statusWriter) WriteHeader(int) { w.ResponseWriter.WriteHeader(w.code) }

// outward makes the error that leaves the house. Internal ones are logged and name the request.
func (s *Server) outward(ctx context.Context, path string, err error) error {
	kind := errdefs.KindOf(err)
	if ce, ok := errors.AsType[*connect.Error](err); ok && kind == errdefs.Internal {
		if _, ours := errors.AsType[*errdefs.Error](err); !ours {
			err = errwire.FromConnect(ce)
			kind = errdefs.KindOf(err)
		}
	}
	id := requestID(ctx)
	if kind == errdefs.Internal {
		s.log.Error("call broke", "request", id, "call", path, "principal", caller(ctx).Principal, "err", err)
		e := *errdefs.From(err)
		if e.Object == "" {
			e.Object = "request " + id
		}
		e.Hint = "See " + id + " in the log of sandsea up"
		err = &e
	} else if (kind == errdefs.Unknown || kind == errdefs.DataLoss) && ctx.Err() == nil { // a caller who left expects none
		s.log.Warn("call without a sure outcome", "request", id, "call", path, "principal", caller(ctx).Principal, "err", err)
	}
	out := errwire.ToConnect(err)
	if ce, ok := errors.AsType[*connect.Error](out); ok {
		ce.Meta().Set(RequestHeader, id)
	}
	return out
}

// errorsOut turns every error of a handler into its outward form, and a panic into an Internal one.
type errorsOut struct{ s *Server }

func (e errorsOut) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		defer func() {
			if p := recover(); p != nil {
				resp, err = nil, e.panicked(ctx, req.Spec().Procedure, p)
			}
		}()
		ctx, settle := e.s.patient(ctx, req.Spec().Procedure, func() bool { return hasKey(req.Any()) })
		resp, err = next(ctx, req)
		if err = settle(err); err != nil {
			return nil, e.s.outward(ctx, req.Spec().Procedure, err)
		}
		return resp, nil
	}
}

func (errorsOut) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (e errorsOut) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = e.panicked(ctx, conn.Spec().Procedure, p)
			}
		}()
		var keyed atomic.Bool
		ctx, settle := e.s.patient(ctx, conn.Spec().Procedure, keyed.Load)
		stream := &keyedStream{StreamingHandlerConn: conn, first: func(m any) { keyed.Store(hasKey(m)) }}
		if err := settle(next(ctx, stream)); err != nil {
			return e.s.outward(ctx, conn.Spec().Procedure, err)
		}
		return nil
	}
}

func (e errorsOut) panicked(ctx context.Context, procedure string, p any) error {
	e.s.log.Error("panic in a handler", "request", requestID(ctx), "call", procedure, "panic", p, "stack",
		string(debug.Stack()))
	return e.s.outward(ctx, procedure, errdefs.New(errdefs.Internal, "request "+requestID(ctx), "a handler broke"))
}

func clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "..."
	}
	return s
}
