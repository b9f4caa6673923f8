package erofs_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	writer "github.com/erofs/go-erofs"

	"github.com/sandsea/sandsea/internal/linux/erofs"
)

// image writes a split image of one file and one device and gives its two files.
func image(t *testing.T, content []byte) (meta, data string) {
	t.Helper()
	dir := t.TempDir()
	meta, data = filepath.Join(dir, "meta,with a comma"), filepath.Join(dir, "data")
	m, err := os.Create(meta)
	if err != nil {
		t.Fatal(err)
	}
	d, err := os.Create(data)
	if err != nil {
		t.Fatal(err)
	}
	w := writer.Create(m, writer.WithDataFile(d))
	f, err := w.Create("/dir/file")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(f.Close(), w.Mknod("/null", syscall.S_IFCHR|0o666, 1<<8|3), w.Close(), m.Close(), d.Close())
	if err != nil {
		t.Fatal(err)
	}
	return meta, data
}

func mount(t *testing.T, meta, data string, opts ...erofs.Option) (string, *os.File) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	f, err := erofs.Mount(meta, data, opts...)
	if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENOTBLK) || errors.Is(err, syscall.EPERM) {
		t.Skipf("this kernel does not mount EROFS from files here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return fmt.Sprintf("/proc/self/fd/%d", f.Fd()), f
}

func TestAMountShowsTheImageAndNothingMore(t *testing.T) {
	content := bytes.Repeat([]byte("content "), 100_000)
	for name, opts := range map[string][]erofs.Option{"buffered": nil, "direct": {erofs.DirectIO()}} {
		t.Run(name, func(t *testing.T) {
			meta, data := image(t, content)
			root, f := mount(t, meta, data, opts...)
			got, err := os.ReadFile(root + "/dir/file")
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if _, err := os.Open(root + "/null"); !errors.Is(err, syscall.EACCES) {
				t.Errorf("a device opens: %v", err)
			}
			if err := os.WriteFile(root+"/new", nil, 0o600); !errors.Is(err, syscall.EROFS) {
				t.Errorf("a write: %v", err)
			}
			// Detached: the process's mount table does not show it, and it goes with its descriptor.
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(mounts), " erofs ") && strings.Contains(string(mounts), filepath.Base(filepath.Dir(meta))) {
				t.Error("the mount is attached")
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(root + "/dir"); err == nil {
				t.Error("the mount outlives its descriptor")
			}
		})
	}
}

func TestWhatIsNoImageIsRefusedByName(t *testing.T) {
	meta, data := image(t, []byte("x"))
	mount(t, meta, data)
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, files := range map[string][2]string{
		"garbage": {garbage, data}, "no metadata": {meta + "-none", data}, "no data": {meta, data + "-none"}, "a directory": {filepath.Dir(meta), data},
	} {
		f, err := erofs.Mount(files[0], files[1])
		if err == nil {
			_ = f.Close()
			t.Errorf("%s: mounted", name)
			continue
		}
		if !strings.Contains(err.Error(), files[0]) {
			t.Errorf("%s: %v does not name the image", name, err)
		}
	}
}
