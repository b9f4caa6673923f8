package apiserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/iam"
)

const tokenHeader = apiserver.EndpointHeader

// endpoint asks for the address of a port.
func (c client) endpoint(t testing.TB, id string, port int32, ttl time.Duration) *pb.EndpointResponse {
	t.Helper()
	m, err := c.tryEndpoint(t.Context(), id, port, ttl)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (c client) tryEndpoint(ctx context.Context, id string, port int32, ttl time.Duration) (*pb.EndpointResponse, error) {
	resp, err := c.networks.Endpoint(ctx, connect.NewRequest(&pb.EndpointRequest{Id: id, Port: port, TtlMs: ttl.Milliseconds()}))
	if err != nil {
		return nil, errwire.FromConnect(err)
	}
	return resp.Msg, nil
}

// inside runs a server that stands for one at port 8000 of a sandbox, and counts the connections that it took.
func (h *house) inside(t testing.TB, id string, handler http.Handler) *atomic.Int64 {
	t.Helper()
	var taken atomic.Int64
	s := httptest.NewUnstartedServer(handler)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			taken.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	h.edges[0].Inside(id, 8000, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", s.Listener.Addr().String())
	})
	return &taken
}

// open is a sandbox with a server inside and its endpoint.
func open(t testing.TB, handler http.Handler) (*house, *pb.EndpointResponse) {
	t.Helper()
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	h.inside(t, sb.GetId(), handler)
	return h, c.endpoint(t, sb.GetId(), 8000, 0)
}

// ask makes a request to an endpoint and sends it.
func ask(t testing.TB, by *http.Client, method, address, token string, body io.Reader, header ...string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, address, body)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		r.Header.Set(tokenHeader, token)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	resp, err := by.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func text(t testing.TB, r *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func tokenOf(e *pb.EndpointResponse) string { return e.GetHeaders()[tokenHeader] }

func TestAnEndpointIsOnTheAddressOfItsCaller(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	e := c.endpoint(t, sb.GetId(), 8000, 0)
	if want := h.url + "/endpoint/" + sb.GetId() + "/8000/"; e.GetUrl() != want || len(e.GetHeaders()) != 1 || tokenOf(e) == "" ||
		e.GetBrowserUrl() != want+"?sandsea_endpoint_token="+tokenOf(e) {
		t.Errorf("got %v, want %s", e, want)
	}
	if strings.Contains(tokenOf(e), h.token) || strings.Contains(tokenOf(e), h.token[4:20]) {
		t.Error("the caller's token is in it")
	}
	_, body, _ := h.post(t, "/sandsea.v1.NetworkService/Endpoint", `{"id":"`+sb.GetId()+`","port":8000}`)
	if !strings.Contains(body, `"url":"`+h.url+"/endpoint/") {
		t.Errorf("in JSON: %s", body)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.url+"/sandsea.v1.NetworkService/Endpoint",
		strings.NewReader(`{"id":"`+sb.GetId()+`","port":8000,"ttl_ms":60000}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "box.example:81"
	r.Header.Set("Authorization", "Bearer "+h.token)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Forwarded-Host", "evil.example")
	resp, err := h.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b := text(t, resp); !strings.Contains(b, `"url":"http://box.example:81/endpoint/`) {
		t.Errorf("by another name: %s", b)
	}
	before := time.Now().Add(time.Minute)
	if e := c.endpoint(t, sb.GetId(), 1, time.Minute); e.GetExpiresAt().AsTime().Before(before) ||
		e.GetExpiresAt().AsTime().After(time.Now().Add(time.Minute)) {
		t.Errorf("holds until %s", e.GetExpiresAt().AsTime())
	}
}

func TestWhoGetsAnEndpoint(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	for name, try := range map[string]struct {
		id   string
		port int32
		ttl  time.Duration
		kind errdefs.Kind
		by   client
	}{
		"port 0":          {sb.GetId(), 0, 0, errdefs.Invalid, c},
		"port 65536":      {sb.GetId(), 65536, 0, errdefs.Invalid, c},
		"a negative ttl":  {sb.GetId(), 80, -time.Second, errdefs.Invalid, c},
		"a ttl of a year": {sb.GetId(), 80, 365 * 24 * time.Hour, errdefs.Invalid, c},
		"no id":           {"", 80, 0, errdefs.Invalid, c},
		"another project": {sb.GetId(), 80, 0, errdefs.NotFound, h.as(h.newToken(iam.Request{Principal: "user:x", Project: "other"}))},
		"no right": {
			sb.GetId(), 80, 0, errdefs.Denied,
			h.as(h.newToken(iam.Request{Principal: "user:y", Project: "default", May: []string{"sandbox.*", "network.check"}})),
		},
		"the right": {sb.GetId(), 80, 0, "", h.as(h.newToken(iam.Request{Principal: "user:z", Project: "default", May: []string{"network.endpoint"}}))},
	} {
		_, err := try.by.tryEndpoint(t.Context(), try.id, try.port, try.ttl)
		if errdefs.KindOf(err) != try.kind {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: sb.GetId()})); err != nil {
		t.Fatal(err)
	}
	_, err := c.tryEndpoint(t.Context(), sb.GetId(), 80, 0)
	if e := kindIs(t, err, errdefs.FailedPrecondition); e.Cause != "stopped" {
		t.Errorf("after its end: %v", err)
	}
}

func TestTheServerInsideSeesTheRequestAsItWasSent(t *testing.T) {
	type seen struct {
		method, uri, host, body string
		header                  http.Header
	}
	got := make(chan seen, 1)
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- seen{r.Method, r.RequestURI, r.Host, string(b), r.Header}
		w.Header().Set("Location", "/elsewhere")
		w.Header().Set("Sandsea-Error", "denied")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, "tea")
	}))
	prefix := strings.TrimSuffix(strings.TrimPrefix(e.GetUrl(), h.url), "/")
	for _, uri := range []string{
		"/", "/a/b?x=1", "/a%2Fb/%20c", "//double//", "/a/../b/./c", "/?q=%zz;a&&b", "/%E2%82%AC", "/a?", "/a:b@c;d=e,f", "/*",
	} {
		resp := ask(t, h.http, http.MethodGet, h.url+prefix+uri, tokenOf(e), nil)
		if s := <-got; s.uri != uri || s.method != http.MethodGet {
			t.Errorf("%s arrived as %s", uri, s.uri)
		}
		if resp.StatusCode != http.StatusTeapot || text(t, resp) != "tea" || resp.Header.Get("Location") != "/elsewhere" {
			t.Errorf("%s: %v", uri, resp)
		}
		if resp.Header.Get("Sandsea-Error") != "" || resp.Header.Get("Keep-Alive") != "" || resp.Header.Get("X-Content-Type-Options") != "" {
			t.Errorf("headers of the answer: %v", resp.Header)
		}
	}
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions, http.MethodHead, "PROPFIND"} {
		ask(t, h.http, method, e.GetUrl()+"m", tokenOf(e), strings.NewReader("body of "+method))
		if s := <-got; s.method != method || s.uri != "/m" || s.body != "body of "+method {
			t.Errorf("%s: %+v", method, s)
		}
	}
	ask(t, h.http, http.MethodGet, e.GetUrl()+"?a=1&sandsea_endpoint_token=T", tokenOf(e), nil,
		"Authorization", "Bearer app", "Cookie", "a=1; sandsea_endpoint_token=T; b=2", "Cookie", "sandsea_endpoint_token=T",
		"X-Forwarded-For", "9.9.9.9", "X-Forwarded-Proto", "gopher", "X-Forwarded-Prefix", "/evil", "Forwarded", "for=9.9.9.9",
		"Connection", "X-Hop", "X-Hop", "1", "Proxy-Authorization", "secret", "X-Own", "1", "X-Own", "2")
	s := <-got
	want := http.Header{
		"Authorization": {"Bearer app"}, "Cookie": {"a=1; b=2"}, "X-Forwarded-For": {"127.0.0.1"}, "X-Forwarded-Proto": {"http"},
		"X-Forwarded-Host": {strings.TrimPrefix(h.url, "http://")}, "X-Forwarded-Prefix": {prefix}, "X-Own": {"1", "2"},
		"User-Agent": s.header["User-Agent"], "Accept-Encoding": s.header["Accept-Encoding"],
	}
	if diff := cmp.Diff(want, s.header); diff != "" || s.uri != "/?a=1" || s.host != strings.TrimPrefix(h.url, "http://") {
		t.Errorf("%s %s %s", s.uri, s.host, diff)
	}
	// A token of the platform is not for the sandbox, wherever it stands, and whether or not it can be looked up now.
	unknown := h.token[:len(h.token)-1] + string(rune(h.token[len(h.token)-1]^1))
	for name, lines := range map[string][]string{
		"a token": {"Bearer " + h.token}, "one that nobody knows": {"Bearer " + unknown}, "in small letters": {"bearer " + h.token},
		"two": {"Bearer app", "Bearer " + h.token}, "with spaces": {"Bearer   " + h.token + " "}, "without a scheme": {h.token},
	} {
		var header []string
		for _, l := range lines {
			header = append(header, "Authorization", l)
		}
		ask(t, h.http, http.MethodGet, e.GetUrl(), tokenOf(e), nil, header...)
		if s := <-got; len(s.header["Authorization"]) > 0 {
			t.Errorf("%s: it saw the token of the platform's API", name)
		}
	}
}

// TestNoRequestHidesBehindAnother writes what two servers could take apart in different places. The token stands in the
// first request alone, so whatever is behind it must not reach the server inside.
func TestNoRequestHidesBehindAnother(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	h, e := open(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, fmt.Sprintf("%s %q %v", r.RequestURI, body, r.Header))
	}))
	uri := strings.TrimPrefix(e.GetUrl(), h.url)
	hidden := "GET " + uri + "bypass HTTP/1.1\r\nHost: x\r\nBypass: 1\r\n\r\n"
	for name, words := range map[string]string{
		"chunks and a length":       "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"chunked twice":             "POST %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
		"chunked, and what is none": "POST %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: x, chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
		"a chunk's odd size":        "POST %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n0;a=\n\r\n\r\n",
		"two lengths":               "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 0\r\nContent-Length: 3\r\n\r\n",
		"a length of a GET":         "GET %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 0\r\n\r\n",
		"an upgrade that is none":   "GET %s HTTP/1.1\r\nHost: x\r\n%sConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
		"a version before":          "GET %s HTTP/1.0\r\nHost: x\r\n%sConnection: keep-alive\r\n\r\n",
		"an expectation":            "POST %s HTTP/1.1\r\nHost: x\r\n%sExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
		"a line end in a header":    "GET %s HTTP/1.1\r\nHost: x\r\n%sX: 1\rBypass: 1\r\n\r\n",
		"a line end in the path":    "GET %s\rBypass:1 HTTP/1.1\r\nHost: x\r\n%s\r\n",
		"an escaped one":            "GET %s%%0d%%0aBypass:%%201 HTTP/1.1\r\nHost: x\r\n%s\r\n",
	} {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(h.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, _ = fmt.Fprintf(c, words, uri, tokenHeader+": "+tokenOf(e)+"\r\n")
		_, _ = io.WriteString(c, hidden)
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
		mu.Lock()
		for _, s := range seen {
			if strings.Contains(s, uri) || strings.Contains(s, "/bypass") || strings.Contains(s, "Bypass:[1]") || strings.Contains(s, "GET ") {
				t.Errorf("%s: the server inside saw %s", name, s)
			}
		}
		seen = nil
		mu.Unlock()
	}
}

// TestAnAnswerSpeaksForNoOtherEndpoint sends what a server inside could do to others of the same origin in a browser.
func TestAnAnswerSpeaksForNoOtherEndpoint(t *testing.T) {
	cookies := []string{
		"plain=1", "root=1; Path=/; HttpOnly", "deep=1; path=/app; SameSite=Lax", "other=1; Path=/endpoint/x/8000/", "wide=1; Domain=example.org; Path=/",
		"twice=1; Path=/a; Path=/", "odd=1; Path=app", "sandsea_endpoint_token=sse_AAAA; Path=/", " sandsea_endpoint_token =x",
	}
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, name := range []string{"Alt-Svc", "Clear-Site-Data", "NEL", "Report-To", "Service-Worker-Allowed", "Strict-Transport-Security", "X-Own"} {
			w.Header().Set(name, "x")
		}
		for _, c := range cookies {
			w.Header().Add("Set-Cookie", c)
		}
		if p := r.URL.Query().Get("own"); p != "" {
			w.Header().Add("Set-Cookie", "own=1; Path="+p)
		}
	}))
	prefix := strings.TrimPrefix(e.GetUrl(), h.url)
	resp := ask(t, h.http, http.MethodGet, e.GetUrl()+"?own="+prefix+"x", tokenOf(e), nil)
	in := strings.TrimSuffix(prefix, "/")
	want := []string{
		"plain=1", "root=1; HttpOnly; Path=" + in + "/", "deep=1; SameSite=Lax; Path=" + in + "/app", "other=1; Path=" + in + "/endpoint/x/8000/",
		"wide=1; Path=" + in + "/", "twice=1; Path=" + in + "/", "odd=1", "own=1; Path=" + prefix + "x",
	}
	if diff := cmp.Diff(want, resp.Header["Set-Cookie"]); diff != "" {
		t.Errorf("cookies (-want +got):\n%s", diff)
	}
	for name := range resp.Header {
		switch name {
		case "X-Own", "Set-Cookie", "Date", "Content-Length", "Content-Type", "Sandsea-Request":
		default:
			t.Errorf("header %s passes", name)
		}
	}
}

// TestAnEarlyAnswerSpeaksForNoOtherEndpoint sends the same in an answer that comes before the answer.
func TestAnEarlyAnswerSpeaksForNoOtherEndpoint(t *testing.T) {
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range []string{"Alt-Svc", "Clear-Site-Data", "Strict-Transport-Security", "Sandsea-Error", "Sandsea-Request", "Link"} {
			w.Header().Set(name, "x")
		}
		w.Header().Add("Set-Cookie", "sandsea_endpoint_token=x; Path=/")
		w.Header().Add("Set-Cookie", "root=1; Path=/")
		w.WriteHeader(http.StatusEarlyHints)
		clear(w.Header())
		w.WriteHeader(http.StatusOK)
	}))
	var early http.Header
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error { early = http.Header(h); return nil },
	})
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, e.GetUrl(), nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(tokenHeader, tokenOf(e))
	resp, err := h.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for name := range early {
		switch name {
		case "Link", "Set-Cookie", "Sandsea-Request":
		default:
			t.Errorf("header %s passes early", name)
		}
	}
	if got := early["Sandsea-Request"]; len(got) != 1 || got[0] == "x" {
		t.Errorf("early request ids %q", got)
	}
	if got := early["Set-Cookie"]; len(got) != 1 || got[0] != "root=1; Path="+strings.TrimPrefix(e.GetUrl(), h.url) {
		t.Errorf("early cookies %q", got)
	}
	if resp.Header.Get("Sandsea-Request") == "" {
		t.Error("the answer behind it has no request id")
	}
}

func TestWhatIsNoAnswerOfTheServerInsideSaysSo(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	box := func() *pb.Sandbox {
		for {
			if sb := c.create(t, ""); sb.GetNode() == "n1" {
				return sb
			}
		}
	}
	sb, closed, ended, forgotten, late := box(), box(), box(), box(), box()
	served := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/drop":
			panic(http.ErrAbortHandler)
		case "/denied":
			w.WriteHeader(http.StatusForbidden)
		}
	})
	for _, b := range []*pb.Sandbox{sb, ended, forgotten, late} {
		h.inside(t, b.GetId(), served)
	}
	h.edges[0].Inside(closed.GetId(), 8000, func(context.Context) (net.Conn, error) {
		return nil, errdefs.New(errdefs.Denied, "sandbox "+closed.GetId()[:8], "port 8000: the phase takes no endpoints (rule inbound_closed)")
	})
	h.edges[0].Inside(sb.GetId(), 25, func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		go func() { _, _ = io.WriteString(a, "220 mail.example ESMTP\r\n") }()
		return b, nil
	})
	at := map[*pb.Sandbox]*pb.EndpointResponse{}
	for _, b := range []*pb.Sandbox{sb, closed, ended, forgotten, late} {
		at[b] = c.endpoint(t, b.GetId(), 8000, 0)
	}
	for _, b := range []*pb.Sandbox{ended, forgotten} {
		if _, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: b.GetId()})); err != nil {
			t.Fatal(err)
		}
	}
	mail, quiet := c.endpoint(t, sb.GetId(), 25, 0), c.endpoint(t, sb.GetId(), 8001, 0)
	short := c.endpoint(t, sb.GetId(), 8000, time.Millisecond)
	until(t, "the token ends", func() bool { return time.Now().After(short.GetExpiresAt().AsTime()) })
	own := at[sb]
	type try struct {
		url, token string
		status     int
		kind, text string
	}
	tries := map[string]try{
		"well":               {own.GetUrl(), tokenOf(own), 200, "", ""},
		"its own refusal":    {own.GetUrl() + "denied", tokenOf(own), 403, "", ""},
		"no token":           {own.GetUrl(), "", 401, "unauthenticated", "no Sandsea-Endpoint-Token header"},
		"a wrong one":        {own.GetUrl(), "sse_AAAA", 403, "denied", "this token does not open port 8000 of this sandbox"},
		"the API's":          {own.GetUrl(), h.token, 403, "denied", "this token does not open port 8000"},
		"another sandbox's":  {own.GetUrl(), tokenOf(at[closed]), 403, "denied", "this token does not open port 8000"},
		"another port's":     {own.GetUrl(), tokenOf(mail), 403, "denied", "this token does not open port 8000"},
		"one that has ended": {short.GetUrl(), tokenOf(short), 401, "unauthenticated", "this token of port 8000 ended"},
		"nobody listens":     {quiet.GetUrl(), tokenOf(quiet), 502, "unavailable", "nobody listens at port 8001 yet"},
		"no HTTP":            {mail.GetUrl(), tokenOf(mail), 502, "unavailable", "the server at port 25 gave no answer in HTTP"},
		"no answer":          {own.GetUrl() + "drop", tokenOf(own), 502, "unavailable", "the server at port 8000 gave no answer in HTTP"},
		"inbound policy":     {at[closed].GetUrl(), tokenOf(at[closed]), 403, "denied", "rule inbound_closed"},
		"an ended sandbox":   {at[ended].GetUrl(), tokenOf(at[ended]), 410, "failed_precondition", "ended"},
		"no port":            {h.url + "/endpoint/" + sb.GetId() + "/http/", tokenOf(own), 404, "invalid", "no endpoint"},
		"no id":              {h.url + "/endpoint/x/80/", tokenOf(own), 404, "invalid", "no endpoint"},
	}
	check := func(name string, w try) {
		t.Helper()
		resp := ask(t, h.http, http.MethodGet, w.url, w.token, nil)
		body := text(t, resp)
		if resp.StatusCode != w.status || resp.Header.Get("Sandsea-Error") != w.kind {
			t.Errorf("%s: %d %s %s, want %d %s", name, resp.StatusCode, resp.Header.Get("Sandsea-Error"), body, w.status, w.kind)
			return
		}
		if w.kind == "" {
			return
		}
		d := detail(t, body)
		if !strings.Contains(body, w.text) || d.GetKind() != w.kind || d.GetHint() == "" || resp.Header.Get("Content-Type") != "application/json" ||
			!strings.HasPrefix(resp.Header.Get(apiserver.RequestHeader), "r-") {
			t.Errorf("%s: %v %s", name, resp.Header, body)
		}
	}
	for name, w := range tries {
		check(name, w)
	}
	// What nobody remembers any more.
	h.edges[0].Forget()
	if err := h.drop(forgotten); err != nil {
		t.Fatal(err)
	}
	check("a forgotten sandbox", try{at[forgotten].GetUrl(), tokenOf(at[forgotten]), 410, "failed_precondition", "ended"})
	// The node goes away.
	h.edges[0].Before(func(_ context.Context, call string) error {
		if call == "tunnel" || call == "get" {
			return errdefs.New(errdefs.Unavailable, "node n1", "does not answer")
		}
		return nil
	})
	check("a node that does not answer", try{at[late].GetUrl(), tokenOf(at[late]), 503, "unavailable", "does not answer"})
	h.edges[0].Before(nil)
	check("and is back", try{at[late].GetUrl(), tokenOf(at[late]), 200, "", ""})
}

func TestABrowserGetsACookieInPlaceOfTheParameter(t *testing.T) {
	got := make(chan *http.Request, 4)
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r
		_, _ = io.WriteString(w, "page")
	}))
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	var hops []string
	browser := &http.Client{Transport: h.http.Transport, Jar: jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		hops = append(hops, r.URL.String())
		return nil
	}}
	address := strings.Replace(e.GetBrowserUrl(), "/8000/?", "/8000/a%2Fb?x=1&", 1)
	resp := ask(t, browser, http.MethodGet, address, "", nil)
	if text(t, resp) != "page" || len(hops) != 1 || hops[0] != e.GetUrl()+"a%2Fb?x=1" {
		t.Fatalf("%v by %v", resp.Status, hops)
	}
	if r := <-got; r.RequestURI != "/a%2Fb?x=1" || len(r.Cookies()) > 0 {
		t.Errorf("inside: %s %v", r.RequestURI, r.Header)
	}
	first := ask(t, &http.Client{Transport: h.http.Transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}, http.MethodGet, e.GetBrowserUrl(), "", nil)
	cookies := first.Cookies()
	if first.StatusCode != http.StatusSeeOther || len(cookies) != 1 || !cookies[0].HttpOnly || cookies[0].SameSite != http.SameSiteLaxMode ||
		cookies[0].Path != strings.TrimPrefix(e.GetUrl(), h.url) || cookies[0].Domain != "" || first.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("%v %v", first.Status, first.Header)
	}
	// The cookie is enough for what the page asks for then, with whatever method.
	if resp := ask(t, browser, http.MethodPost, e.GetUrl()+"api", "", strings.NewReader("x")); resp.StatusCode != http.StatusOK {
		t.Errorf("by cookie: %s", resp.Status)
	}
	if r := <-got; len(r.Cookies()) > 0 {
		t.Errorf("inside: %v", r.Header)
	}
	// Without the slash it is the same place.
	if resp := ask(t, browser, http.MethodGet, strings.TrimSuffix(e.GetUrl(), "/")+"?y=2", "", nil); resp.StatusCode != http.StatusOK {
		t.Errorf("without a slash: %s", resp.Status)
	}
	if r := <-got; r.RequestURI != "/?y=2" {
		t.Errorf("without a slash: %s", r.RequestURI)
	}
	if resp := ask(t, h.http, http.MethodGet, e.GetUrl()+"?sandsea_endpoint_token=sse_AAAA", "", nil); resp.StatusCode != http.StatusForbidden || len(resp.Cookies()) > 0 {
		t.Errorf("a wrong one: %s %v", resp.Status, resp.Cookies())
	}
}

// echo takes an upgrade and sends everything back, then what is left to say when its reader has ended.
var echo = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "echo" {
		w.WriteHeader(http.StatusUpgradeRequired)
		return
	}
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\nX-Own: 1\r\n\r\n")
	_, _ = io.Copy(c, rw)
	_, _ = io.WriteString(c, "bye")
})

// upgrade opens an endpoint's line.
func upgrade(t testing.TB, h *house, uri, header string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(h.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n%s\r\n", uri, header)
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c, br, resp
}

func TestConnectionsUpgradeThroughEndpoints(t *testing.T) {
	h, e := open(t, echo)
	uri := strings.TrimPrefix(e.GetUrl(), h.url)
	for name, by := range map[string][2]string{
		"a header": {uri, tokenHeader + ": " + tokenOf(e) + "\r\n"}, "a cookie": {uri, "Cookie: sandsea_endpoint_token=" + tokenOf(e) + "\r\n"},
		"the parameter": {strings.TrimPrefix(e.GetBrowserUrl(), h.url), ""}, // what a page can give a WebSocket
	} {
		c, br, resp := upgrade(t, h, by[0], by[1])
		if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("X-Own") != "1" {
			t.Fatalf("%s: %v", name, resp)
		}
		buf := make([]byte, 4)
		for _, word := range []string{"ping", "pong"} {
			_, _ = io.WriteString(c, word)
			if _, err := io.ReadFull(br, buf); err != nil || string(buf) != word {
				t.Fatalf("%s: %q, %v", name, buf, err)
			}
		}
		// The end of one direction leaves the other.
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if rest, err := io.ReadAll(br); err != nil || string(rest) != "bye" {
			t.Errorf("%s: the rest is %q, %v", name, rest, err)
		}
	}
	if _, _, resp := upgrade(t, h, uri, ""); resp.StatusCode != http.StatusUnauthorized || resp.Header.Get("Sandsea-Error") != "unauthenticated" {
		t.Errorf("without a token: %v", resp)
	}
}

func TestEventsPassAsTheyCome(t *testing.T) {
	for _, kind := range []string{"text/plain", "text/event-stream"} {
		next := make(chan string)
		h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", kind)
			w.WriteHeader(http.StatusOK)
			ctl := http.NewResponseController(w)
			_ = ctl.Flush()
			for {
				select {
				case word := <-next:
					_, _ = io.WriteString(w, word)
					_ = ctl.Flush()
				case <-r.Context().Done():
					return
				}
			}
		}))
		resp := ask(t, h.http, http.MethodGet, e.GetUrl(), tokenOf(e), nil)
		buf := make([]byte, 5)
		for _, word := range []string{"one..", "two..", "three"} {
			next <- word // sent only when the one before has been read
			if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != word {
				t.Fatalf("%q, %v", buf, err)
			}
		}
		h.server.Leave()
		if kind == "text/plain" { // may be about to end
			next <- "four."
			if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != "four." {
				t.Errorf("after the server said that it leaves: %q, %v", buf, err)
			}
		} else if _, err := resp.Body.Read(buf); err == nil || errors.Is(err, io.EOF) { // never ends by itself
			t.Errorf("events go on, or ended well: %v", err)
		}
		_ = resp.Body.Close()
	}
}

func TestAnUpgradeEndsWhenTheServerLeaves(t *testing.T) {
	h, e := open(t, echo)
	c, br, resp := upgrade(t, h, strings.TrimPrefix(e.GetUrl(), h.url), tokenHeader+": "+tokenOf(e)+"\r\n")
	if resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp.Status)
	}
	h.server.Leave()
	_ = c.SetReadDeadline(time.Now().Add(limit))
	if _, err := br.ReadByte(); errors.Is(err, context.DeadlineExceeded) || err == nil {
		t.Errorf("it goes on: %v", err)
	}
}

// zeroes reads as n zero bytes.
type zeroes struct{ n int64 }

func (z *zeroes) Read(p []byte) (int, error) {
	if z.n == 0 {
		return 0, io.EOF
	}
	n := int(min(z.n, int64(len(p))))
	clear(p[:n])
	z.n -= int64(n)
	return n, nil
}

// Much goes in and comes back at the same time, and nowhere does it heap up. test/e2e sends more.
func TestLargeBodiesPassBothWaysInLittleMemory(t *testing.T) {
	const size = 256 << 20
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		_, _ = io.CopyBuffer(struct{ io.Writer }{w}, r.Body, make([]byte, 64<<10))
	}))
	var h2 http.Protocols
	h2.SetUnencryptedHTTP2(true)
	second := &http.Transport{Protocols: &h2}
	defer second.CloseIdleConnections()
	for name, by := range map[string]*http.Client{"HTTP/1.1": h.http, "HTTP/2": {Transport: second}} {
		runtime.GC()
		var before, now runtime.MemStats
		runtime.ReadMemStats(&before)
		resp := ask(t, by, http.MethodPost, e.GetUrl(), tokenOf(e), &zeroes{size})
		var got, most int64
		buf := make([]byte, 1<<20)
		for {
			n, err := resp.Body.Read(buf)
			if got += int64(n); got%(16<<20) < int64(n) {
				runtime.ReadMemStats(&now)
				most = max(most, int64(now.HeapInuse)-int64(before.HeapInuse))
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: after %d bytes: %v", name, got, err)
			}
		}
		if got != size || most > 32<<20 {
			t.Errorf("%s: %d bytes came back, heap grew by %d MiB", name, got, most>>20)
		}
	}
}

func TestHTTP2AndTrailersPass(t *testing.T) {
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Trailer", "X-Announced")
		_, _ = fmt.Fprintf(w, "HTTP/%d.%d %s", r.ProtoMajor, r.ProtoMinor, r.Trailer.Get("X-Sent"))
		w.Header().Set("X-Announced", "a")
		w.Header().Set(http.TrailerPrefix+"X-Late", "b")
	}))
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	h2 := &http.Transport{Protocols: &p}
	defer h2.CloseIdleConnections()
	for name, by := range map[string]http.RoundTripper{"HTTP/1.1": h.http.Transport, "HTTP/2": h2} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.GetUrl(), io.NopCloser(strings.NewReader("body")))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set(tokenHeader, tokenOf(e))
		r.Trailer = http.Header{"X-Sent": {"sent"}}
		resp, err := by.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		body := text(t, resp)
		_ = resp.Body.Close()
		if body != "HTTP/1.1 sent" || resp.Proto[:6] != name[:6] || resp.Trailer.Get("X-Announced") != "a" || resp.Trailer.Get("X-Late") != "b" {
			t.Errorf("%s: %q %s %v", name, body, resp.Proto, resp.Trailer)
		}
	}
}

// rpc is a server inside that speaks gRPC.
type rpc struct {
	sandseav1connect.UnimplementedSandboxServiceHandler
	next chan string
}

func (rpc) Get(_ context.Context, r *connect.Request[pb.GetSandboxRequest]) (*connect.Response[pb.GetSandboxResponse], error) {
	if r.Msg.GetId() == "" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("of the app"))
	}
	return connect.NewResponse(&pb.GetSandboxResponse{Sandbox: &pb.Sandbox{Id: r.Msg.GetId(), Node: r.Peer().Protocol}}), nil
}

func (s rpc) Watch(_ context.Context, _ *connect.Request[pb.WatchSandboxesRequest], down *connect.ServerStream[pb.WatchSandboxesResponse]) error {
	if err := down.Send(nil); err != nil { // the headers
		return err
	}
	for word := range s.next {
		if err := down.Send(&pb.WatchSandboxesResponse{Cursor: word}); err != nil {
			return err
		}
	}
	return connect.NewError(connect.CodeDataLoss, errors.New("the end"))
}

func TestGRPCPassesToItsEnd(t *testing.T) {
	mux := http.NewServeMux()
	s := rpc{next: make(chan string)}
	var major atomic.Int64
	_, handler := sandseav1connect.NewSandboxServiceHandler(s)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		major.Store(int64(r.ProtoMajor))
		handler.ServeHTTP(w, r)
	})
	_, e := open(t, mux)
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	h2 := &http.Transport{Protocols: &p}
	defer h2.CloseIdleConnections()
	as := func(token string) sandseav1connect.SandboxServiceClient {
		return sandseav1connect.NewSandboxServiceClient(&http.Client{Transport: h2}, strings.TrimSuffix(e.GetUrl(), "/"), connect.WithGRPC(),
			connect.WithInterceptors(endpointToken(token)))
	}
	c := as(tokenOf(e))
	resp, err := c.Get(t.Context(), connect.NewRequest(&pb.GetSandboxRequest{Id: "x"}))
	if err != nil || resp.Msg.GetSandbox().GetNode() != "grpc" || major.Load() != 2 {
		t.Errorf("%v, %v, HTTP/%d", resp, err, major.Load())
	}
	// An error of the app is headers alone.
	if _, err = c.Get(t.Context(), connect.NewRequest(&pb.GetSandboxRequest{})); connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "of the app") {
		t.Errorf("an error of the app: %v", err)
	}
	st, err := c.Watch(t.Context(), connect.NewRequest(&pb.WatchSandboxesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"one", "two"} {
		s.next <- word
		if !st.Receive() || st.Msg().GetCursor() != word {
			t.Fatalf("%v, %v", st.Msg(), st.Err())
		}
	}
	close(s.next)
	if st.Receive() || connect.CodeOf(st.Err()) != connect.CodeDataLoss {
		t.Errorf("the end of a stream: %v", st.Err())
	}
	// Ours have their form too.
	_, err = as("sse_AAAA").Get(t.Context(), connect.NewRequest(&pb.GetSandboxRequest{Id: "x"}))
	if kindIs(t, errwire.FromConnect(err), errdefs.Denied); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("an error of ours: %v", err)
	}
}

// endpointToken is an interceptor that puts the token on.
func endpointToken(token string) connect.Interceptor { return endpointAuth{token} }

type endpointAuth struct{ token string }

func (a endpointAuth) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		r.Header().Set(tokenHeader, a.token)
		return next(ctx, r)
	}
}

func (a endpointAuth) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set(tokenHeader, a.token)
		return conn
	}
}

func (endpointAuth) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func TestConnectionsInsideAreUsedAgainForAWhile(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	taken := h.inside(t, sb.GetId(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") }))
	var closed atomic.Int64
	h.edges[0].After(func(call string) error {
		if call == "tunnel closed" {
			closed.Add(1)
		}
		return nil
	})
	e := c.endpoint(t, sb.GetId(), 8000, 0)
	for range 10 {
		text(t, ask(t, h.http, http.MethodGet, e.GetUrl(), tokenOf(e), nil))
	}
	if taken.Load() != 1 {
		t.Errorf("%d connections for ten requests in a row", taken.Load())
	}
	// An idle one would keep its sandbox in use.
	until(t, "the idle connection is closed", func() bool { return closed.Load() == 1 })
}

func TestTheCallerWhoLeavesEndsTheRequestInside(t *testing.T) {
	gone := make(chan error, 1)
	in := make(chan struct{})
	h, e := open(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(in)
		<-r.Context().Done()
		gone <- r.Context().Err()
	}))
	ctx, leave := context.WithCancelCause(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, e.GetUrl(), nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(tokenHeader, tokenOf(e))
	go func() {
		<-in
		leave(nil)
	}()
	if resp, err := h.http.Do(r); err == nil {
		resp.Body.Close()
		t.Fatal("an answer")
	}
	select {
	case <-gone:
	case <-time.After(limit):
		t.Error("the server inside goes on")
	}
}

// An answer may be minutes away, and a stream may be silent for hours.
func TestTheServerHasNoTimeLimitOnBodies(t *testing.T) {
	s := apiserver.NewHTTPServer(http.NotFoundHandler(), nil)
	if s.ReadTimeout != 0 || s.WriteTimeout != 0 {
		t.Errorf("read %s, write %s", s.ReadTimeout, s.WriteTimeout)
	}
}

func TestEndpointsOutliveTheirServer(t *testing.T) {
	h, e := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.Path) }))
	old := h.url
	h.serve() // another server of the same store
	if h.url == old {
		t.Fatal("the same server")
	}
	for _, base := range []string{old, h.url} {
		resp := ask(t, h.http, http.MethodGet, base+strings.TrimPrefix(e.GetUrl(), old)+"x", tokenOf(e), nil)
		if got := text(t, resp); resp.StatusCode != http.StatusOK || got != "/x" {
			t.Errorf("%s: %s %s", base, resp.Status, got)
		}
	}
}

func TestEndpointsOverTLSSayHTTPS(t *testing.T) {
	got := make(chan http.Header, 1)
	h, e := open(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Header }))
	s := httptest.NewUnstartedServer(h.server)
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	c := sandseav1connect.NewNetworkServiceClient(s.Client(), s.URL, connect.WithInterceptors(bearer{h.token, ""}))
	id := strings.Split(e.GetUrl(), "/")[4]
	resp, err := c.Endpoint(t.Context(), connect.NewRequest(&pb.EndpointRequest{Id: id, Port: 8000}))
	if err != nil || !strings.HasPrefix(resp.Msg.GetUrl(), s.URL+"/endpoint/") || !strings.HasPrefix(s.URL, "https://") {
		t.Fatal(resp, err)
	}
	ask(t, s.Client(), http.MethodGet, resp.Msg.GetUrl(), tokenOf(resp.Msg), nil)
	if hd := <-got; hd.Get("X-Forwarded-Proto") != "https" {
		t.Errorf("inside: %v", hd)
	}
	first := ask(t, &http.Client{Transport: s.Client().Transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}, http.MethodGet, resp.Msg.GetBrowserUrl(), "", nil)
	if !slices.ContainsFunc(first.Cookies(), func(c *http.Cookie) bool { return c.Secure }) {
		t.Errorf("%v", first.Header)
	}
}

func TestTheNetworkServiceIsPassedOn(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	policy := &pb.NetworkPolicy{Services: map[string]bool{"pypi": true}, Phases: []*pb.NetworkPhase{{Name: "build"}, {Name: "agent"}}}
	set, err := c.networks.SetPolicy(t.Context(), connect.NewRequest(&pb.SetNetworkPolicyRequest{Id: sb.GetId(), Policy: policy}))
	if err != nil || set.Msg.GetSandbox().GetNetworkPhase() != "build" {
		t.Fatal(set, err)
	}
	phase, err := c.networks.SetPhase(t.Context(), connect.NewRequest(&pb.SetNetworkPhaseRequest{Id: sb.GetId(), Phase: "agent"}))
	if err != nil || phase.Msg.GetSandbox().GetNetworkPhase() != "agent" {
		t.Fatal(phase, err)
	}
	check, err := c.networks.Check(t.Context(), connect.NewRequest(&pb.CheckNetworkRequest{Id: sb.GetId(), Service: "pypi"}))
	if err != nil || !check.Msg.GetAllowed() {
		t.Error(check, err)
	}
	if got, err := c.get(t, sb.GetId()); err != nil || got.GetNetworkPhase() != "agent" || len(got.GetSpec().GetNetwork().GetPhases()) != 2 {
		t.Errorf("what is in force: %v, %v", got, err)
	}
	h.edges[0].Flows(sb.GetId(), &pb.NetworkEvent{Name: "a"}, &pb.NetworkEvent{Name: "b", Denied: true})
	st, err := c.networks.Log(t.Context(), connect.NewRequest(&pb.NetworkLogRequest{Id: sb.GetId(), Follow: true}))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for len(names) < 2 && st.Receive() {
		for _, ev := range st.Msg().GetEvents() {
			names = append(names, ev.GetName())
		}
	}
	if !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("%v, %v", names, st.Err())
	}
	h.server.Leave() // it only waits
	for st.Receive() {
	}
	kindIs(t, errwire.FromConnect(st.Err()), errdefs.Unavailable)

	stranger := h.as(h.newToken(iam.Request{Principal: "user:x", Project: "other"}))
	_, err = stranger.networks.SetPhase(t.Context(), connect.NewRequest(&pb.SetNetworkPhaseRequest{Id: sb.GetId(), Phase: "build"}))
	kindIs(t, errwire.FromConnect(err), errdefs.NotFound)
	bound := h.as(h.newToken(iam.Request{Principal: "user:y", Project: "default", May: []string{"network.check", "sandbox.*"}}))
	_, err = bound.networks.SetPolicy(t.Context(), connect.NewRequest(&pb.SetNetworkPolicyRequest{Id: sb.GetId()}))
	kindIs(t, errwire.FromConnect(err), errdefs.Denied)
}
