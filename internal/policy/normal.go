package policy

import (
	"net/url"
	"slices"
	"strings"
)

// gitPrefix begins the name of a repository's service and of its entries in deny lists.
const gitPrefix = "git:"

const maxEntry = 512 // bytes of a name or entry

// normalise gives the one spelling under which a package's name is compared: what the ecosystem takes for the same, and
// where it distinguishes cases also what only differs in them, since a list that hides a package should rather hide a
// neighbour too. "" is no name of a package. Of a file's name it is the package of the file.
//
//	pypi      PEP 503: lower case, each run of "-", "_" and "." is one "-"; "Flask-2.0-py3-none-any.whl" is flask
//	npm       lower case, "%2f" is "/"
//	golang    lower case, "!" of escapes and the major version's suffix dropped; ".git" and gopkg.in's ".vN" dropped
//	crates    lower case, "_" is "-"
//	debian    lower case, ":arch" dropped; "src:NAME" is a source package
//	maven     lower case, "group:artifact"
//	rubygems  lower case; "rack-2.0-java.gem" is rack
func normalise(service, name string) string {
	name, ok := unescape(name)
	if !ok || name == "" || len(name) > maxEntry {
		return ""
	}
	name = strings.ToLower(name)
	switch service {
	case PyPI:
		name = pypiName(name)
	case NPM:
		scope, rest, scoped := strings.Cut(name, "/")
		if scoped && (len(scope) < 2 || scope[0] != '@' || rest == "") || strings.Contains(rest, "/") || strings.LastIndexByte(name, '@') > 0 {
			return ""
		}
	case Golang:
		path, ok := goPath(name)
		if !ok {
			return ""
		}
		name = strings.Join(path, "/")
	case Crates:
		name = strings.ReplaceAll(name, "_", "-")
	case Debian:
		src := strings.HasPrefix(name, "src:")
		name, _, _ = strings.Cut(strings.TrimPrefix(name, "src:"), ":")
		name, _, _ = strings.Cut(name, "_") // of a file
		if name != "" && src {
			name = "src:" + name
		}
	case Maven:
		group, artifact, ok := strings.Cut(name, ":")
		if !ok || group == "" || artifact == "" || strings.Contains(artifact, ":") {
			return ""
		}
	case RubyGems:
		for base, ok := strings.CutSuffix(name, ".gem"); ok; base, ok = strings.CutSuffix(name, ".gem") {
			name = beforeVersion(base, false)
		}
	}
	if strings.ContainsAny(name, " ") || service != NPM && strings.Contains(name, "@") {
		return ""
	}
	if service != Golang && service != NPM && strings.Contains(name, "/") {
		return ""
	}
	return name
}

// unescape undoes "%xx", also of what was escaped twice, and refuses everything but printable ASCII.
func unescape(s string) (string, bool) {
	for range 3 {
		if !strings.Contains(s, "%") {
			break
		}
		u, err := url.PathUnescape(s)
		if err != nil {
			return "", false
		}
		s = u
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' || s[i] == '%' {
			return "", false
		}
	}
	return s, true
}

func pypiName(name string) string {
	for _, ext := range []string{".whl", ".egg"} {
		if base, ok := strings.CutSuffix(name, ext); ok {
			name, _, _ = strings.Cut(base, "-")
		}
	}
	for _, ext := range []string{".tar.gz", ".tar.bz2", ".zip"} {
		if base, ok := strings.CutSuffix(name, ext); ok {
			name = beforeVersion(base, true)
		}
	}
	parts := strings.FieldsFunc(name, func(r rune) bool { return r == '-' || r == '_' || r == '.' })
	return strings.Join(parts, "-")
}

// beforeVersion cuts "-1.0…" off the name of a file, at the last or the first "-" that a digit follows.
func beforeVersion(base string, last bool) string {
	cut := base
	for i := 1; i+1 < len(base); i++ {
		if base[i] == '-' && '0' <= base[i+1] && base[i+1] <= '9' {
			cut = base[:i]
			if !last {
				break
			}
		}
	}
	return cut
}

// segments splits a lower-case path of a host and what lies on it: "/" at the ends and between them, "." and ".git"
// drop out; "..", "\" and the empty path are malformed.
func segments(path string) ([]string, bool) {
	var out []string
	for s := range strings.SplitSeq(path, "/") {
		for strings.HasSuffix(s, ".git") {
			s = strings.TrimSuffix(s, ".git")
		}
		switch s {
		case "", ".":
			continue
		case "..":
			return nil, false
		}
		if strings.ContainsAny(s, "\\ ?#") {
			return nil, false
		}
		out = append(out, s)
	}
	return out, len(out) > 0
}

// repoPath reads "<host>/<path>" of a repository: the host canonical, the path in lower case, since the large hosts make
// no difference of it. A port belongs to the host.
func repoPath(s string) ([]string, bool) {
	s, ok := unescape(s)
	if !ok || len(s) > maxEntry {
		return nil, false
	}
	out, ok := segments(strings.ToLower(s))
	if !ok {
		return nil, false
	}
	host, port, hasPort := strings.Cut(out[0], ":")
	host, ok = hostName(host)
	if !ok || strings.Contains(strings.Join(out[1:], ""), "*") || hasPort && (port == "" || strings.Trim(port, "0123456789") != "") {
		return nil, false
	}
	out[0] = host
	if hasPort && port != "443" {
		out[0] = host + ":" + port
	}
	return out, true
}

// goPath reads a module's path in lower case, escaped or not, without what names its major version.
func goPath(s string) ([]string, bool) {
	out, ok := segments(strings.ReplaceAll(s, "!", ""))
	if !ok {
		return nil, false
	}
	if out[0] != "*" { // of an entry
		if out[0], ok = hostName(out[0]); !ok {
			return nil, false
		}
	}
	for len(out) > 1 && isMajor(out[len(out)-1], "v") {
		out = out[:len(out)-1]
	}
	if out[0] == "gopkg.in" {
		for i, s := range out[1:] {
			s = strings.TrimSuffix(s, "-unstable")
			if at := strings.LastIndexByte(s, '.'); at > 0 && isMajor(s[at:], ".v") {
				out[i+1] = s[:at]
			}
		}
	}
	return out, true
}

// isMajor reports whether s is prefix and a number.
func isMajor(s, prefix string) bool {
	n, ok := strings.CutPrefix(s, prefix)
	return ok && n != "" && strings.Trim(n, "0123456789") == ""
}

// vanity lists well-known module paths that stand for a place elsewhere. "*" is one segment, taken over. What is not
// here is known by what upstream says of a module's origin: the mirror asks Repo with that, too.
var vanity = []struct{ from, to string }{
	{"cloud.google.com/go", "github.com/googleapis/google-cloud-go"},
	{"go.etcd.io/*", "github.com/etcd-io/*"},
	{"go.opentelemetry.io/otel", "github.com/open-telemetry/opentelemetry-go"},
	{"go.uber.org/*", "github.com/uber-go/*"},
	{"golang.org/x/*", "github.com/golang/*"},
	{"google.golang.org/api", "github.com/googleapis/google-api-go-client"},
	{"google.golang.org/genproto", "github.com/googleapis/go-genproto"},
	{"google.golang.org/grpc", "github.com/grpc/grpc-go"},
	{"google.golang.org/protobuf", "github.com/protocolbuffers/protobuf-go"},
	{"honnef.co/go/tools", "github.com/dominikh/go-tools"},
	{"k8s.io/*", "github.com/kubernetes/*"},
	{"sigs.k8s.io/*", "github.com/kubernetes-sigs/*"},
}

// Hosts on which places of github.com are known, too: under the same path, or behind a word of an interface.
var (
	githubHosts      = []string{"www.github.com", "ssh.github.com", "codeload.github.com", "raw.github.com", "raw.githubusercontent.com"}
	githubInterfaces = []string{"api.github.com", "uploads.github.com", "media.githubusercontent.com", "patch-diff.githubusercontent.com"}
)

// standsFor are the hosts that places on a host are known on: itself and those of its aliases.
func standsFor(host string) []string {
	out := []string{host}
	if slices.Contains(githubHosts, host) || slices.Contains(githubInterfaces, host) || host == "gopkg.in" {
		out = append(out, "github.com")
	}
	for _, v := range vanity {
		from, _, _ := strings.Cut(v.from, "/")
		to, _, _ := strings.Cut(v.to, "/")
		if from == host {
			out = append(out, to)
		}
	}
	return out
}

// places are the paths under which a place is known: itself and what it is an alias of. Its hosts are among standsFor.
func places(path []string) [][]string {
	out := [][]string{path}
	add := func(to ...string) { out = append(out, to) }
	host, rest := path[0], path[1:]
	switch {
	case slices.Contains(githubHosts, host):
		add(slices.Concat([]string{"github.com"}, rest)...)
	case slices.Contains(githubInterfaces, host):
		if len(rest) > 1 && slices.Contains([]string{"repos", "networks", "media", "raw"}, rest[0]) {
			add(slices.Concat([]string{"github.com"}, rest[1:])...)
		}
	case host == "gopkg.in":
		if len(rest) == 1 {
			add("github.com", "go-"+rest[0], rest[0])
		} else if len(rest) > 1 {
			// Either gopkg.in/user/name, or a folder of gopkg.in/name: the policy cannot tell, both are meant.
			add(slices.Concat([]string{"github.com"}, rest)...)
			add(slices.Concat([]string{"github.com", "go-" + rest[0]}, rest)...)
		}
	}
	if len(rest) > 3 && rest[0] == "api" && rest[2] == "projects" { // the interface of GitLab: api/v4/projects/…
		add(slices.Concat([]string{host}, rest[3:])...)
	}
	if len(rest) > 3 && rest[0] == "api" && rest[2] == "repos" { // those of GitHub's and Gitea's own servers: api/v3/repos/…
		add(slices.Concat([]string{host}, rest[3:])...)
	}
	for _, v := range vanity {
		from, to := strings.Split(v.from, "/"), strings.Split(v.to, "/")
		if !isBelow(path, from) {
			continue
		}
		if n := len(to) - 1; to[n] == "*" {
			to[n] = path[len(from)-1]
		}
		add(slices.Concat(to, path[len(from):])...)
	}
	return out
}

// isBelow reports whether a path is a place or lies below it; "*" in the place is any one segment.
func isBelow(path, place []string) bool {
	if len(path) < len(place) || len(place) == 0 {
		return false
	}
	for i, s := range place {
		if s != "*" && s != path[i] {
			return false
		}
	}
	return true
}

// normaliseVersion gives the one spelling under which versions are compared: what the ecosystem takes for equal. "" is
// no version.
//
//	pypi      PEP 440: "v1.0.0" is 1, "1.0-RC.1" is 1rc1
//	golang    with its "v", without "+incompatible"
//	npm       without "v", "=" and "+build"
//	crates    without "+build"
//	debian    without epoch
//	rubygems  without the platform, and without zeros at the end
//	maven     as it is
func normaliseVersion(service, v string) string {
	v, ok := unescape(v)
	if v = strings.ToLower(strings.TrimSpace(v)); !ok || strings.Contains(v, " ") {
		return ""
	}
	switch service {
	case PyPI:
		return pypiVersion(v)
	case Golang:
		v = strings.TrimSuffix(strings.ReplaceAll(v, "!", ""), "+incompatible")
		if v != "" && '0' <= v[0] && v[0] <= '9' {
			v = "v" + v
		}
	case NPM:
		v, _, _ = strings.Cut(strings.TrimLeft(v, "v="), "+")
	case Crates:
		v, _, _ = strings.Cut(v, "+")
	case Debian:
		for epoch, rest, ok := strings.Cut(v, ":"); ok && isNumeric(epoch); epoch, rest, ok = strings.Cut(v, ":") {
			v = rest
		}
	case RubyGems:
		v, _, _ = strings.Cut(v, "-")
		for strings.HasSuffix(v, ".0") {
			v = v[:len(v)-2]
		}
	}
	return v
}

// pypiVersion brings a version into the normal form of PEP 440, without zeros at the release's end; what is none stays
// as it is. v is in lower case.
func pypiVersion(v string) string {
	public, local, _ := strings.Cut(strings.TrimPrefix(v, "v"), "+")
	epoch := ""
	if e, rest, ok := strings.Cut(public, "!"); ok {
		if !isNumeric(e) {
			return v
		}
		if epoch, public = trimZeros(e)+"!", rest; epoch == "0!" {
			epoch = ""
		}
	}
	words := versionWords(public)
	var release []string
	for len(words) > 0 && isNumeric(words[0].text) && (len(release) == 0 || words[0].sep == ".") {
		release = append(release, trimZeros(words[0].text))
		words = words[1:]
	}
	if len(release) == 0 {
		return v
	}
	for len(release) > 1 && release[len(release)-1] == "0" {
		release = release[:len(release)-1]
	}
	out := epoch + strings.Join(release, ".")
	for len(words) > 0 {
		kind, n := words[0].text, "0"
		words = words[1:]
		if isNumeric(kind) { // "1.0-1" is a post release
			kind, n = "post", kind
		} else if len(words) > 0 && isNumeric(words[0].text) {
			n, words = words[0].text, words[1:]
		}
		mark, ok := pypiMarks[kind]
		if !ok {
			return v
		}
		out += mark + trimZeros(n)
	}
	if local != "" {
		out += "+" + strings.NewReplacer("-", ".", "_", ".").Replace(local)
	}
	return out
}

var pypiMarks = map[string]string{
	"a": "a", "alpha": "a", "b": "b", "beta": "b", "c": "rc", "rc": "rc", "pre": "rc", "preview": "rc",
	"post": ".post", "rev": ".post", "r": ".post", "dev": ".dev",
}

// word is a run of digits or letters with the separator before it.
type word struct{ sep, text string }

func versionWords(s string) []word {
	var out []word
	kind := func(c byte) int {
		switch {
		case c == '.' || c == '-' || c == '_':
			return 0
		case '0' <= c && c <= '9':
			return 1
		}
		return 2
	}
	sep := ""
	for i := 0; i < len(s); {
		k := kind(s[i])
		j := i + 1
		for j < len(s) && k != 0 && kind(s[j]) == k {
			j++
		}
		if k == 0 {
			sep += s[i:j]
		} else {
			out = append(out, word{sep, s[i:j]})
			sep = ""
		}
		i = j
	}
	return out
}

func isNumeric(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

func trimZeros(n string) string {
	if n = strings.TrimLeft(n, "0"); n == "" {
		return "0"
	}
	return n
}
