package forward

import (
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/policy"
)

// Repositories are allowed and denied by the paths of requests, so that those must be seen: plain HTTP never opens one, and
// TLS to their hosts does not pass without inspection.

// onlyRepos tells whether a target is allowed for nothing but clones of some repositories.
func onlyRepos(s *roster.Sandbox, t Target) bool {
	if t.Name == "" || !s.Repos(t.String()) {
		return false
	}
	v := s.Judge(t.question())
	return !v.Allow && v.Rule == policy.RuleDefault
}

// unseen is why TLS to a target may not pass without inspection.
func unseen(s *roster.Sandbox, t Target) error {
	switch entry := s.DeniedRepo(t.Name); {
	case onlyRepos(s, t):
		return mismatch("service git:"+t.Name, "only some repositories of %s are allowed, which TLS hides: they need inspect_tls", t.Name)
	case entry != "":
		return mismatch(policy.RuleDeny+" "+entry, "%s is denied, and TLS to %s would hide it: it needs inspect_tls", entry, t.Name)
	}
	return nil
}

// clone gives the question that a request to a host of which only repositories are allowed is judged by; false: it is no
// part of a clone.
func (e *exchange) clone(r *http.Request) (policy.Question, bool) {
	path, ok := cloned(r)
	return policy.Question{Service: "git:" + e.target.String() + "/" + path}, ok && e.scheme == "https"
}

// plain are the paths that no two servers read in different ways.
var plain = regexp.MustCompile(`^(/[A-Za-z0-9._~@+-]+)+$`)

// file are those of a repository that a server without a program for git gives away.
var file = regexp.MustCompile(`^(.+)/(HEAD|objects/([0-9a-f]{2}/[0-9a-f]{38,62}|pack/pack-[0-9a-f]+\.(pack|idx|rev)|info/(packs|alternates|http-alternates)))$`)

// cloned gives the path of the repository that a request clones or fetches; false: it does something else.
func cloned(r *http.Request) (string, bool) {
	path := r.URL.EscapedPath()
	if !plain.MatchString(path) || slices.ContainsFunc(strings.Split(path, "/"), func(s string) bool { return s == "." || s == ".." }) {
		return "", false
	}
	path = path[1:]
	read := r.Method == http.MethodGet || r.Method == http.MethodHead
	if repo, ok := strings.CutSuffix(path, "/info/refs"); ok {
		return repo, read && (r.URL.RawQuery == "" || r.URL.RawQuery == "service=git-upload-pack")
	}
	if repo, ok := strings.CutSuffix(path, "/git-upload-pack"); ok {
		return repo, r.Method == http.MethodPost
	}
	if m := file.FindStringSubmatch(path); m != nil {
		return m[1], read
	}
	return "", false
}

// repo tells whether what a request is for exists, as far as repositories of its host are denied.
func (e *exchange) repo(r *http.Request) policy.Verdict {
	box := e.flow.Sandbox()
	path := strings.TrimPrefix(r.URL.EscapedPath(), "/")
	if path == "" || box.DeniedRepo(e.target.Name) == "" {
		return policy.Verdict{Allow: true}
	}
	v := box.World().Repo(e.target.Name, path)
	if v.Allow && e.target.Port != 443 {
		v = box.World().Repo(e.target.String(), path) // of entries that name the port
	}
	return v
}
