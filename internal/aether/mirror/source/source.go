// Package source is how package services read their upstreams: through the cache, by address, the next upstream where
// one knows nothing of it.
//
// A Source is safe for concurrent use and holds nothing of its own.
package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/upstream"
)

// Source of one service.
type Source struct {
	Cache  *cache.Cache
	Client *upstream.Client
}

// Open finds the object of a URL. The caller closes it. Errors are the cache's.
func (s Source) Open(ctx context.Context, url string, opts cache.Options) (*cache.Object, cache.Source, error) {
	return s.Cache.Get(ctx, url, opts, func(ctx context.Context, known cache.Validators) (*http.Response, error) {
		h := http.Header{}
		known.Set(h)
		return s.Client.Get(ctx, url, h)
	})
}

// OpenFirst opens path, which begins with a slash, of the first base that has it, and tells which. Only "there is no such
// thing" leads to the next base: a base that fails might have had it, and its names are not for others to know. Of an
// offline cache, the first base that it has something of answers.
func (s Source) OpenFirst(ctx context.Context, bases []string, path string, opts cache.Options) (o *cache.Object, from cache.Source, base string, err error) {
	err = errdefs.New(errdefs.NotFound, "package service", "has no upstream")
	for _, base = range bases {
		o, from, err = s.Open(ctx, base+path, opts)
		if err == nil || !cache.IsAbsent(err) {
			break
		}
	}
	return o, from, base, err
}

// Read reads the whole object of a URL; opts.MaxBytes bounds it.
func (s Source) Read(ctx context.Context, url string, opts cache.Options) ([]byte, cache.Meta, cache.Source, error) {
	o, from, err := s.Open(ctx, url, opts)
	if err != nil {
		return nil, cache.Meta{}, from, err
	}
	defer func() { _ = o.Close() }()
	b, err := o.Bytes(ctx)
	if err != nil {
		return nil, cache.Meta{}, from, err
	}
	return b, o.Meta(), from, nil
}

// ReadFirst is Read of the first base that has path, as OpenFirst.
func (s Source) ReadFirst(ctx context.Context, bases []string, path string, opts cache.Options) (b []byte, from cache.Source, base string, err error) {
	o, from, base, err := s.OpenFirst(ctx, bases, path, opts)
	if err != nil {
		return nil, from, base, err
	}
	defer func() { _ = o.Close() }()
	b, err = o.Bytes(ctx)
	return b, from, base, err
}

// Refused tells whether upstream answered for good that it has no such object or does not give it: asking again, or
// later, brings nothing else.
func Refused(err error) bool {
	e, ok := errors.AsType[*cache.StatusError](err)
	return ok && e.Status >= 400 && e.Status < 500 && e.Status != http.StatusRequestTimeout && e.Status != http.StatusTooManyRequests
}

// errForgotten fails the fetch by which Forget makes the cache look at an object.
var errForgotten = errdefs.New(errdefs.DataLoss, "object", "was found wrong after it came and is not kept")

// Forget drops the object of a URL whose bytes turned out wrong by more than a digest.
func (s Source) Forget(ctx context.Context, url string) {
	// No bytes hash to nothing but zeros: the cache finds that the object has not the digest that is expected of it.
	wrong := cache.Options{Digests: []cache.Digest{cache.SHA256(strings.Repeat("0", 64))}}
	o, _, err := s.Cache.Get(ctx, url, wrong, func(context.Context, cache.Validators) (*http.Response, error) {
		return nil, errForgotten
	})
	if err == nil {
		_ = o.Close()
	}
}

// Below tells whether a URL of host and path lies below one of the bases: the rest of its path, which begins with a slash.
func Below(bases []string, host, path string) (string, bool) {
	for _, base := range bases {
		u, err := url.Parse(base)
		if err != nil || !strings.EqualFold(u.Hostname(), host) {
			continue
		}
		if rest, ok := strings.CutPrefix(path, strings.TrimSuffix(u.Path, "/")); ok && strings.HasPrefix(rest, "/") {
			return rest, true
		}
	}
	return "", false
}

// Each calls do for the indices of n things, at most limit at a time, until one fails.
func Each(ctx context.Context, n, limit int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(limit)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return do(ctx, i) })
	}
	return g.Wait()
}

// Unchanged gives an answer that was made for its caller an ETag, and answers 304 if the caller has it already. It tells
// whether it did.
func Unchanged(w http.ResponseWriter, r *http.Request, body []byte) bool {
	sum := sha256.Sum256(body)
	tag := `"` + hex.EncodeToString(sum[:]) + `"`
	w.Header().Set("ETag", tag)
	known := strings.Split(r.Header.Get("If-None-Match"), ",")
	if !slices.ContainsFunc(known, func(k string) bool { return strings.TrimPrefix(strings.TrimSpace(k), "W/") == tag }) {
		return false
	}
	w.WriteHeader(http.StatusNotModified)
	return true
}
