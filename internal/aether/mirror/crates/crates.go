// Package crates serves Rust crates by the sparse protocol of Cargo's registries: config.json and the index files below
// /index/, the crates below /crates/.
//
// A version exists for a caller if its line in the index has a pubtime that is not after the world's date, or none and
// the version is pinned. Lines of other versions are left out, and their crates refused by the same line. Crates are
// checked against the SHA-256 of their line. Search and everything else of a registry's web interface is not there.
package crates

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	maxIndex = 64 << 20  // one index file
	maxCrate = 512 << 20 // one crate

	freshIndex  = 5 * time.Minute
	freshConfig = time.Hour

	memory = 64 << 20 // of index files that are kept parsed
)

// Service is the registry. It is safe for concurrent use.
type Service struct {
	src       source.Source
	bases     []string // of sparse indexes
	downloads []string // where crates lie, as far as the operator says
	parsed    *cache.Memo[[]release]
}

// New makes the service of an upstream.
func New(src source.Source, u upstream.Upstream) *Service {
	return &Service{src: src, bases: u.URLs, downloads: u.Files, parsed: cache.NewMemo[[]release](memory)}
}

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.Crates }

// Hosts implements mirror.Service.
func (s *Service) Hosts() []string {
	return upstream.Upstream{URLs: s.bases, Files: s.downloads}.Hosts()
}

// Match implements mirror.Service.
func (s *Service) Match(_, host, path string) (string, bool) {
	if rest, ok := source.Below(s.downloads, host, path); ok {
		if name, version, ok := parseDownload(rest); ok {
			return downloadPath(name, version), true
		}
	}
	if rest, ok := source.Below(s.bases, host, path); ok {
		return "/index" + rest, true
	}
	return "", false
}

// ServeHTTP implements mirror.Service.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if mirror.ReadOnly(w, r) {
		return
	}
	c := mirror.CallerOf(r.Context())
	if file, ok := strings.CutPrefix(r.URL.Path, "/index/"); ok {
		if file == "config.json" {
			s.serveConfig(w, r, c)
			return
		}
		s.serveIndex(w, r, c, file)
		return
	}
	if rest, ok := strings.CutPrefix(r.URL.Path, "/crates"); ok {
		if name, version, ok := parseDownload(rest); ok {
			s.serveCrate(w, r, c, name, version)
			return
		}
	}
	c.Report(mirror.Artefact{Kind: "metadata", Name: r.URL.Path, Error: "not served"})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusNotFound)
	// What cargo shows of a registry's refusal.
	_, _ = w.Write([]byte(`{"errors":[{"detail":"this mirror has the index and the crates, but no search and nothing else of a registry's web interface"}]}` + "\n"))
}

// parseDownload reads "/NAME/VERSION/download".
func parseDownload(path string) (name, version string, ok bool) {
	parts := strings.Split(path, "/")
	if len(parts) != 4 || parts[0] != "" || parts[3] != "download" || !isName(parts[1]) || !isVersion(parts[2]) {
		return "", "", false
	}
	return parts[1], parts[2], true
}

func downloadPath(name, version string) string {
	return "/crates/" + name + "/" + version + "/download"
}

// serveConfig tells Cargo where the crates are: here.
func (s *Service) serveConfig(w http.ResponseWriter, r *http.Request, c *mirror.Caller) {
	a := mirror.Artefact{Kind: "metadata", Name: "config.json"}
	body, err := json.Marshal(registry{Download: c.Base + "/crates", API: c.Base})
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	mirror.SendBytes(w, r, c, a, "application/json", body, cache.FromCache)
}

// index reads the index file of a crate, and tells which index has it.
func (s *Service) index(ctx context.Context, name string) ([]release, cache.Source, string, error) {
	o, from, base, err := s.src.OpenFirst(ctx, s.bases, "/"+indexPath(name), cache.Options{Fresh: freshIndex, MaxBytes: maxIndex})
	if err != nil {
		return nil, from, base, err
	}
	defer func() { _ = o.Close() }()
	all, err := s.parsed.Of(ctx, o, func(b []byte, _ cache.Meta) ([]release, error) {
		all, err := parseIndex(b, name)
		if err != nil {
			return nil, errdefs.New(errdefs.DataLoss, "crate "+name, "%v", err).WithHint("Upstream's index is wrong; try again later")
		}
		return all, nil
	})
	return all, from, base, err
}

// serveIndex answers with the lines of the versions that the caller's world has.
func (s *Service) serveIndex(w http.ResponseWriter, r *http.Request, c *mirror.Caller, file string) {
	name := file[strings.LastIndexByte(file, '/')+1:]
	a := mirror.Artefact{Kind: "list", Name: name}
	if !isName(name) || indexPath(name) != file {
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "index", "has no file %q", file))
		return
	}
	if v := c.World.Package(policy.Crates, name); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	all, from, _, err := s.index(r.Context(), name)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	var body bytes.Buffer
	hidden := policy.Verdict{Allow: true}
	for _, rel := range all {
		v := c.World.Version(policy.Crates, rel.Name, rel.Version, rel.At)
		if !v.Allow {
			hidden = v
			continue
		}
		body.Write(rel.line)
		body.WriteByte('\n')
	}
	if body.Len() == 0 && !hidden.Allow {
		mirror.Deny(w, c, a, hidden)
		return
	}
	a.Rule = hidden.Rule
	if source.Unchanged(w, r, body.Bytes()) {
		a.Source = string(from)
		c.Report(a)
		return
	}
	mirror.SendBytes(w, r, c, a, "text/plain; charset=utf-8", body.Bytes(), from)
}

// serveCrate answers with the crate of a version that the caller's world has.
func (s *Service) serveCrate(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name, version string) {
	ctx := r.Context()
	a := mirror.Artefact{Kind: "file", Name: name, Version: version}
	if v := c.World.Package(policy.Crates, name); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	all, _, base, err := s.index(ctx, name)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	var rel *release
	for i := range all {
		if all[i].Version == version {
			rel = &all[i]
		}
	}
	if rel == nil {
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "crate "+name, "has no version %s in the index", version))
		return
	}
	a.Name = rel.Name
	if v := c.World.Version(policy.Crates, rel.Name, rel.Version, rel.At); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	b, _, _, err := s.src.Read(ctx, base+"/config.json", cache.Options{Fresh: freshConfig, MaxBytes: maxIndex})
	var reg registry
	if err == nil {
		reg, err = parseRegistry(b)
	}
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	o, from, err := s.src.Open(ctx, reg.crateURL(*rel), cache.Options{
		Digests: []cache.Digest{cache.SHA256(rel.Sum)}, MaxBytes: maxCrate,
	})
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer func() { _ = o.Close() }()
	mirror.SendObject(w, r, c, a, o, from)
}
