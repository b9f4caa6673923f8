package upstream

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/policy"
)

// Services are the package services that have an upstream, as policies name them.
var services = []string{
	policy.PyPI, policy.NPM, policy.Golang, policy.Crates, policy.Debian, policy.Maven, policy.RubyGems,
}

// Upstreams are the upstreams of all services, by the service's name. Every service has a value, if only one that says
// what is missing.
type Upstreams map[string]Upstream

// Upstream of one service. As JSON it holds secrets: it goes from edge to Aether and nowhere else.
type Upstream struct {
	// URLs are where the service's protocol is spoken, without a slash at the end and without user and password, in the
	// order in which they are asked. pypi: the simple index ("https://index.example/simple"); npm: the registry; golang:
	// the module proxies; crates: the sparse index; debian: the archives, of which each is asked for its own paths; maven:
	// the repositories; rubygems: the sources.
	URLs []string `json:"urls,omitempty"`
	// Files are URLs of other hosts where the service's artefacts lie, as far as they are known before an index names
	// them: they are matched and served, never searched.
	Files []string `json:"files,omitempty"`
	// Checksums is golang's checksum database, as GOSUMDB: "name", "name+key" or "name+key url". "": none is used.
	Checksums string `json:"checksums,omitempty"`
	// Credentials of its hosts.
	Credentials []Credential `json:"credentials,omitempty"`
	// Found tells where this was found: "aether.toml", "npm config get registry".
	Found string `json:"found,omitempty"`
	// Missing tells what the operator must name, if there is no URL: a sentence.
	Missing string `json:"missing,omitempty"`
}

// Credential is a header that goes to one origin, below one path, and nowhere else.
type Credential struct {
	// Origin is scheme and host, with a port if it is not the scheme's own: "https://npm.example:8443".
	Origin string `json:"origin"`
	// Path is the prefix of the paths that it goes to; "" or "/": all.
	Path string `json:"path,omitempty"`
	// Home is the path of the URL that it was found in: of several credentials with the same header that go with a request,
	// the one is sent whose Home, or Path if it has none, is nearest.
	Home string `json:"home,omitempty"`
	// Header and Value are sent: "Authorization", "Bearer ...".
	Header string `json:"header"`
	Value  string `json:"value"`
}

// String never shows the value.
func (c Credential) String() string { return fmt.Sprintf("%s for %s%s", c.Header, c.Origin, c.Path) }

// GoString never shows the value.
func (c Credential) GoString() string { return c.String() }

// Basic makes the Credential of a user and password.
func Basic(origin, path, user, password string) Credential {
	return Credential{
		Origin: origin, Path: path, Header: "Authorization",
		Value: "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password)),
	}
}

// covers tells whether the credential goes with a request for u.
func (c Credential) covers(u *url.URL) bool {
	if origin(u) != c.Origin {
		return false
	}
	p := strings.TrimSuffix(c.Path, "/")
	return p == "" || u.Path == p || strings.HasPrefix(u.Path, p+"/")
}

// nearness is how many leading segments the place of the credential shares with a path.
func (c Credential) nearness(path string) int {
	home := strings.FieldsFunc(cmp.Or(c.Home, c.Path), func(r rune) bool { return r == '/' })
	at := strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	n := 0
	for n < min(len(home), len(at)) && home[n] == at[n] {
		n++
	}
	return n
}

// origin of a URL: scheme and host in lower case, without the scheme's own port.
func origin(u *url.URL) string {
	scheme, host := strings.ToLower(u.Scheme), strings.ToLower(u.Host)
	if p := u.Port(); p == "443" && scheme == "https" || p == "80" && scheme == "http" {
		host = strings.TrimSuffix(host, ":"+p)
	}
	return scheme + "://" + host
}

// Hosts are the host names of the upstream's URLs, without ports, each once.
func (u Upstream) Hosts() []string {
	var hosts []string
	for _, raw := range slices.Concat(u.URLs, u.Files) {
		p, err := url.Parse(raw)
		if err == nil && p.Hostname() != "" && !slices.Contains(hosts, strings.ToLower(p.Hostname())) {
			hosts = append(hosts, strings.ToLower(p.Hostname()))
		}
	}
	return hosts
}

// Headers that an operator may set for an upstream's hosts and that are not the transport's own business.
func checkHeader(name string) error {
	switch http.CanonicalHeaderKey(name) {
	case "", "Host", "Connection", "Content-Length", "Transfer-Encoding", "Range", "If-None-Match", "If-Modified-Since", "Accept-Encoding":
		return errdefs.New(errdefs.Invalid, "header", "%q cannot be set", name)
	}
	if strings.ContainsAny(name, " \t\r\n:") {
		return errdefs.New(errdefs.Invalid, "header", "%q is not a header's name", name)
	}
	return nil
}

// take parses a URL as a client or an operator writes it: it loses its slash at the end, and user and password, which
// become a Credential.
func take(raw string) (string, *Credential, error) {
	u, err := url.Parse(strings.TrimSpace(raw))
	if err != nil {
		// The parser's own words may show a password.
		return "", nil, errdefs.New(errdefs.Invalid, "upstream", "a URL cannot be parsed")
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return "", nil, errdefs.New(errdefs.Invalid, "upstream", "%q is not an http or https URL", u.Redacted())
	}
	var c *Credential
	if u.User != nil {
		pass, _ := u.User.Password()
		b := Basic(origin(u), "", u.User.Username(), pass)
		b.Home = strings.TrimRight(u.Path, "/")
		c, u.User = &b, nil
	}
	u.Fragment, u.RawQuery = "", ""
	return strings.TrimRight(u.String(), "/"), c, nil
}
