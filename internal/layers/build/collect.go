package build

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

// youngFor is how long a layer that was made is kept though nothing names it yet.
const youngFor = time.Hour

// Collect deletes every blob that no layer of keep needs: neither its manifest nor what that names. It returns the
// bytes freed. When a manifest that is there cannot be read, nothing is deleted. The caller makes sure that no layer is
// made meanwhile; Builder.Collect does so itself.
func Collect(ctx context.Context, store blob.Store, keep []image.Digest) (freed int64, err error) {
	reachable := make(map[image.Digest]struct{}, 3*len(keep))
	for _, d := range keep {
		m, err := ReadManifest(ctx, store, d)
		if errors.Is(err, errdefs.NotFound) {
			continue // a lost layer holds nothing back
		}
		if err != nil {
			return 0, fmt.Errorf("collect layers: %w", err)
		}
		for _, x := range []image.Digest{d, m.Meta, m.Data} {
			reachable[x] = struct{}{}
		}
	}
	for d, err := range store.All(ctx) {
		if err != nil {
			return freed, fmt.Errorf("collect layers: %w", err)
		}
		if _, ok := reachable[d]; ok {
			continue
		}
		size, err := store.Stat(ctx, d)
		if errors.Is(err, errdefs.NotFound) {
			continue
		}
		if err == nil {
			err = store.Delete(ctx, d)
		}
		if err != nil {
			return freed, fmt.Errorf("collect layers: %w", err)
		}
		freed += size
	}
	return freed, nil
}

// Collect deletes what neither keep nor a layer of the last hour needs. keep must name every layer of every image in
// the catalogue and every layer in use.
func (b *Builder) Collect(ctx context.Context, keep []image.Digest) (freed int64, err error) {
	b.gc.Lock()
	defer b.gc.Unlock()
	keep = slices.Clone(keep)
	b.mu.Lock()
	for d, at := range b.young {
		if b.now().Sub(at) < youngFor {
			keep = append(keep, d)
		} else {
			delete(b.young, d)
		}
	}
	b.mu.Unlock()
	if freed, err = Collect(ctx, b.store, keep); err != nil {
		return freed, err
	}
	return freed, b.forgetChains(ctx)
}

// Forget lets layers that were just made be collected: their name was refused, or is deleted again.
func (b *Builder) Forget(layers []image.Layer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range layers {
		delete(b.young, l.Digest)
	}
}

// Sweep removes what imports of earlier processes have left in the data directory, and lets the uploads that they took go
// in their time. It must run before the first import.
func (b *Builder) Sweep() error {
	ents, err := os.ReadDir(b.tmp())
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	for _, e := range ents {
		if strings.HasPrefix(e.Name(), "debian-") || strings.HasPrefix(e.Name(), "oci-") {
			err = errors.Join(err, os.RemoveAll(filepath.Join(b.tmp(), e.Name())))
		}
	}
	if err = errors.Join(err, b.uploads.Expire()); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	time.AfterFunc(uploadFor, func() { _ = b.uploads.Expire() })
	return nil
}
