package apiserver

import (
	"bytes"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/store/mem"
)

func newID(t *testing.T) sandbox.ID {
	t.Helper()
	id, err := sandbox.Mint(1, bytes.NewReader(bytes.Repeat([]byte(t.Name()), 8)))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestAnEndpointTokenOpensItsPortAndNothingElse(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	key, other := bytes.Repeat([]byte{1}, endpointKeyBytes), bytes.Repeat([]byte{2}, endpointKeyBytes)
	at := place{newID(t), 8000}
	raw := []byte(at.id)
	raw[len(raw)-1] = map[bool]byte{true: 'a', false: 'b'}[raw[len(raw)-1] == 'b']
	for _, end := range []time.Time{{}, now.Add(time.Minute)} {
		token := mintEndpoint(key, at, "default/team", end)
		if p, err := readEndpoint(key, at, token, now); err != nil || p != "default/team" {
			t.Fatalf("its own port: %q, %v", p, err)
		}
		for name, try := range map[string]struct {
			key   []byte
			at    place
			token string
		}{
			"another key":      {other, at, token},
			"another port":     {key, place{at.id, 8001}, token},
			"another sandbox":  {key, place{sandbox.ID(raw), 8000}, token},
			"nothing":          {key, at, ""},
			"no token of this": {key, at, "sst_" + token},
			"too long":         {key, at, token + strings.Repeat("A", 1<<20)},
			"half":             {key, at, token[:30]},
			"its bytes alone":  {key, at, strings.TrimPrefix(token, endpointMark)},
		} {
			if _, err := readEndpoint(try.key, try.at, try.token, now); !errors.Is(err, errdefs.Denied) {
				t.Errorf("%s: %v", name, err)
			}
		}
		// No letter of it can be changed: not the project, not the end.
		for i := len(endpointMark); i < len(token); i++ {
			b := []byte(token)
			if b[i]++; b[i] == '[' || b[i] == '{' || b[i] == ':' || b[i] == '`' || b[i] == '.' {
				b[i] = 'A'
			}
			was, _ := endpointText.DecodeString(token[len(endpointMark):])
			is, err := endpointText.DecodeString(string(b[len(endpointMark):]))
			if err == nil && bytes.Equal(was, is) {
				continue // the last letter's spare bits
			}
			if _, err := readEndpoint(key, at, string(b), now); !errors.Is(err, errdefs.Denied) {
				t.Fatalf("letter %d changed: %v", i, err)
			}
		}
	}
	token := mintEndpoint(key, at, "default", now.Add(time.Minute))
	if _, err := readEndpoint(key, at, token, now.Add(time.Minute-time.Millisecond)); err != nil {
		t.Errorf("the last millisecond: %v", err)
	}
	_, err := readEndpoint(key, at, token, now.Add(4*time.Minute))
	if !errors.Is(err, errdefs.Unauthenticated) || !strings.Contains(err.Error(), "ended 3m ago") {
		t.Errorf("after its end: %v", err)
	}
}

func TestServersShareTheKeyOfEndpoints(t *testing.T) {
	s := mem.New(mem.Config{})
	one, two := endpointKey{store: s}, endpointKey{store: s}
	a, err := one.get(t.Context())
	if err != nil || len(a) != endpointKeyBytes {
		t.Fatal(a, err)
	}
	b, err := two.get(t.Context())
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("%x and %x, %v", a, b, err)
	}
	if c, err := (&endpointKey{store: mem.New(mem.Config{})}).get(t.Context()); err != nil || bytes.Equal(a, c) {
		t.Errorf("another store's is the same: %v", err)
	}
}

func TestEndpointPaths(t *testing.T) {
	id := newID(t)
	for path, want := range map[string]string{
		"/80": "", "/80/": "/", "/80/a/b": "/a/b", "/80//a": "//a", "/80/../..": "/../..", "/65535/": "/",
		"/80/a%2Fb": "/a%2Fb", "/80/%2e%2e/": "/%2e%2e/",
	} {
		at, rest, ok := readPlace(endpointPrefix + string(id) + path)
		if !ok || at.id != id || rest != want {
			t.Errorf("%s: %v %q %v", path, at, rest, ok)
		}
	}
	for _, path := range []string{
		"", "/", "/x/80/", "/" + string(id), "/" + string(id) + "/", "/" + string(id) + "/0/", "/" + string(id) + "/080/",
		"/" + string(id) + "/65536/", "/" + string(id) + "/-1/", "/" + string(id) + "/+80/", "/" + string(id) + "/http/",
		"/" + strings.ToUpper(string(id)) + "/80/", "//" + string(id) + "/80/", "/" + string(id) + "%2F80/",
	} {
		if at, _, ok := readPlace("/endpoint" + path); ok {
			t.Errorf("%s: %v", path, at)
		}
	}
}

// What is not ours stays byte for byte.
func TestTokensAreTakenOutOfRequests(t *testing.T) {
	for query, want := range map[string]string{
		"":                                      "",
		"a=1":                                   "a=1",
		"a=1&sandsea_endpoint_token=T":          "a=1",
		"sandsea_endpoint_token=T&a=1&&b;c=%zz": "a=1&&b;c=%zz",
		"sandsea%5Fendpoint_token=T":            "",
		"xsandsea_endpoint_token=T":             "xsandsea_endpoint_token=T",
	} {
		rest, values := takeParameter(query)
		if rest != want || (len(values) == 1) != (query != want) || len(values) == 1 && values[0] != "T" {
			t.Errorf("query %q: %q, %q", query, rest, values)
		}
	}
	for line, want := range map[string]string{
		"a=1; b=2":                             "a=1; b=2",
		"a=1; sandsea_endpoint_token=T; b=2":   "a=1; b=2",
		"sandsea_endpoint_token=T":             "",
		`sandsea_endpoint_token="T";a="x y"`:   `a="x y"`,
		"xsandsea_endpoint_token=T":            "xsandsea_endpoint_token=T",
		"a=sandsea_endpoint_token":             "a=sandsea_endpoint_token",
		" sandsea_endpoint_token = T ; b=\x01": "b=\x01",
	} {
		rest, values := takeCookie(line)
		if rest != want || (len(values) == 1) != (line != want) || len(values) == 1 && values[0] != "T" {
			t.Errorf("cookie %q: %q, %q", line, rest, values)
		}
	}
}

// FuzzEndpointRequest: whatever comes, no name of ours is left in what goes on, and the rest is.
func FuzzEndpointRequest(f *testing.F) {
	f.Add("/80/a%2Fb/../c", "a=1&sandsea_endpoint_token=T&b=2", "a=1; sandsea_endpoint_token=T")
	f.Add("//80//", "sandsea%5fendpoint%5Ftoken=%54", "sandsea_endpoint_token=\"T\"; ;;=")
	f.Fuzz(func(t *testing.T, path, query, cookie string) {
		if at, rest, ok := readPlace(endpointPrefix + "s" + path); ok && (at.port == 0 || rest != "" && rest[0] != '/') {
			t.Errorf("%q: %v %q", path, at, rest)
		}
		rest, values := takeParameter(query)
		kept, cookies := takeCookie(cookie)
		for part := range strings.SplitSeq(rest, "&") {
			name, _, _ := strings.Cut(part, "=")
			if n, err := url.QueryUnescape(name); err == nil && n == endpointParameter {
				t.Errorf("query %q leaves %q", query, rest)
			}
		}
		if again, more := takeParameter(rest); again != rest || len(more) > 0 {
			t.Errorf("query %q: %q, then %q", query, rest, again)
		}
		if h := (http.Header{"Cookie": {kept}}); slices.ContainsFunc((&http.Request{Header: h}).Cookies(), func(c *http.Cookie) bool {
			return c.Name == endpointCookie
		}) {
			t.Errorf("cookie %q leaves %q", cookie, kept)
		}
		if len(values) == 0 && rest != query || len(cookies) == 0 && !strings.Contains(cookie, endpointCookie) && kept != cookie {
			t.Errorf("something else was changed: %q %q, %q %q", query, rest, cookie, kept)
		}
	})
}

func TestRequestsOfOneSandboxAreBounded(t *testing.T) {
	e := &endpoints{open: map[sandbox.ID]int{}}
	id := newID(t)
	var done []func()
	for range endpointRequests {
		d, err := e.enter(id)
		if err != nil {
			t.Fatal(err)
		}
		done = append(done, d)
	}
	if _, err := e.enter(id); !errors.Is(err, errdefs.Exhausted) || errdefs.From(err).RetryAfter == 0 {
		t.Errorf("one more: %v", err)
	}
	if d, err := e.enter("another"); err != nil {
		t.Errorf("another sandbox: %v", err)
	} else {
		d()
	}
	for _, d := range done {
		d()
	}
	if len(e.open) > 0 {
		t.Errorf("counted after their end: %v", e.open)
	}
}
