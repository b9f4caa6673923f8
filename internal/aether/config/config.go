// Package config reads aether.toml, what an operator tells Aether. Everything in it is optional; what it does not know is
// an error that names the line and the key that was meant. Secrets stand in files of their own, which are read with it.
//
//	resolvers = ["192.0.2.53"]               # instead of the node's own
//	upstream_proxy = "http://proxy.example:3128"
//
//	[services.pypi]                          # instead of what the node's own pip is configured with
//	urls = ["https://packages.example/simple"]
//	files = ["https://files.example"]        # other hosts on which the artefacts lie
//
//	user = "reader"                          # or header = "Authorization" and value_file
//	password_file = "pypi.password"          # relative names begin at aether.toml's directory
//
//	[[grants]]                               # opens a part of the platform's deny list
//	project = "research"                     # none: every project
//	cidrs = ["10.1.2.0/24"]
//
//	[secrets.model]                          # for rules with secret = "model"
//	projects = ["research"]                  # that may use it, with those below them; "*": all
//	hosts = ["api.example"]                  # or "*.api.example"
//	header = "Authorization"
//	value_file = "/etc/sandsea/model.header" # the whole value, as "Bearer …"
//
//	[cache]
//	bytes = 21474836480
//	offline = false
//
//	[limits]
//	flows = 1024                             # of a sandbox, open at once
//	project_flows = 16384
//	bytes = 0                                # of a sandbox, both ways; 0: no limit
//	dns_per_second = 200                     # of a sandbox
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/typo"
)

// FileName of the configuration in the data directory.
const FileName = "aether.toml"

// maxSecret bounds a file that holds a secret, maxFile aether.toml itself.
const (
	maxSecret = 16 << 10
	maxFile   = 1 << 20
)

// Config is what the operator said, defaults filled in.
type Config struct {
	Resolvers []netip.AddrPort
	// Proxy is nil for direct connections.
	Proxy *url.URL
	// Services are the operator's words for upstream.Discover.
	Services map[string]upstream.Setting
	Secrets  map[string]Secret
	Cache    Cache
	Limits   Limits
	grants   []grant
}

// Secret is a header that Aether adds to requests.
type Secret struct {
	projects []string
	hosts    []string
	Header   string
	Value    string
}

// String never shows the value.
func (s Secret) String() string { return s.Header + " for " + strings.Join(s.hosts, ", ") }

// GoString never shows the value.
func (s Secret) GoString() string { return s.String() }

// Covers tells whether the secret may go to a host, whose name is in lower case.
func (s Secret) Covers(host string) bool {
	return slices.ContainsFunc(s.hosts, func(h string) bool {
		if below, wild := strings.CutPrefix(h, "*"); wild {
			return strings.HasSuffix(host, below) && len(host) > len(below)
		}
		return h == host
	})
}

// For tells whether sandboxes of a project may use the secret.
func (s Secret) For(project string) bool {
	return slices.ContainsFunc(s.projects, func(p string) bool {
		return p == "*" || p == project || strings.HasPrefix(project, p+"/")
	})
}

// Cache of the package services.
type Cache struct {
	Bytes   int64 `toml:"bytes"` // 0: the cache's default
	Offline bool  `toml:"offline"`
}

// Limits of what sandboxes may do where their policy does not say.
type Limits struct {
	Flows        int   `toml:"flows"`
	ProjectFlows int   `toml:"project_flows"`
	Bytes        int64 `toml:"bytes"` // 0: no limit
	DNSPerSecond int   `toml:"dns_per_second"`
}

// DefaultLimits hold where the file says nothing.
var DefaultLimits = Limits{Flows: 1024, ProjectFlows: 16384, DNSPerSecond: 200}

type grant struct {
	project  string
	prefixes []netip.Prefix
}

// Grants are the parts of the platform's deny list that are open to a project.
func (c *Config) Grants(project string) policy.Grants {
	var out policy.Grants
	for _, g := range c.grants {
		if g.project == "" || g.project == project || strings.HasPrefix(project, g.project+"/") {
			out = append(out, g.prefixes...)
		}
	}
	return out
}

// file is aether.toml as it is written.
type file struct {
	Resolvers     []string                    `toml:"resolvers"`
	UpstreamProxy string                      `toml:"upstream_proxy"`
	Services      map[string]upstream.Setting `toml:"services"`
	Grants        []grantText                 `toml:"grants"`
	Secrets       map[string]secret           `toml:"secrets"`
	Cache         Cache                       `toml:"cache"`
	Limits        Limits                      `toml:"limits"`
}

type grantText struct {
	Project string   `toml:"project"`
	CIDRs   []string `toml:"cidrs"`
}

type secret struct {
	Projects  []string `toml:"projects"`
	Hosts     []string `toml:"hosts"`
	Header    string   `toml:"header"`
	ValueFile string   `toml:"value_file"`
}

// Load reads the file at path; one that is not there says nothing. Errors are errdefs.Invalid and name file and field.
func Load(path string) (*Config, error) {
	text, err := readBounded(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return Parse(path, "")
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, path, "%v", err).Wrap(err)
	}
	return Parse(path, text)
}

func readBounded(path string, most int64) (string, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if fi.Size() > most {
		return "", fmt.Errorf("%d bytes, at most %d", fi.Size(), most)
	}
	b, err := os.ReadFile(path)
	return string(b), err
}

// Parse reads the text of the file at path, for messages and for the files that it names.
func Parse(path, text string) (*Config, error) {
	p := parser{path: path, text: text}
	f := file{Limits: DefaultLimits}
	meta, err := toml.Decode(text, &f)
	if err != nil {
		msg := err.Error()
		object := path
		if pe, ok := errors.AsType[toml.ParseError](err); ok {
			object, msg = fmt.Sprintf("%s:%d", path, pe.Position.Line), pe.Message
		}
		return nil, errdefs.New(errdefs.Invalid, object, "%s", msg).WithHint("Correct the file")
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return nil, p.unknown(unknown[0])
	}
	return p.config(f)
}

type parser struct{ path, text string }

// fail is an error about one field.
func (p parser) fail(field, hint, format string, args ...any) error {
	return errdefs.New(errdefs.Invalid, p.at(field), "%s: %s", field, fmt.Sprintf(format, args...)).WithField(field, "").WithHint("%s", hint)
}

// at is the file with the line on which a key seems to stand.
func (p parser) at(field string) string {
	key := field[strings.LastIndexByte(field, '.')+1:]
	for i, l := range strings.Split(p.text, "\n") {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(l), key); ok && strings.HasPrefix(strings.TrimSpace(rest), "=") {
			return fmt.Sprintf("%s:%d", p.path, i+1)
		}
	}
	return p.path
}

func (p parser) unknown(key toml.Key) error {
	at := reflect.TypeFor[file]()
	for _, part := range key[:len(key)-1] {
		at = below(at, part)
	}
	last := key[len(key)-1]
	e := errdefs.New(errdefs.Invalid, p.at(last), "unknown key %s", key).WithField(key.String(), "")
	known := keysOf(at)
	best, near := 3, ""
	for _, k := range known {
		if d := typo.Distance(last, k, 2); d < best {
			best, near = d, k
		}
	}
	if near != "" {
		return e.WithHint("Did you mean %s?", near)
	}
	return e.WithHint("Known here: %s", strings.Join(known, ", "))
}

// below is the type of what stands under a key.
func below(t reflect.Type, key string) reflect.Type {
	switch {
	case t == nil:
		return nil
	case t.Kind() == reflect.Map:
		return t.Elem()
	case t.Kind() != reflect.Struct:
		return nil
	}
	for f := range t.Fields() {
		if f.Tag.Get("toml") != key {
			continue
		}
		if f.Type.Kind() == reflect.Slice {
			return f.Type.Elem()
		}
		return f.Type
	}
	return nil
}

func keysOf(t reflect.Type) []string {
	if t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	var keys []string
	for f := range t.Fields() {
		keys = append(keys, f.Tag.Get("toml"))
	}
	slices.Sort(keys)
	return keys
}

func (p parser) config(f file) (*Config, error) {
	c := &Config{Cache: f.Cache, Limits: f.Limits, Services: map[string]upstream.Setting{}, Secrets: map[string]Secret{}}
	for _, s := range f.Resolvers {
		r, err := netip.ParseAddrPort(s)
		if err != nil {
			var a netip.Addr
			a, err = netip.ParseAddr(s)
			r = netip.AddrPortFrom(a, 53)
		}
		if err != nil {
			return nil, p.fail("resolvers", `Write addresses, as "192.0.2.53" or "192.0.2.53:5353"`, "%q is no address", s)
		}
		c.Resolvers = append(c.Resolvers, r)
	}
	if f.UpstreamProxy != "" {
		u, err := url.Parse(f.UpstreamProxy)
		if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" || strings.Trim(u.Path, "/") != "" {
			return nil, p.fail("upstream_proxy", `Write "http://host:port" or "https://host:port"`, "it is no address of an HTTP proxy")
		}
		c.Proxy = u
	}
	for _, name := range slices.Sorted(maps.Keys(f.Services)) {
		set := f.Services[name]
		if err := set.Validate(name); err != nil {
			e := errdefs.From(err)
			return nil, p.fail(e.Field, e.Hint, "%s", e.Msg)
		}
		p.absolute(&set.PasswordFile)
		p.absolute(&set.ValueFile)
		c.Services[name] = set
	}
	for i, g := range f.Grants {
		out := grant{project: g.Project}
		field := fmt.Sprintf("grants[%d].cidrs", i)
		if len(g.CIDRs) == 0 {
			return nil, p.fail(field, "Name the networks that it opens", "none is given")
		}
		for _, s := range g.CIDRs {
			n, err := netip.ParsePrefix(s)
			if err != nil || n != n.Masked() {
				return nil, p.fail(field, `Write networks, as "10.1.2.0/24" or "10.1.2.3/32"`, "%q is no network", s)
			}
			out.prefixes = append(out.prefixes, n)
		}
		c.grants = append(c.grants, out)
	}
	for _, name := range slices.Sorted(maps.Keys(f.Secrets)) {
		s, err := p.secret("secrets."+name, f.Secrets[name])
		if err != nil {
			return nil, err
		}
		c.Secrets[name] = s
	}
	for field, n := range map[string]int64{
		"cache.bytes": f.Cache.Bytes, "limits.flows": int64(f.Limits.Flows) - 1, "limits.project_flows": int64(f.Limits.ProjectFlows) - 1,
		"limits.bytes": f.Limits.Bytes, "limits.dns_per_second": int64(f.Limits.DNSPerSecond) - 1,
	} {
		if n < 0 {
			return nil, p.fail(field, "Give a larger number, or leave it out", "it is too small")
		}
	}
	return c, nil
}

func (p parser) secret(field string, s secret) (Secret, error) {
	out := Secret{Header: s.Header, projects: s.Projects}
	if len(s.Projects) == 0 || slices.Contains(s.Projects, "") {
		return out, p.fail(field+".projects", `Name the projects that may use it, as "default", or "*" for all`, "none is given")
	}
	if len(s.Hosts) == 0 {
		return out, p.fail(field+".hosts", `Name the hosts that it may go to, as "api.example"`, "none is given")
	}
	for _, h := range s.Hosts {
		name := strings.ToLower(h)
		if strings.Trim(strings.TrimPrefix(name, "*."), "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" || strings.Trim(name, "*.") == "" {
			return out, p.fail(field+".hosts", `Write "api.example" or "*.api.example"`, "%q is no host name", h)
		}
		out.hosts = append(out.hosts, name)
	}
	if !headerName(s.Header) {
		return out, p.fail(field+".header", `Give a header, as "Authorization"`, "%q is no header that can be set", s.Header)
	}
	var err error
	out.Value, err = p.value(field, s.ValueFile)
	return out, err
}

// absolute makes the name of a file one that does not depend on where we are.
func (p parser) absolute(path *string) {
	if *path != "" && !filepath.IsAbs(*path) {
		*path = filepath.Join(filepath.Dir(p.path), *path)
	}
}

// value reads a secret from its file, without the line feed at its end.
func (p parser) value(field, path string) (string, error) {
	field += ".value_file"
	if path == "" {
		return "", p.fail(field, "Name a file that holds it", "none is given")
	}
	p.absolute(&path)
	text, err := readBounded(path, maxSecret)
	if err != nil {
		return "", p.fail(field, "Name a file that can be read", "%v", err)
	}
	text = strings.TrimRight(text, "\r\n")
	if text == "" || strings.ContainsAny(text, "\r\n\x00") {
		return "", p.fail(field, "Write the value on one line", "%s is empty or has several lines", path)
	}
	return text, nil
}

// headerName reports whether a header can be added to requests without changing what they are.
func headerName(s string) bool {
	switch strings.ToLower(s) {
	case "", "host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect", "keep-alive", "proxy-connection":
		return false
	}
	return strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz0123456789-_") == ""
}
