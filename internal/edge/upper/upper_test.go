package upper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/btrfs"
	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/loop"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const base = 1 << 20

// patience bounds every wait of a test: what was freed counts from the next checkpoint on, and a disk may be busy.
const patience = 40 * time.Second

func testConfig(dir string) Config { return Config{Dir: dir, Pool: 8, ImageBytes: 1 << 30} }

// openStore opens a store in dir and destroys it when the test ends.
func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	require.Root(t)
	cfg := testConfig(dir)
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	s, err := Open(context.Background(), cfg)
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Feature == node.FeatureDisk {
		require.That(t, "limit.disk", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Destroy(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newStore(t testing.TB) *Store {
	t.Helper()
	dir := t.TempDir()
	leak.Check(t, dir)
	return openStore(t, dir)
}

func take(t testing.TB, s *Store, id string, bytes int64) *Upper {
	t.Helper()
	u, err := s.Take(t.Context(), id, bytes, base)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	return u
}

// overlay mounts u over an empty directory, as a sandbox has it, and gives the root of it.
func overlay(t testing.TB, u *Upper) *os.File {
	t.Helper()
	lower, err := mount.New("tmpfs", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lower.Close()
	m, err := mount.New("overlay", 0, mount.File("lowerdir+", lower), mount.File("upperdir", u.Dir),
		mount.File("workdir", u.Work), mount.Flag("userxattr"))
	if err != nil {
		require.That(t, "layers", err)
	}
	defer m.Close()
	root, err := dirfd.Open(m, ".")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// write puts so many bytes into a new file and gives what was written and the first error.
func write(dir *os.File, name string, bytes int64) (int64, error) {
	f, err := dirfd.CreateFile(dir, name, 0o644)
	if err != nil {
		return 0, err
	}
	r := io.LimitReader(rand.NewChaCha8([32]byte{1}), bytes)
	n, err := io.Copy(f, r)
	return n, errors.Join(err, f.Sync(), f.Close())
}

func TestTheLimitIsSeenThroughAnOverlay(t *testing.T) {
	s := newStore(t)
	const limit = 20 << 20
	root := overlay(t, take(t, s, "sfull", limit))
	n, err := write(root, "big", 64<<20)
	if !errors.Is(err, syscall.EDQUOT) {
		t.Fatalf("wrote %d bytes, then %v, want EDQUOT", n, err)
	}
	if n > limit || n < limit/2 {
		t.Errorf("wrote %d bytes with a limit of %d", n, limit)
	}
	used, err := s.Usage("sfull")
	if err != nil || used > limit || used < n*8/10 {
		t.Errorf("usage %d, %v; wrote %d", used, err, n)
	}
	t.Run("another sandbox does not notice", func(t *testing.T) {
		other := overlay(t, take(t, s, "sother", limit))
		if _, err := write(other, "some", 8<<20); err != nil {
			t.Error(err)
		}
	})
	t.Run("who deletes may write again", func(t *testing.T) {
		if err := syscall.Unlinkat(int(root.Fd()), "big"); err != nil {
			t.Fatal(err)
		}
		// The kernel counts what was freed when it writes its next checkpoint at the latest.
		wait.Until(t, patience, func() bool {
			n, err = write(root, fmt.Sprintf("again-%d", time.Now().UnixNano()), 4<<20)
			return err == nil
		}, "room again")
	})
	t.Run("a raised limit counts at once", func(t *testing.T) {
		if err := s.Update("sfull", 64<<20, base); err != nil {
			t.Fatal(err)
		}
		if _, err := write(root, "more", 24<<20); err != nil {
			t.Error(err)
		}
	})
}

func TestAFullSandboxCanBeRemoved(t *testing.T) {
	s := newStore(t)
	const limit = 16 << 20
	u := take(t, s, "sfull", limit)
	root := overlay(t, u)
	if _, err := write(root, "big", 32<<20); !errors.Is(err, syscall.EDQUOT) {
		t.Fatal(err)
	}
	// Full of names too.
	for i := range 100_000 {
		f, err := dirfd.CreateFile(root, fmt.Sprintf("name-%d", i), 0o600)
		if err != nil {
			break
		}
		f.Close()
	}
	root.Close()
	u.Close()
	if err := s.Release("sfull"); err != nil {
		t.Fatal(err)
	}
	if err := s.Release("sfull"); err != nil {
		t.Errorf("again: %v", err)
	}
	if names, err := s.Names(); err != nil || len(names) > 0 {
		t.Errorf("names %v, %v", names, err)
	}
	if _, err := s.Usage("sfull"); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("usage of what is gone: %v", err)
	}
	wait.Until(t, patience, func() bool {
		names, err := dirfd.Names(s.trash)
		return err == nil && len(names) == 0
	}, "an empty trash")
}

func TestALayerThatIsTaken(t *testing.T) {
	s := newStore(t)
	u := take(t, s, "sone", 32<<20)
	t.Run("belongs to the sandbox's root, and is open to all", func(t *testing.T) {
		vol, err := s.open("sone")
		if err != nil {
			t.Fatal(err)
		}
		defer vol.Close()
		upper, err := dirfd.Open(vol, upperName)
		if err != nil {
			t.Fatal(err)
		}
		defer upper.Close()
		st, err := upper.Stat()
		if err != nil {
			t.Fatal(err)
		}
		sys := st.Sys().(*syscall.Stat_t)
		if sys.Uid != base || sys.Gid != base || st.Mode().Perm() != 0o755 {
			t.Errorf("uid %d gid %d mode %v", sys.Uid, sys.Gid, st.Mode())
		}
		if names, err := dirfd.Names(upper); err != nil || len(names) > 0 {
			t.Errorf("not empty: %v, %v", names, err)
		}
	})
	t.Run("is not given twice, and the first keeps it", func(t *testing.T) {
		if _, err := s.Take(t.Context(), "sone", 32<<20, base); !errors.Is(err, errdefs.AlreadyExists) {
			t.Errorf("got %v", err)
		}
		if names, err := s.Names(); err != nil || !slices.Equal(names, []string{"sone"}) {
			t.Errorf("names %v, %v", names, err)
		}
		overlay(t, u)
	})
	t.Run("is found by its name", func(t *testing.T) {
		again, err := s.Find("sone")
		if err != nil {
			t.Fatal(err)
		}
		again.Close()
		if _, err := s.Find("snever"); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("without a limit, or with a name that is a path, is refused", func(t *testing.T) {
		for _, c := range []struct {
			id    string
			bytes int64
			uid   uint32
		}{{"sx", 0, base}, {"../x", 1 << 20, base}, {"", 1 << 20, base}, {"sx", 1 << 20, 1<<32 - 2}} {
			if _, err := s.Take(t.Context(), c.id, c.bytes, c.uid); !errors.Is(err, errdefs.Invalid) {
				t.Errorf("%+v: %v", c, err)
			}
		}
	})
}

// volumeOf names the volume of a sandbox's layer, for as long as there is one.
func volumeOf(t *testing.T, s *Store, id string) uint64 {
	t.Helper()
	vol, err := s.open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer vol.Close()
	n, err := btrfs.ID(vol)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// retake gives everything that is ready and tells under which of their names the volume is back; empty: it is not.
func retake(t *testing.T, s *Store, volume uint64) (id string) {
	t.Helper()
	wait.Until(t, patience, func() bool {
		names, err := dirfd.Names(s.trash)
		return err == nil && len(names) == 0
	}, "an empty trash")
	for i := range cap(s.ready) + 1 {
		next := fmt.Sprintf("snext%d", i)
		take(t, s, next, 20<<20)
		if volumeOf(t, s, next) == volume {
			id = next
		}
	}
	return id
}

func TestAVolumeThatHeldNextToNothingIsUsedAgainAndIsAsNew(t *testing.T) {
	s := newStore(t)
	if _, ok := s.v.(*subvolumes); !ok {
		t.Skip("volumes here are as cheap to make as to renew: " + s.Mechanism())
	}
	u, err := s.Take(t.Context(), "sold", 64<<20, base+idRange)
	if err != nil {
		t.Fatal(err)
	}
	volume := volumeOf(t, s, "sold")
	root := overlay(t, u)
	if _, err := write(root, "left", 4<<10); err != nil {
		t.Fatal(err)
	}
	vol, err := s.open("sold")
	if err != nil {
		t.Fatal(err)
	}
	defer vol.Close()
	old, err := dirfd.Open(vol, upperName)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := old.Chmod(0o777); err != nil {
		t.Fatal(err)
	}
	u.Close()
	if err := s.Release("sold"); err != nil {
		t.Fatal(err)
	}
	id := retake(t, s, volume)
	if id == "" {
		t.Fatal("it was not used again")
	}
	if _, err := dirfd.CreateFile(old, "ghost", 0o600); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("who holds the old layer writes to it: %v", err)
	}
	again, err := s.open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	upper, err := dirfd.Open(again, upperName)
	if err != nil {
		t.Fatal(err)
	}
	defer upper.Close()
	st, err := upper.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if sys := st.Sys().(*syscall.Stat_t); sys.Uid != base || st.Mode().Perm() != 0o755 {
		t.Errorf("uid %d mode %v", sys.Uid, st.Mode())
	}
	if names, err := dirfd.Names(upper); err != nil || len(names) > 0 {
		t.Errorf("not empty: %v, %v", names, err)
	}
	found, err := s.Find(id)
	if err != nil {
		t.Fatal(err)
	}
	defer found.Close()
	if n, err := write(overlay(t, found), "big", 64<<20); !errors.Is(err, syscall.EDQUOT) || n < 10<<20 {
		t.Errorf("wrote %d of its 20 MiB, then %v", n, err)
	}
}

func TestAVolumeThatHeldMoreIsNotUsedAgain(t *testing.T) {
	for name, fill := range map[string]func(*testing.T, *os.File){
		"bytes": func(t *testing.T, root *os.File) {
			if _, err := write(root, "much", 2<<20); err != nil {
				t.Fatal(err)
			}
		},
		"bytes that the disk has not seen": func(t *testing.T, root *os.File) {
			f, err := dirfd.CreateFile(root, "much", 0o600)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.Write(make([]byte, 2<<20)); err != nil {
				t.Fatal(err)
			}
		},
		"entries": func(t *testing.T, root *os.File) {
			for i := range renewEntries {
				if err := dirfd.Mkdir(root, fmt.Sprint(i), 0o700); err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			if _, ok := s.v.(*subvolumes); !ok {
				t.Skip("volumes here are as cheap to make as to renew: " + s.Mechanism())
			}
			u := take(t, s, "sold", 64<<20)
			volume := volumeOf(t, s, "sold")
			fill(t, overlay(t, u))
			if err := s.Release("sold"); err != nil {
				t.Fatal(err)
			}
			if id := retake(t, s, volume); id != "" {
				t.Errorf("it is back as %s", id)
			}
		})
	}
}

func TestWhatIsNoVolumeDoesNotBecomeOne(t *testing.T) {
	s := newStore(t)
	v, ok := s.v.(*subvolumes)
	if !ok {
		t.Skip("volumes here are directories: " + s.Mechanism())
	}
	if err := dirfd.Mkdir(v.root(), "plain", 0o700); err != nil {
		t.Fatal(err)
	}
	if ok, err := v.renew(v.root(), "plain"); ok || err != nil {
		t.Errorf("a plain directory, which has no limit: %v, %v", ok, err)
	}
}

func TestManyTakeAndReleaseAtOnce(t *testing.T) {
	s := newStore(t)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			id := fmt.Sprintf("s%d", i)
			u, err := s.Take(t.Context(), id, 32<<20, base+uint32(i)*idRange)
			if err != nil {
				t.Error(err)
				return
			}
			u.Close()
			if i%2 == 0 {
				if err := s.Release(id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if names, err := s.Names(); err != nil || len(names) != 20 {
		t.Errorf("%d names, %v", len(names), err)
	}
}

func TestAfterARestartRunningSandboxesGoOn(t *testing.T) {
	dir := t.TempDir()
	leak.Check(t, dir)
	require.Root(t)
	s, err := Open(t.Context(), testConfig(dir))
	if err != nil {
		openStore(t, dir) // skips with the reason
		t.Fatal(err)
	}
	u := take(t, s, "slives", 20<<20)
	root := overlay(t, u)
	if _, err := write(root, "before", 4<<20); err != nil {
		t.Fatal(err)
	}
	u.Close()
	device := deviceOf(t, dir)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := write(root, "between", 2<<20); err != nil {
		t.Errorf("a sandbox noticed that the edge went away: %v", err)
	}

	again := openStore(t, dir)
	if got := deviceOf(t, dir); got != device {
		t.Errorf("device %q became %q", device, got)
	}
	if names, err := again.Names(); err != nil || !slices.Equal(names, []string{"slives"}) {
		t.Errorf("names %v, %v", names, err)
	}
	if used, err := again.Usage("slives"); err != nil || used < 5<<20 {
		t.Errorf("usage %d, %v", used, err)
	}
	if n, err := write(root, "after", 64<<20); !errors.Is(err, syscall.EDQUOT) || n > 14<<20 {
		t.Errorf("wrote %d, then %v, want EDQUOT: the limit counts on", n, err)
	}
	root.Close()
	if err := again.Release("slives"); err != nil {
		t.Fatal(err)
	}
}

// deviceOf is the loop device of the image, "" if the mechanism has none.
func deviceOf(t *testing.T, dir string) string {
	t.Helper()
	image, err := os.Open(filepath.Join(dir, "disk", imageName))
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	dev, err := loop.Find(image)
	if err != nil {
		t.Fatal(err)
	}
	if dev == nil {
		t.Fatal("the image is on no device")
	}
	defer dev.Close()
	return dev.Name()
}

func TestKillLosesNoLayerAndLeavesNone(t *testing.T) {
	dir := t.TempDir()
	openStore(t, dir).Close() // makes the image, or skips
	for round := range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), victimDir+"="+dir)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		took, releasing := map[string]bool{}, map[string]bool{}
		lines := bufio.NewScanner(out)
		for n := 0; n < 20+7*round && lines.Scan(); n++ {
			what, id, _ := strings.Cut(lines.Text(), " ")
			switch what {
			case "took":
				took[id] = true
			case "releasing":
				releasing[id] = true
			default:
				t.Error(lines.Text())
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() { // what was said before the end
			what, id, _ := strings.Cut(lines.Text(), " ")
			if what == "took" {
				took[id] = true
			}
			if what == "releasing" {
				releasing[id] = true
			}
		}
		_ = cmd.Wait()

		s, err := Open(t.Context(), testConfig(dir))
		if err != nil {
			t.Fatal(err)
		}
		names, err := s.Names()
		if err != nil {
			t.Fatal(err)
		}
		for id := range took {
			if !releasing[id] && !slices.Contains(names, id) {
				t.Errorf("round %d: the layer of %s is lost", round, id)
			}
		}
		if len(names) > len(took)+1 { // one more may be taken and not said
			t.Errorf("round %d: %d layers, %d taken", round, len(names), len(took))
		}
		for _, id := range names {
			if err := s.Release(id); err != nil {
				t.Error(err)
			}
		}
		wait.Until(t, patience, func() bool {
			left, err := dirfd.Names(s.trash)
			return err == nil && len(left) == 0
		}, "an empty trash")
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestDestroyLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	leak.Check(t, dir)
	s := openStore(t, dir)
	take(t, s, "sone", 32<<20).Close()
	if err := s.Destroy(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := s.Destroy(); err != nil {
		t.Errorf("again: %v", err)
	}
}

func TestWhereNoWayWorksNothingIsPromised(t *testing.T) {
	require.Root(t)
	dir := t.TempDir()
	leak.Check(t, dir)
	t.Setenv("PATH", "/nonexistent")
	s, err := Open(t.Context(), testConfig(dir))
	if err == nil {
		defer s.Destroy()
		if strings.Contains(s.Mechanism(), "image") {
			t.Fatal("made an image without mkfs.btrfs")
		}
		t.Skipf("this file system has %s", s.Mechanism())
	}
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != errdefs.FailedPrecondition || e.Feature != node.FeatureDisk ||
		!strings.Contains(e.Msg, "btrfs-progs") || !strings.Contains(e.Msg, "project quota") {
		t.Errorf("got %v", err)
	}
	left, err := os.ReadDir(filepath.Join(dir, "disk"))
	if err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestABrokenImageIsAnErrorAndIsKept(t *testing.T) {
	require.Root(t)
	dir := t.TempDir()
	leak.Check(t, dir)
	if err := os.Mkdir(filepath.Join(dir, "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "disk", imageName)
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), testConfig(dir)); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

func BenchmarkTake(b *testing.B) {
	for _, pool := range []int{-1, 256} {
		b.Run(fmt.Sprintf("pool %d", max(pool, 0)), func(b *testing.B) {
			require.Root(b)
			cfg := testConfig(b.TempDir())
			cfg.Pool = pool
			s, err := Open(context.Background(), cfg)
			require.That(b, "limit.disk", err)
			defer s.Destroy()
			wait.For(20*time.Second, func() bool { return len(s.ready) == cap(s.ready) })
			var samples, release []time.Duration
			i := 0
			for b.Loop() {
				id := fmt.Sprintf("s%d", i)
				i++
				begin := time.Now()
				u, err := s.Take(context.Background(), id, 32<<20, base)
				samples = append(samples, time.Since(begin))
				if err != nil {
					b.Fatal(err)
				}
				u.Close()
				begin = time.Now()
				if err := s.Release(id); err != nil {
					b.Fatal(err)
				}
				release = append(release, time.Since(begin))
			}
			for name, s := range map[string][]time.Duration{"take": samples, "release": release} {
				slices.Sort(s)
				b.ReportMetric(float64(s[len(s)/2].Microseconds()), name+"-p50-µs")
				b.ReportMetric(float64(s[len(s)*99/100].Microseconds()), name+"-p99-µs")
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
		})
	}
}

// BenchmarkWrite writes 128 MiB into a volume, with and without the page cache of the image; the second figure counts
// until the bytes are on the disk.
func BenchmarkWrite(b *testing.B) {
	for _, direct := range []bool{false, true} {
		b.Run(fmt.Sprintf("direct %v", direct), func(b *testing.B) {
			require.Root(b)
			disk := b.TempDir()
			v, err := openImage(context.Background(), disk, 2<<30, direct, slog.New(slog.DiscardHandler))
			require.That(b, "limit.disk", err)
			defer v.remove()
			defer v.close()
			const size = 128 << 20
			block := make([]byte, 1<<20)
			_, _ = io.ReadFull(rand.NewChaCha8([32]byte{1}), block)
			var cached, synced time.Duration
			i := 0
			for b.Loop() {
				name := fmt.Sprintf("v%d", i)
				i++
				if err := v.create(v.root(), name); err != nil {
					b.Fatal(err)
				}
				vol, err := dirfd.Open(v.root(), name)
				if err != nil {
					b.Fatal(err)
				}
				f, err := dirfd.CreateFile(vol, "f", 0o600)
				if err != nil {
					b.Fatal(err)
				}
				begin := time.Now()
				for range size / len(block) {
					if _, err := f.Write(block); err != nil {
						b.Fatal(err)
					}
				}
				cached += time.Since(begin)
				if err := f.Sync(); err != nil {
					b.Fatal(err)
				}
				synced += time.Since(begin)
				f.Close()
				vol.Close()
				if err := v.destroy(v.root(), name); err != nil {
					b.Fatal(err)
				}
			}
			n := float64(b.N) * size / (1 << 20)
			b.ReportMetric(n/cached.Seconds(), "MiB/s")
			b.ReportMetric(n/synced.Seconds(), "synced-MiB/s")
		})
	}
}

// hostBtrfs is a directory on a btrfs that is mounted nowhere, under a name that works while root is open.
func hostBtrfs(t *testing.T) (dir string, root *os.File) {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:mkfs.btrfs")
	image := filepath.Join(t.TempDir(), "host")
	leak.Check(t, filepath.Dir(image))
	if err := makeImage(t.Context(), image, 3<<30, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	m, err := mountImage(t.Context(), image, true)
	require.That(t, "btrfs", err)
	t.Cleanup(func() { m.Close() })
	root, err = dirfd.Open(m, ".")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return fmt.Sprintf("/proc/%d/fd/%d/data", os.Getpid(), root.Fd()), root
}

func TestADataDirectoryOnBtrfs(t *testing.T) {
	for _, c := range []struct {
		name   string
		quota  bool
		want   string
		unwant string
	}{
		{"that counts is used as it is", true, "data directory", "image"},
		{"that does not count is left alone: an image lies on it", false, "image", "data directory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, host := hostBtrfs(t)
			if c.quota {
				if _, err := btrfs.EnableQuota(host); err != nil {
					t.Fatal(err)
				}
			}
			s := openStore(t, dir)
			if !strings.Contains(s.Mechanism(), c.want) || strings.Contains(s.Mechanism(), c.unwant) {
				t.Errorf("mechanism %q", s.Mechanism())
			}
			if q, err := btrfs.QuotaOf(host); err != nil || (q != btrfs.QuotaNone) != c.quota {
				t.Errorf("the host counts by %s, %v", q, err)
			}
			u := take(t, s, "sone", 20<<20)
			root := overlay(t, u)
			if n, err := write(root, "big", 64<<20); !errors.Is(err, syscall.EDQUOT) || n > 20<<20 {
				t.Errorf("wrote %d, then %v", n, err)
			}
			root.Close()
			u.Close()
			if err := s.Destroy(); err != nil {
				t.Fatal(err)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}
