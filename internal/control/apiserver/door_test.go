package apiserver_test

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/apiserver/entries"
	"github.com/sandsea/sandsea/internal/control/iam"
)

// post sends bytes and gives the status, the body and the headers.
func (h *house) post(t *testing.T, path, body string, header ...string) (int, string, http.Header) {
	t.Helper()
	return h.send(t, http.MethodPost, path, strings.NewReader(body), header...)
}

func (h *house) send(t *testing.T, method, path string, body io.Reader, header ...string) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, h.url+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+h.token)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		if header[i+1] == "" {
			r.Header.Del(header[i])
		} else {
			r.Header.Set(header[i], header[i+1])
		}
	}
	resp, err := h.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}

const (
	listPath   = "/sandsea.v1.SandboxService/List"
	createPath = "/sandsea.v1.SandboxService/Create"
	watchPath  = "/sandsea.v1.SandboxService/Watch"
)

// detail reads the error detail out of a Connect error body.
func detail(t *testing.T, body string) *pb.ErrorDetail {
	t.Helper()
	var e struct {
		Details []struct{ Type, Value string }
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil || len(e.Details) != 1 ||
		e.Details[0].Type != "sandsea.v1.ErrorDetail" {
		t.Fatalf("no detail in %s: %v", body, err)
	}
	raw, err := base64.RawStdEncoding.DecodeString(e.Details[0].Value)
	if err != nil {
		t.Fatal(err)
	}
	var d pb.ErrorDetail
	if err := proto.Unmarshal(raw, &d); err != nil {
		t.Fatal(err)
	}
	return &d
}

func TestDoorRefusesBadRequests(t *testing.T) {
	h := newHouse(t, 1)
	for _, tc := range []struct {
		name   string
		path   string
		body   string
		header []string
		status int
		kind   string
		field  string
	}{
		{"an unknown field", createPath, `{"spek":{}}`, nil, 400, "invalid", "spek"},
		{"a duplicate", createPath, `{"key":"a","key":"b"}`, nil, 400, "invalid", "key"},
		{"a number beyond all numbers", createPath, `{"ready_timeout_ms":1e400}`, nil, 400, "invalid", "ready_timeout_ms"},
		{"NaN", createPath, `{"ready_timeout_ms":NaN}`, nil, 400, "invalid", "ready_timeout_ms"},
		{
			"depth 10,000", createPath, strings.Repeat(`{"spec":`, 10000) + strings.Repeat("}", 10000), nil, 400, "invalid",
			"spec.spec",
		},
		{"a body of 100 MB", createPath, `{"key":"` + strings.Repeat("x", 100<<20) + `"}`, nil, 400, "invalid", ""},
		{"no body", createPath, ``, nil, 400, "invalid", ""},
		{
			"a form", createPath, `a=b`,
			[]string{"Content-Type", "application/x-www-form-urlencoded"},
			415, "invalid",
			"Content-Type",
		},
		{"no content type", createPath, `{}`, []string{"Content-Type", ""}, 415, "invalid", "Content-Type"},
		{
			"another character set", createPath, `{}`,
			[]string{"Content-Type", "application/json; charset=utf-7"},
			415,
			"invalid", "Content-Type",
		},
		{"a stream's call with one message", watchPath, `{}`, nil, 415, "invalid", "Content-Type"},
		{"an unknown call", "/sandsea.v1.SandboxService/Burn", `{}`, nil, 404, "invalid", ""},
		{"a path that climbs", "/sandsea.v1.SandboxService/../x", `{}`, nil, 404, "invalid", ""},
		{"no token", listPath, `{}`, []string{"Authorization", ""}, 401, "unauthenticated", ""},
		{"a wrong token", listPath, `{}`, []string{"Authorization", "Bearer sst_x_y"}, 401, "unauthenticated", ""},
		{"a foreign project", listPath, `{}`, []string{apiserver.ProjectHeader, "other"}, 403, "denied", ""},
		{
			"a project with a comma", listPath, `{}`,
			[]string{apiserver.ProjectHeader, "default,other"},
			400, "invalid",
			"project",
		},
		{"an id with a path in it", "/sandsea.v1.SandboxService/Get", `{"id":"../../etc/passwd"}`, nil, 400, "invalid", "id"},
		{"an id with NUL", "/sandsea.v1.SandboxService/Get", `{"id":"s\u0000"}`, nil, 400, "invalid", "id"},
		{
			"an id with a mark from right to left", "/sandsea.v1.SandboxService/Get", `{"id":"\u202es"}`, nil, 400, "invalid",
			"id",
		},
		{"no id", "/sandsea.v1.SandboxService/Get", `{}`, nil, 400, "invalid", "id"},
		{
			"a label of a mebibyte", createPath, `{"spec":{"labels":{"a":"` + strings.Repeat("x", 1<<20) + `"}}}`, nil, 400,
			"invalid", "environment",
		},
		{"a short prefix", listPath, `{"id_prefix":"s7q"}`, nil, 400, "invalid", "id_prefix"},
		{"a page of a million", listPath, `{"page_size":1000000}`, nil, 400, "invalid", "page_size"},
		{"a foreign page token", listPath, `{"page_token":"AAAA"}`, nil, 400, "invalid", "page_token"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, body, header := h.post(t, tc.path, tc.body, tc.header...)
			d := detail(t, body)
			if status != tc.status || d.GetKind() != tc.kind || d.GetField() != tc.field || d.GetHint() == "" {
				t.Errorf("got %d %v\nwant %d %s %q", status, d, tc.status, tc.kind, tc.field)
			}
			if !strings.HasPrefix(header.Get(apiserver.RequestHeader), "r-") {
				t.Error("no request id")
			}
			if len(body) > 4096 {
				t.Errorf("the error has %d bytes", len(body))
			}
		})
	}
	if status, _, header := h.send(t, http.MethodGet, listPath, nil); status != 405 || header.Get("Allow") != "POST" {
		t.Errorf("GET: %d", status)
	}
}

func TestDoorBoundsUnpackedBodies(t *testing.T) {
	h := newHouse(t, 1)
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, `{"key":"`+strings.Repeat("x", 64<<20)+`"}`)
	_ = z.Close()
	status, body, _ := h.post(t, createPath, b.String(), "Content-Encoding", "gzip")
	if status == 200 || len(body) > 4096 {
		t.Errorf("a bomb of 64 MiB: %d", status)
	}
	b.Reset()
	z.Reset(&b)
	_, _ = io.WriteString(z, `{}`)
	_ = z.Close()
	if status, body, _ := h.post(t, listPath, b.String(), "Content-Encoding", "gzip"); status != 200 {
		t.Errorf("a packed body: %d %s", status, body)
	}
	b.Reset()
	z.Reset(&b)
	_, _ = io.WriteString(z, `{"nope":1}`)
	_ = z.Close()
	if status, _, _ := h.post(t, listPath, b.String(), "Content-Encoding", "gzip"); status != 400 {
		t.Errorf("an unknown field in a packed body: %d", status)
	}
}

func TestDoorSpeaksEveryProtocolOnOnePort(t *testing.T) {
	h := newHouse(t, 1)
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	h2 := &http.Transport{Protocols: &p}
	defer h2.CloseIdleConnections()
	old := h.http
	for name, opts := range map[string][]connect.ClientOption{
		"Connect": nil, "Connect with JSON": {connect.WithProtoJSON()}, "gRPC": {connect.WithGRPC()},
		"gRPC-Web":       {connect.WithGRPCWeb()},
		"gRPC with JSON": {connect.WithGRPC(), connect.WithProtoJSON()}, "packed requests": {connect.WithSendGzip()},
	} {
		t.Run(name, func(t *testing.T) {
			h.http = old
			if strings.HasPrefix(name, "gRPC") {
				h.http = &http.Client{Transport: h2}
			}
			c := h.admin(opts...)
			who, err := c.iam.WhoAmI(t.Context(), connect.NewRequest(&pb.WhoAmIRequest{}))
			if err != nil {
				t.Fatal(err)
			}
			if who.Msg.GetPrincipal() != "user:admin" || who.Msg.GetProject() != "default" || who.Msg.GetVersion() != "test" {
				t.Errorf("got %v", who.Msg)
			}
			sb := c.create(t, "")
			// An error keeps its kind and facts over every protocol, in unary calls and streams.
			_, err = c.tryCreate(t.Context(), &pb.SandboxSpec{Environment: &pb.Environment{Image: "tolls"}}, "")
			if e := kindIs(t, err, errdefs.NotFound); len(e.Near) != 1 || e.Field != "environment.image" {
				t.Errorf("got %+v", e)
			}
			crowd := &pb.WriteBatchRequest{Id: sb.GetId(), Files: slices.Repeat([]*pb.FileToWrite{{}}, entries.Most+1)}
			_, err = c.files.WriteBatch(t.Context(), connect.NewRequest(crowd))
			if e := kindIs(t, errwire.FromConnect(err), errdefs.Invalid); !strings.Contains(e.Error(), "files: ") ||
				!strings.Contains(e.Error(), fmt.Sprint(entries.Most)) {
				t.Errorf("got %+v", e)
			}
			stream, err := c.files.Read(t.Context(), connect.NewRequest(&pb.ReadFileRequest{Id: sb.GetId(), Path: "/none"}))
			if err == nil {
				for stream.Receive() {
				}
				err = stream.Err()
				_ = stream.Close()
			}
			if e := kindIs(t, errwire.FromConnect(err), errdefs.NotFound); e.ErrnoName != "ENOENT" {
				t.Errorf("got %+v", e)
			}
			up := c.files.Write(t.Context())
			for i := range 3 {
				m := &pb.WriteFileRequest{Data: bytes.Repeat([]byte{byte(i)}, 1<<20)}
				if i == 0 {
					m.Header = &pb.WriteFileHeader{Id: sb.GetId(), Path: "/f"}
				}
				if err := up.Send(m); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := up.CloseAndReceive(); err != nil {
				t.Fatal(err)
			}
			if b, _ := h.edges[0].File(sb.GetId(), "/f"); len(b) != 3<<20 || b[2<<20] != 2 {
				t.Errorf("%d bytes arrived", len(b))
			}
		})
	}
}

func TestStrictJSONInStreams(t *testing.T) {
	h := newHouse(t, 1)
	frame := func(s string) string { return fmt.Sprintf("\x00\x00\x00\x00%c%s", len(s), s) }
	status, body, _ := h.post(t, watchPath, frame(`{"kursor":"x"}`), "Content-Type", "application/connect+json")
	// A stream's error is in its last frame, behind five bytes of header.
	if status != 200 || len(body) < 5 || !strings.Contains(body, "kursor") {
		t.Fatalf("%d %q", status, body)
	}
	var end struct{ Error json.RawMessage }
	if err := json.Unmarshal([]byte(body[5:]), &end); err != nil {
		t.Fatal(err)
	}
	if d := detail(t, string(end.Error)); d.GetKind() != "invalid" || d.GetField() != "kursor" {
		t.Errorf("got %v", d)
	}
}

func TestAStreamThatCannotBeReadIsTheCallersFault(t *testing.T) {
	h := newHouse(t, 1)
	for name, body := range map[string]string{
		"no chunk":            "ZZZ\r\n",
		"half a header":       "3\r\n\x00\x00\x00\r\n0\r\n\r\n",
		"a chunk without end": "3\r\n\x00\x00\x00XX\r\n\r\n",
		"half a message":      "6\r\n\x00\x00\x00\x00\x04{\r\n0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(limit))
			if _, err := io.WriteString(conn, "POST /sandsea.v1.FileService/Write HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"+
				"Authorization: Bearer "+h.token+"\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n"+
				body); err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(conn)
			if err != nil || !strings.Contains(string(b), `"code":"invalid_argument"`) ||
				!strings.Contains(string(b), "the stream of the request cannot be read") {
				t.Errorf("got %q, %v", b, err)
			}
		})
	}
}

func TestAnswersInJSON(t *testing.T) {
	h := newHouse(t, 1)
	status, body, header := h.post(t, listPath, `{}`, "Accept-Encoding", "gzip")
	if status != 200 || header.Get("Content-Encoding") != "" || !strings.Contains(strings.ReplaceAll(body, " ", ""),
		`"sandboxes":[]`) {
		t.Errorf("%d %s %v", status, body, header)
	}
}

func TestHealthPages(t *testing.T) {
	h := newHouse(t, 1)
	until(t, "ready", func() bool {
		status, _, _ := h.send(t, http.MethodGet, "/readyz", nil, "Authorization", "")
		return status == 200
	})
	for path, want := range map[string]string{"/healthz": "ok\n", "/readyz": "ready\n", "/": "Sandsea API."} {
		status, body, header := h.send(t, http.MethodGet, path, nil, "Authorization", "")
		if status != 200 || !strings.HasPrefix(body, want) || !strings.HasPrefix(header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: %d %q", path, status, body)
		}
	}
	if status, _, _ := h.post(t, "/healthz", ""); status != 405 {
		t.Errorf("POST /healthz: %d", status)
	}
}

func TestRightsAreCheckedOnEveryCall(t *testing.T) {
	h := newHouse(t, 1)
	token := h.newToken(iam.Request{Principal: "service:ci", Project: "default/ci", May: []string{
		"sandbox.list",
		"process.*",
	}})
	c := h.as(token)
	if l := c.list(t, &pb.ListSandboxesRequest{}); l.GetTotal() != 0 {
		t.Errorf("list: %v", l)
	}
	_, err := c.tryCreate(t.Context(), spec(), "")
	if e := kindIs(t, err, errdefs.Denied); e.Error() != "service:ci: may not sandbox.create. Ask an admin for the right" {
		t.Errorf("got %v", e)
	}
	if who, err := c.iam.WhoAmI(t.Context(), connect.NewRequest(&pb.WhoAmIRequest{})); err != nil ||
		who.Msg.GetPrincipal() != "service:ci" {
		t.Errorf("everybody may know who they are: %v, %v", who, err)
	}
}

func TestAnotherProjectsSandboxLooksLikeNone(t *testing.T) {
	h := newHouse(t, 1)
	sb := h.admin().create(t, "k")
	inner := h.client(connect.WithInterceptors(bearer{h.token, "default/team"})).create(t, "k")
	for _, tc := range []struct {
		name, project, id string
		seen              bool
	}{
		{"a stranger", "default/other", sb.GetId(), false},
		{"a team and its parent's", "default/team", sb.GetId(), false},
		{"a team and its own", "default/team", inner.GetId(), true},
	} {
		token := h.newToken(iam.Request{Principal: "user:x", Project: tc.project})
		c := h.as(token)
		_, err := c.get(t, tc.id)
		if tc.seen != (err == nil) {
			t.Errorf("%s: %v", tc.name, err)
		}
		if tc.seen {
			continue
		}
		kindIs(t, err, errdefs.NotFound)
		_, err = c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{Id: tc.id}))
		kindIs(t, errwire.FromConnect(err), errdefs.NotFound)
		_, err = c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: tc.id}))
		kindIs(t, errwire.FromConnect(err), errdefs.NotFound)
		if l := c.list(t, &pb.ListSandboxesRequest{All: true, IdPrefix: tc.id}); l.GetTotal() != 0 {
			t.Errorf("%s: lists %v", tc.name, l)
		}
	}
	// An end is hidden alike, and the parent sees its child's.
	if _, err := h.edges[0].End(t.Context(), inner.GetId(), "oom", "platform"); err != nil {
		t.Fatal(err)
	}
	h.edges[0].Forget()
	c := h.as(h.newToken(iam.Request{Principal: "user:x", Project: "default/other"}))
	until(t, "the end is known", func() bool {
		got, err := h.admin().get(t, inner.GetId())
		return err == nil && got.GetState() == pb.SandboxState_SANDBOX_STATE_ENDED
	})
	_, err := c.get(t, inner.GetId())
	kindIs(t, err, errdefs.NotFound)
}

func TestSlowBodyDoesNotHoldAConnectionForEver(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a time limit")
	}
	h := newHouse(t, 1)
	conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	// A header that never ends is cut by ReadHeaderTimeout, which is 10 s; ask for less patience here by half-closing.
	if _, err := io.WriteString(conn, "POST "+listPath+" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+h.token+
		"\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(limit))
	b, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 400") {
		t.Errorf("got %q, %v", b, err)
	}
}
