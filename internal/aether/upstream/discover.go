package upstream

import (
	"archive/zip"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/internal/policy"
)

const (
	clientLimit = 30 * time.Second // of one command of one client
	maxOutput   = 4 << 20          // of one command
	maxSettings = 1 << 20          // of one client's file
)

// Node is whose clients Discover asks.
type Node struct {
	// Env is the environment of the clients: os.Environ() of the edge. PATH, HOME and the clients' own variables count.
	Env []string
	// Dir is where they run, in a directory of their own that is removed again; empty: the system's for such things.
	Dir string
}

// Discover asks the node's package clients where they get their packages, and puts the operator's settings, by service,
// over that; clients of services whose URLs the operator names are not asked. It runs the clients, two at a time and each
// within its limit, in an empty directory of their own, and lets none of them reach a network.
//
// What is not found is told in Missing and is no error. The error says what is wrong with a setting.
func Discover(ctx context.Context, node Node, settings map[string]Setting) (Upstreams, error) {
	for name, s := range settings {
		if err := s.Validate(name); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp(node.Dir, "sandsea-upstream-")
	if err != nil {
		return nil, fmt.Errorf("ask package clients: %w", err)
	}
	defer os.RemoveAll(dir)
	a := asker{dir: dir, env: node.Env}
	ask := map[string]func(context.Context) (Upstream, error){
		policy.PyPI: a.pypi, policy.NPM: a.npm, policy.Golang: a.golang, policy.Crates: a.crates,
		policy.Debian: a.debian, policy.Maven: a.maven, policy.RubyGems: a.rubygems,
	}
	var mu sync.Mutex
	all := Upstreams{}
	var g errgroup.Group
	g.SetLimit(2)
	for _, name := range services {
		g.Go(func() error {
			var u Upstream
			if len(settings[name].URLs) == 0 || name == policy.Golang && settings[name].Checksums == "" {
				var err error
				if u, err = ask[name](ctx); err != nil || len(u.URLs) == 0 {
					reason := "its client is configured with no web address"
					if err != nil {
						reason = err.Error()
					}
					u.Found, u.Missing = "", fmt.Sprintf("%s: name it as urls in [services.%s] of aether.toml", reason, name)
				}
			}
			u, err := settings[name].apply(name, u)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			all[name] = u
			return nil
		})
	}
	return all, g.Wait()
}

// asker runs clients.
type asker struct {
	dir string // empty, where clients run
	env []string
}

// getenv is a variable of the clients' environment; the last one counts, as it does for them.
func (a asker) getenv(name string) string {
	for _, kv := range slices.Backward(a.env) {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

// find a program in the clients' PATH.
func (a asker) find(program string) (string, error) {
	for _, dir := range filepath.SplitList(a.getenv("PATH")) {
		if !filepath.IsAbs(dir) {
			continue
		}
		if path, err := exec.LookPath(filepath.Join(dir, program)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no %s on this node", program)
}

// output is a bounded buffer.
type output struct{ bytes.Buffer }

// Write keeps the beginning.
func (o *output) Write(p []byte) (int, error) {
	if room := maxOutput - o.Len(); room < len(p) {
		_, _ = o.Buffer.Write(p[:room])
		return len(p), nil
	}
	return o.Buffer.Write(p)
}

// run gives a client's output and error output, which is there even if the client failed.
func (a asker) run(ctx context.Context, extra []string, program string, args ...string) (stdout, stderr string, err error) {
	path, err := a.find(program)
	if err != nil {
		return "", "", err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, clientLimit, fmt.Errorf("%s gave no answer within %s", program, clientLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = a.dir
	cmd.Env = slices.Concat(a.env, []string{"LC_ALL=C", "NO_COLOR=1"}, extra)
	cmd.WaitDelay = time.Second
	var out, errs output
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("%s: %w", strings.Join(append([]string{program}, args[:min(len(args), 2)]...), " "), cmp.Or(context.Cause(ctx), err))
	}
	return out.String(), errs.String(), err
}

// pipDefaults prints what pip knows by itself: its index and the host of its files.
const pipDefaults = `from pip._internal.models.index import PyPI
print(PyPI.simple_url)
print(PyPI.file_storage_domain)`

func (a asker) pypi(ctx context.Context) (Upstream, error) {
	list, _, err := a.run(ctx, nil, "python3", "-m", "pip", "config", "list")
	if err != nil {
		return Upstream{}, err
	}
	index, extra := parsePipConfig(list)
	u := Upstream{Found: "pip config list"}
	if index == "" {
		defaults, _, err := a.run(ctx, nil, "python3", "-c", pipDefaults)
		if err != nil {
			return Upstream{}, errors.New("pip does not tell its default index")
		}
		lines := strings.Fields(defaults)
		if len(lines) > 0 {
			index = lines[0]
			u.Found = "pip's default index"
		}
		if len(lines) > 1 {
			u.Files = []string{"https://" + lines[1]}
		}
	}
	u.add(index)
	for _, e := range extra {
		u.add(e)
	}
	return u, nil
}

// parsePipConfig reads `pip config list`. As for `pip install`, the environment wins over [install] and that over
// [global]; in each, the last word counts.
func parsePipConfig(list string) (index string, extra []string) {
	rank := map[string]int{"global": 1, "install": 2, ":env:": 3}
	var indexRank, extraRank int
	for line := range strings.Lines(list) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		section, name, dot := strings.Cut(key, ".")
		if !ok || !dot || rank[section] == 0 {
			continue
		}
		value = unquotePython(value)
		switch r := rank[section]; {
		case name == "index-url" && r >= indexRank:
			index, indexRank = value, r
		case name == "extra-index-url" && r >= extraRank:
			extra, extraRank = strings.Fields(value), r
		}
	}
	return index, extra
}

// unquotePython undoes repr() as far as URLs need it.
func unquotePython(s string) string {
	if len(s) >= 2 && (s[0] == '\'' || s[0] == '"') && s[len(s)-1] == s[0] {
		s = s[1 : len(s)-1]
	}
	return strings.NewReplacer(`\n`, "\n", `\'`, `'`, `\\`, `\`).Replace(s)
}

func (a asker) npm(ctx context.Context) (Upstream, error) {
	out, _, err := a.run(ctx, nil, "npm", "config", "get", "registry", "userconfig", "globalconfig")
	if err != nil {
		return Upstream{}, err
	}
	u := Upstream{Found: "npm config get registry"}
	var scopes []string
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "registry":
			u.add(value)
		case "userconfig", "globalconfig":
			if b, err := readFile(value, maxSettings); err == nil {
				u.Credentials = append(u.Credentials, parseNpmrc(string(b), a.getenv)...)
				scopes = append(scopes, npmScopes(string(b))...)
			}
		}
	}
	if slices.Sort(scopes); len(scopes) > 0 {
		u.Found += ", without the registries of " + strings.Join(slices.Compact(scopes), ", ") + ": sandboxes ask this one for them"
	}
	// npm keeps tokens of many registries; only those of this one go to Aether.
	u.Credentials = slices.DeleteFunc(u.Credentials, func(c Credential) bool {
		return !slices.ContainsFunc(u.URLs, func(raw string) bool {
			p, err := url.Parse(raw)
			return err == nil && origin(p) == c.Origin
		})
	})
	return u, nil
}

// npmScopes are the scopes that an .npmrc gives a registry of their own: "@scope:registry=…".
func npmScopes(text string) []string {
	var scopes []string
	for line := range strings.Lines(text) {
		key, _, ok := strings.Cut(line, "=")
		if scope, of := strings.CutSuffix(strings.TrimSpace(key), ":registry"); ok && of && strings.HasPrefix(scope, "@") {
			scopes = append(scopes, scope)
		}
	}
	return scopes
}

var npmVariable = regexp.MustCompile(`\$\{([A-Za-z_][A-Za-z0-9_]*)\}`)

// parseNpmrc reads the credentials of an .npmrc: "//host/path/:_authToken=…", ":_auth=…", ":username=…" with
// ":_password=…".
func parseNpmrc(text string, getenv func(string) string) []Credential {
	type login struct{ token, auth, user, password string }
	logins := map[string]*login{}
	var order []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		key, value, ok := strings.Cut(line, "=")
		if !ok || !strings.HasPrefix(line, "//") {
			continue
		}
		at := strings.LastIndex(key, ":")
		if at < 0 {
			continue
		}
		place, field := strings.TrimSpace(key[:at]), strings.TrimSpace(key[at+1:])
		value = strings.Trim(strings.TrimSpace(value), `"'`)
		value = npmVariable.ReplaceAllStringFunc(value, func(v string) string { return getenv(v[2 : len(v)-1]) })
		l := logins[place]
		if l == nil {
			l = &login{}
			logins[place] = l
			order = append(order, place)
		}
		switch field {
		case "_authToken":
			l.token = value
		case "_auth":
			l.auth = value
		case "username":
			l.user = value
		case "_password":
			if raw, err := base64.StdEncoding.DecodeString(value); err == nil {
				l.password = string(raw)
			}
		}
	}
	var out []Credential
	for _, place := range order {
		p, err := url.Parse("https:" + place)
		if err != nil || p.Host == "" {
			continue
		}
		l := logins[place]
		c := Credential{Origin: origin(p), Path: strings.TrimSuffix(p.Path, "/"), Header: "Authorization"}
		switch {
		case l.token != "":
			c.Value = "Bearer " + l.token
		case l.auth != "":
			c.Value = "Basic " + l.auth
		case l.user != "" && l.password != "":
			c.Value = Basic("", "", l.user, l.password).Value
		default:
			continue
		}
		if strings.ContainsAny(c.Value, "\r\n\x00") {
			continue
		}
		out = append(out, c)
		if plain, ok := strings.CutPrefix(c.Origin, "https:"); ok {
			// npm does not tell schemes apart here.
			c.Origin = "http:" + plain
			out = append(out, c)
		}
	}
	return out
}

func (a asker) golang(ctx context.Context) (Upstream, error) {
	// Local: no go.mod may make the command fetch another toolchain.
	out, _, err := a.run(ctx, []string{"GOTOOLCHAIN=local"}, "go", "env", "GOPROXY", "GOSUMDB")
	if err != nil {
		return Upstream{}, err
	}
	proxies, sumdb, _ := strings.Cut(strings.TrimSpace(out), "\n")
	u := Upstream{Found: "go env GOPROXY", Checksums: strings.TrimSpace(sumdb)}
	for _, p := range strings.FieldsFunc(proxies, func(r rune) bool { return r == ',' || r == '|' }) {
		if p = strings.TrimSpace(p); p == "off" {
			break
		}
		u.add(p) // "direct" and file: are no web addresses
	}
	return u, nil
}

// cargoFailed finds what cargo could not download, in its own words.
var cargoFailed = regexp.MustCompile("failed to (?:download from|fetch) `([^`]+)`")

// crates has cargo try to fetch its index through a proxy that nobody serves: its complaint names the index, whether
// that is its own default or a source that replaces it.
func (a asker) crates(ctx context.Context) (Upstream, error) {
	dir := filepath.Join(a.dir, "cargo")
	home := filepath.Join(dir, "home")
	files := map[string]string{
		"Cargo.toml": "[package]\nname = \"question\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[dependencies]\nanswer = \"1\"\n",
		"src/lib.rs": "",
	}
	theirs := a.getenv("CARGO_HOME")
	if theirs == "" {
		theirs = filepath.Join(a.getenv("HOME"), ".cargo")
	}
	for _, name := range []string{"config", "config.toml"} { // of both, cargo reads the first
		if b, err := readFile(filepath.Join(theirs, name), maxSettings); err == nil {
			files["home/"+name] = string(b)
			break
		}
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return Upstream{}, err
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return Upstream{}, err
		}
	}
	if err := os.MkdirAll(home, 0o700); err != nil {
		return Upstream{}, err
	}
	_, errs, err := a.run(ctx, []string{
		"CARGO_HOME=" + home, "CARGO_NET_RETRY=0", "CARGO_HTTP_PROXY=http://127.0.0.1:1", "CARGO_NET_OFFLINE=false",
		"CARGO_TERM_COLOR=never", "no_proxy=", "NO_PROXY=",
	}, "cargo", "generate-lockfile", "--manifest-path", filepath.Join(dir, "Cargo.toml"))
	m := cargoFailed.FindStringSubmatch(errs)
	switch {
	case m == nil && err != nil && errs == "":
		return Upstream{}, err
	case m == nil:
		return Upstream{}, errors.New("cargo does not tell its index")
	}
	index, ok := strings.CutSuffix(m[1], "/config.json")
	if !ok {
		return Upstream{}, errors.New("cargo is configured with an index that is a git repository; only sparse indexes are served")
	}
	u := Upstream{Found: "cargo's index"}
	u.add(strings.TrimPrefix(index, "sparse+"))
	return u, nil
}

func (a asker) debian(ctx context.Context) (Upstream, error) {
	// Without this option apt tells only of sources whose lists it has: of none on a node that removed them.
	out, _, err := a.run(ctx, nil, "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)")
	if err != nil {
		return Upstream{}, err
	}
	u := Upstream{Found: "apt-get indextargets"}
	for line := range strings.Lines(out) {
		list, ok := strings.CutPrefix(strings.TrimSpace(line), "mirror+file:")
		if !ok {
			u.add(line)
			continue
		}
		// A file of archives, as on Debian's cloud images: one a line, with words about it behind.
		b, err := readFile(path.Clean(list), maxSettings)
		if err != nil {
			continue
		}
		for mirror := range strings.Lines(string(b)) {
			if f := strings.Fields(mirror); len(f) > 0 {
				u.add(f[0])
			}
		}
	}
	return u, nil
}

func (a asker) maven(ctx context.Context) (Upstream, error) {
	out, _, err := a.run(ctx, nil, "mvn", "-v")
	if err != nil {
		return Upstream{}, err
	}
	var home string
	for line := range strings.Lines(out) {
		if h, ok := strings.CutPrefix(strings.TrimSpace(line), "Maven home: "); ok {
			home = h
		}
	}
	if home == "" {
		return Upstream{}, errors.New("mvn -v does not tell its home")
	}
	// The user's settings go before the installation's, in each kind.
	var merged mavenSettings
	for _, path := range []string{filepath.Join(a.getenv("HOME"), ".m2", "settings.xml"), filepath.Join(home, "conf", "settings.xml")} {
		b, err := readFile(path, maxSettings)
		if err != nil {
			continue
		}
		merged.add(path, b, a.getenv)
	}
	if u := merged.upstream(); len(u.URLs) > 0 {
		return u, nil
	}
	jars, _ := filepath.Glob(filepath.Join(home, "lib", "maven-model-builder-*.jar")) // the pattern is well-formed
	for _, jar := range jars {
		if central, err := superPOM(jar); err == nil {
			u := Upstream{Found: "Maven's super POM"}
			u.add(central)
			return u, nil
		}
	}
	return Upstream{}, errors.New("the super POM is not in the home of mvn")
}

// mavenSettings are those of one or more files.
type mavenSettings struct {
	Mirrors []mavenMirror `xml:"mirrors>mirror"`
	Servers []mavenServer `xml:"servers>server"`
}

type mavenMirror struct {
	ID      string `xml:"id"`
	Of      string `xml:"mirrorOf"`
	URL     string `xml:"url"`
	Blocked bool   `xml:"blocked"`

	path string // of the file
}

type mavenServer struct {
	ID       string `xml:"id"`
	User     string `xml:"username"`
	Password string `xml:"password"`
}

var mavenVariable = regexp.MustCompile(`\$\{env\.([^}]+)\}`)

// add reads a file, whose words count less than those of files before. "${env.NAME}" stands for a variable, and stays if
// there is none, as for Maven.
func (s *mavenSettings) add(path string, b []byte, getenv func(string) string) {
	var more mavenSettings
	if err := xml.Unmarshal(b, &more); err != nil {
		return
	}
	fill := func(words ...*string) {
		for _, w := range words {
			*w = mavenVariable.ReplaceAllStringFunc(strings.TrimSpace(*w), func(v string) string {
				return cmp.Or(getenv(v[len("${env."):len(v)-1]), v)
			})
		}
	}
	for _, m := range more.Mirrors {
		fill(&m.ID, &m.Of, &m.URL)
		m.path = path
		s.Mirrors = append(s.Mirrors, m)
	}
	for _, srv := range more.Servers {
		fill(&srv.ID, &srv.User, &srv.Password)
		s.Servers = append(s.Servers, srv)
	}
}

// upstream is the mirror that stands for the central repository, with its server's login: as for Maven, one that names
// just this repository goes before patterns, else the first counts.
func (s *mavenSettings) upstream() (u Upstream) {
	at := slices.IndexFunc(s.Mirrors, func(m mavenMirror) bool { return !m.Blocked && m.Of == "central" })
	if at < 0 {
		at = slices.IndexFunc(s.Mirrors, func(m mavenMirror) bool { return !m.Blocked && mirrorsCentral(m.Of) })
	}
	if at < 0 {
		return u
	}
	m := s.Mirrors[at]
	u.Found = "mirrors in " + m.path
	u.add(m.URL)
	p, err := url.Parse(m.URL)
	if err != nil {
		return u
	}
	if i := slices.IndexFunc(s.Servers, func(srv mavenServer) bool { return srv.ID == m.ID }); i >= 0 {
		// A password in braces is encrypted with a key that we do not look for.
		if srv := s.Servers[i]; srv.User != "" && !strings.HasPrefix(srv.Password, "{") {
			u.Credentials = append(u.Credentials, Basic(origin(p), p.Path, srv.User, srv.Password))
		}
	}
	return u
}

// mirrorsCentral tells whether a mirrorOf covers the repository "central", which is external and not http.
func mirrorsCentral(of string) bool {
	covers := false
	for p := range strings.SplitSeq(of, ",") {
		switch strings.TrimSpace(p) {
		case "!central":
			return false
		case "*", "central", "external:*":
			covers = true
		}
	}
	return covers
}

// superPOM reads the central repository's URL out of the POM that every POM inherits.
func superPOM(jar string) (string, error) {
	z, err := zip.OpenReader(jar)
	if err != nil {
		return "", err
	}
	defer func() { _ = z.Close() }()
	f, err := z.Open("org/apache/maven/model/pom-4.0.0.xml")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	var pom struct {
		Repositories []struct {
			ID  string `xml:"id"`
			URL string `xml:"url"`
		} `xml:"repositories>repository"`
	}
	if err := xml.NewDecoder(io.LimitReader(f, maxSettings)).Decode(&pom); err != nil {
		return "", err
	}
	for _, r := range pom.Repositories {
		if r.ID == "central" {
			return strings.TrimSpace(r.URL), nil
		}
	}
	return "", errors.New("names no central repository")
}

func (a asker) rubygems(ctx context.Context) (Upstream, error) {
	out, _, err := a.run(ctx, nil, "gem", "sources", "--list")
	if err != nil {
		return Upstream{}, err
	}
	u := Upstream{Found: "gem sources"}
	for line := range strings.Lines(out) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "***") {
			u.add(line)
		}
	}
	return u, nil
}
