package upper

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/projquota"
)

// books are quotas that only keep what they are told, for file systems that have none.
type books struct {
	mu     sync.Mutex
	marks  map[uint64]uint32           // guarded by mu: project by inode
	limits map[uint32]projquota.Limits // guarded by mu
}

func inode(f *os.File) uint64 {
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		panic(err)
	}
	return st.Ino
}

func (b *books) Set(_ *os.File, project uint32, l projquota.Limits) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limits[project] = l
	return nil
}

func (b *books) Usage(_ *os.File, project uint32) (int64, projquota.Limits, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return 0, b.limits[project], nil
}

func (b *books) Mark(dir *os.File, project uint32) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.marks[inode(dir)] = project
	return nil
}

func (b *books) Project(f *os.File) (uint32, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.marks[inode(f)], nil
}

// limited is what a volume may hold.
func (b *books) limited(t *testing.T, p *projects, place *os.File, name string) int64 {
	t.Helper()
	vol, err := dirfd.Open(place, name)
	if err != nil {
		t.Fatal(err)
	}
	defer vol.Close()
	id, err := p.project(vol)
	if err != nil || id == 0 {
		t.Fatalf("project %d, %v", id, err)
	}
	_, l, err := b.Usage(vol, id)
	if err != nil {
		t.Fatal(err)
	}
	if l.Bytes > 0 && l.Inodes <= 0 {
		t.Errorf("project %d may have %d bytes and any number of files", id, l.Bytes)
	}
	return l.Bytes
}

func openBooks(t *testing.T, disk string, b *books) (p *projects, trash *os.File) {
	t.Helper()
	v, err := openProjects(disk, b)
	if err != nil {
		t.Fatal(err)
	}
	pool, live, trash, err := places(v.root())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pool.Close()
		live.Close()
		trash.Close()
		if err := v.close(); err != nil {
			t.Error(err)
		}
	})
	return v.(*projects), trash
}

func limitOf(t *testing.T, p *projects, place *os.File, name string, bytes int64) {
	t.Helper()
	vol, err := dirfd.Open(place, name)
	if err != nil {
		t.Fatal(err)
	}
	defer vol.Close()
	if err := p.limit(vol, bytes, base); err != nil {
		t.Fatal(err)
	}
}

// The ids of a sandbox that has ended are another's while its layer still waits in the trash.
func TestARemovedLayerTakesNoLimitFromTheNextSandboxWithItsIDs(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			disk := t.TempDir()
			b := &books{marks: map[uint64]uint32{}, limits: map[uint32]projquota.Limits{}}
			p, trash := openBooks(t, disk, b)
			if err := p.create(trash, "old"); err != nil {
				t.Fatal(err)
			}
			limitOf(t, p, trash, "old", 10<<20)
			if restart {
				p, trash = openBooks(t, disk, b)
			}
			live, err := dirfd.Open(p.root(), "live")
			if err != nil {
				t.Fatal(err)
			}
			defer live.Close()
			if err := p.create(live, "new"); err != nil {
				t.Fatal(err)
			}
			limitOf(t, p, live, "new", 20<<20)
			if got := b.limited(t, p, trash, "old"); got != 10<<20 {
				t.Errorf("the old one may hold %d", got)
			}
			if err := p.destroy(trash, "old"); err != nil {
				t.Fatal(err)
			}
			if got := b.limited(t, p, live, "new"); got != 20<<20 {
				t.Errorf("the new one may hold %d", got)
			}
			limitOf(t, p, live, "new", 30<<20) // as Update does
			if got := b.limited(t, p, live, "new"); got != 30<<20 {
				t.Errorf("after a change it may hold %d", got)
			}
			if len(p.used) != 1 {
				t.Errorf("projects in use: %v", p.used)
			}
		})
	}
}

// A sandbox may make its layer as deep as its limit allows.
func TestADeepLayerIsRemovedWithFewDescriptors(t *testing.T) {
	b := &books{marks: map[uint64]uint32{}, limits: map[uint32]projquota.Limits{}}
	p, trash := openBooks(t, t.TempDir(), b)
	if err := p.create(trash, "deep"); err != nil {
		t.Fatal(err)
	}
	limitOf(t, p, trash, "deep", 10<<20)
	deep := filepath.Join(trash.Name(), "deep", upperName, strings.Repeat("d/", 1500))
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 128, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	}()
	if err := p.destroy(trash, "deep"); err != nil {
		t.Fatal(err)
	}
	if left, err := dirfd.Names(trash); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
