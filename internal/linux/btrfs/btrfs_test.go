package btrfs

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/loop"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

// newFS gives the root of a new file system.
func newFS(t *testing.T) *os.File {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:mkfs.btrfs")
	dir := t.TempDir()
	leak.Check(t, dir)
	image, err := os.Create(filepath.Join(dir, "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if err := image.Truncate(512 << 20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.btrfs", "-q", "-m", "single", image.Name()).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dev, err := loop.Attach(image, true)
	require.That(t, "loop", err)
	defer dev.Close()
	m, err := mount.New("btrfs", 0, mount.Value("source", dev.Name()), mount.Value("commit", "1"))
	require.That(t, "btrfs", err)
	t.Cleanup(func() { m.Close() })
	found, err := loop.Find(image)
	if err != nil || found == nil || found.Name() != dev.Name() {
		t.Fatalf("the image is on %v, %v, want %s", found, err, dev.Name())
	}
	found.Close()
	root, err := dirfd.Open(m, ".")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

func write(dir *os.File, name string, n int64) (int64, error) {
	f, err := dirfd.CreateFile(dir, name, 0o600)
	if err != nil {
		return 0, err
	}
	written, err := io.Copy(f, io.LimitReader(rand.NewChaCha8([32]byte{2}), n))
	return written, errors.Join(err, f.Sync(), f.Close())
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		name   string
		enable func(fs *os.File) error
		want   Quota
	}{
		{"full qgroups", func(fs *os.File) error {
			return errors.Join(quotaCtl(fs, quotaEnable), quotaRescanWait(fs))
		}, QuotaFull},
		{"simple quotas", func(fs *os.File) error { return quotaCtl(fs, quotaEnableSimple) }, QuotaSimple},
		{"what the kernel has", func(*os.File) error { return nil }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := newFS(t)
			if is, err := Is(fs); !is || err != nil {
				t.Fatalf("btrfs: %v, %v", is, err)
			}
			if q, err := QuotaOf(fs); q != QuotaNone || err != nil {
				t.Errorf("a new file system has %s, %v", q, err)
			}
			require.That(t, c.name, c.enable(fs))
			for range 2 {
				q, err := EnableQuota(fs)
				if err != nil || q == QuotaNone || c.want != "" && q != c.want {
					t.Fatalf("quota %s, %v, want %s", q, err, c.want)
				}
			}
			if err := Create(fs, "vol"); err != nil {
				t.Fatal(err)
			}
			vol, err := dirfd.Open(fs, "vol")
			if err != nil {
				t.Fatal(err)
			}
			defer vol.Close()
			const limit = 8 << 20
			if err := Limit(vol, limit); err != nil {
				t.Fatal(err)
			}
			n, err := write(vol, "big", 32<<20)
			if !errors.Is(err, unix.EDQUOT) || n > limit || n < limit/2 {
				t.Errorf("wrote %d, then %v, with a limit of %d", n, err, limit)
			}
			if err := unix.Syncfs(int(fs.Fd())); err != nil { // the counts are exact then
				t.Fatal(err)
			}
			if used, err := Usage(vol); err != nil || used > limit || used < limit/2 {
				t.Errorf("usage %d, %v", used, err)
			}
			if err := Limit(vol, 4*limit); err != nil {
				t.Fatal(err)
			}
			if _, err := write(vol, "more", limit); err != nil {
				t.Errorf("with a higher limit: %v", err)
			}
			id, err := ID(vol)
			if err != nil {
				t.Fatal(err)
			}
			vol.Close()
			free, err := dirfd.Free(fs)
			if err != nil {
				t.Fatal(err)
			}
			if err := Destroy(fs, "vol"); err != nil {
				t.Fatal(err)
			}
			wait.Until(t, 20*time.Second, func() bool { return DropCount(fs, id) == nil }, "the count is dropped")
			wait.Until(t, 20*time.Second, func() bool {
				now, err := dirfd.Free(fs)
				return err == nil && now > free
			}, "the space is free")
		})
	}
}

func TestWhatIsNotBtrfs(t *testing.T) {
	dir, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if is, err := Is(dir); is || err != nil {
		t.Errorf("/proc: %v, %v", is, err)
	}
	if err := Create(dir, "x"); err == nil {
		t.Error("made a subvolume in /proc")
	}
	if _, err := QuotaOf(dir); err == nil {
		t.Error("/proc has quotas")
	}
}
