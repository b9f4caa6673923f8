// Package maven serves Maven repositories in their own layout.
//
// A version exists for a caller if the Last-Modified of its POM is not after the world's date. Where upstream tells no
// Last-Modified, a version is dated by its artifact's metadata, if that was last changed before the world's date: then
// everything in it is older. Else it has no date, and is there only if it is pinned. Snapshots have no date either: they
// change.
//
// maven-metadata.xml lists what the caller's world has, with the checksums of what is served. Other files are checked
// against upstream's checksum beside them. With several repositories, lists are those of all of them and a file is that
// of the first that has it.
package maven

import (
	"context"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
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
	maxText = 16 << 20
	maxFile = 4 << 30
	dates   = 16 // asked for at once by one list

	freshList     = 5 * time.Minute
	freshChecksum = time.Hour
)

// Service is the repository. It is safe for concurrent use.
type Service struct {
	src   source.Source
	bases []string
}

// New makes the service of an upstream.
func New(src source.Source, u upstream.Upstream) *Service { return &Service{src: src, bases: u.URLs} }

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.Maven }

// Hosts implements mirror.Service.
func (s *Service) Hosts() []string { return upstream.Upstream{URLs: s.bases}.Hosts() }

// Match implements mirror.Service.
func (s *Service) Match(_, host, path string) (string, bool) {
	return source.Below(s.bases, host, path)
}

// ServeHTTP implements mirror.Service.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if mirror.ReadOnly(w, r) {
		return
	}
	c := mirror.CallerOf(r.Context())
	p, err := parsePath(r.URL.Path)
	a := mirror.Artefact{Kind: p.kind(), Name: p.name(), Version: p.version}
	if err != nil {
		a.Name = r.URL.Path
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "request", "%v", err))
		return
	}
	if v := c.World.Package(policy.Maven, p.name()); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	if p.version != "" {
		v, err := s.judge(r.Context(), c.World, p)
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		if !v.Allow {
			mirror.Deny(w, c, a, v)
			return
		}
	}
	if p.metadata && p.version == "" {
		s.serveMetadata(w, r, c, a, p)
		return
	}
	s.serveFile(w, r, c, a, p)
}

// kind of artefact for the flow log.
func (p place) kind() string {
	switch {
	case p.metadata:
		return "list"
	case p.checksum != "" || strings.HasSuffix(p.path, ".pom") || strings.HasSuffix(p.path, ".asc"):
		return "metadata"
	}
	return "file"
}

// judge asks the world about a version.
func (s *Service) judge(ctx context.Context, w policy.World, p place) (policy.Verdict, error) {
	var published time.Time
	if !w.AsOf.IsZero() && !isSnapshot(p.version) {
		var err error
		if published, err = s.published(ctx, p); err != nil {
			return policy.Verdict{}, err
		}
		if published.IsZero() {
			if m, _, err := s.metadata(ctx, p.dir()); err == nil && m.Versioning != nil && slices.Contains(m.Versioning.Versions, p.version) {
				published = notAfter(m.updated(), w.AsOf)
			}
		}
	}
	return w.Version(policy.Maven, p.name(), p.version, published), nil
}

// notAfter is a bound on dates, if it decides: a version that is older than a date after the world's may be anything.
func notAfter(bound, asOf time.Time) time.Time {
	if bound.After(asOf) {
		return time.Time{}
	}
	return bound
}

// published is the Last-Modified of a version's POM. Zero: upstream does not say, or has no POM.
func (s *Service) published(ctx context.Context, p place) (time.Time, error) {
	o, _, _, err := s.src.OpenFirst(ctx, s.bases, "/"+p.pom(), cache.Options{MaxBytes: maxText})
	if source.Refused(err) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	defer func() { _ = o.Close() }()
	t, err := http.ParseTime(o.Meta().LastModified)
	if err != nil {
		return time.Time{}, nil
	}
	return t, nil
}

// metadata reads what all repositories have in the maven-metadata.xml of a folder.
func (s *Service) metadata(ctx context.Context, dir string) (*metadata, cache.Source, error) {
	var all *metadata
	var from cache.Source
	var absent error = errdefs.New(errdefs.NotFound, dir, "has no metadata upstream")
	for _, base := range s.bases {
		b, _, src, err := s.src.Read(ctx, base+"/"+dir+"/"+metadataFile, cache.Options{Fresh: freshList, MaxBytes: maxText})
		if cache.IsAbsent(err) {
			if !errors.Is(err, errdefs.NotFound) {
				absent = err
			}
			continue
		}
		if err != nil {
			return nil, src, err
		}
		m, err := parseMetadata(b)
		if err != nil {
			return nil, src, errdefs.New(errdefs.DataLoss, dir, "%v", err).WithHint("Upstream's metadata is wrong; try again later")
		}
		if from = src; all == nil {
			all = m
		} else {
			all.merge(m)
		}
	}
	if all == nil {
		return nil, from, absent
	}
	return all, from, nil
}

// serveMetadata answers with a list of versions or of a group's plugins, or with a checksum of it.
func (s *Service) serveMetadata(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, p place) {
	ctx := r.Context()
	m, from, err := s.metadata(ctx, p.dir())
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	group := p.group + "." + p.artifact // if these are the plugins of a group
	m.Plugins = slices.DeleteFunc(m.Plugins, func(pl plugin) bool {
		return !c.World.Package(policy.Maven, group+":"+pl.Artifact).Allow
	})
	if m.Versioning != nil && c.World.Hides() {
		all := m.Versioning.Versions
		verdicts := map[string]policy.Verdict{}
		judged := make([]policy.Verdict, len(all))
		err := source.Each(ctx, len(all), dates, func(ctx context.Context, i int) error {
			at := p
			at.version = all[i]
			var err error
			judged[i], err = s.judge(ctx, c.World, at)
			return err
		})
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		hidden := policy.Verdict{Allow: true}
		for i, v := range judged {
			if verdicts[all[i]] = v; !v.Allow {
				hidden = v
			}
		}
		m.keep(func(v string) bool { return verdicts[v].Allow }, c.World.AsOf)
		if len(m.Versioning.Versions) == 0 && len(m.Plugins) == 0 && !hidden.Allow {
			mirror.Deny(w, c, a, hidden)
			return
		}
		a.Rule = hidden.Rule
	}
	body, err := m.encode()
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	if p.checksum != "" {
		mirror.SendBytes(w, r, c, a, "text/plain", []byte(checksum(p.checksum, body)), from)
		return
	}
	if source.Unchanged(w, r, body) {
		c.Report(a)
		return
	}
	mirror.SendBytes(w, r, c, a, "text/xml", body, from)
}

// checksum is one of checksums, in hexadecimal.
func checksum(algorithm string, b []byte) string {
	switch algorithm {
	case "md5":
		s := md5.Sum(b)
		return hex.EncodeToString(s[:])
	case "sha1":
		s := sha1.Sum(b)
		return hex.EncodeToString(s[:])
	case "sha256":
		s := sha256.Sum256(b)
		return hex.EncodeToString(s[:])
	}
	s := sha512.Sum512(b)
	return hex.EncodeToString(s[:])
}

// serveFile answers with a file of a version, or with upstream's checksum of it.
func (s *Service) serveFile(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, p place) {
	ctx := r.Context()
	opts := cache.Options{MaxBytes: maxFile}
	if isSnapshot(p.version) {
		opts.Fresh = freshList
	}
	path := "/" + p.path
	if p.metadata && p.checksum != "" {
		// Of a snapshot, whose metadata changes: the checksum is of what is served.
		opts.MaxBytes = maxText
		b, from, _, err := s.src.ReadFirst(ctx, s.bases, path, opts)
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		mirror.SendBytes(w, r, c, a, "text/plain", []byte(checksum(p.checksum, b)), from)
		return
	}
	if p.checksum != "" {
		path += "." + p.checksum
		opts.MaxBytes = maxText
		if opts.Fresh == 0 {
			opts.Fresh = freshChecksum
		}
	} else if !p.metadata && !isSnapshot(p.version) {
		d, err := s.expected(ctx, path)
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		opts.Digests = d
	}
	o, from, _, err := s.src.OpenFirst(ctx, s.bases, path, opts)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer func() { _ = o.Close() }()
	mirror.SendObject(w, r, c, a, o, from)
}

// expected is the checksum that upstream has beside a file: SHA-1, which all repositories have, else MD5, else none.
func (s *Service) expected(ctx context.Context, path string) ([]cache.Digest, error) {
	for _, algorithm := range []string{"sha1", "md5"} {
		b, _, _, err := s.src.ReadFirst(ctx, s.bases, path+"."+algorithm, cache.Options{Fresh: freshChecksum, MaxBytes: 4 << 10})
		if cache.IsAbsent(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if d, ok := parseChecksum(algorithm, b); ok {
			return []cache.Digest{d}, nil
		}
	}
	return nil, nil
}

// parseChecksum finds the digest in a checksum file, which may name the file as well.
func parseChecksum(algorithm string, b []byte) (cache.Digest, bool) {
	for _, word := range strings.Fields(string(b)) {
		d := cache.Digest{Algorithm: algorithm, Hex: strings.ToLower(word)}
		if d.Validate() == nil {
			return d, true
		}
	}
	return cache.Digest{}, false
}
