package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// BinaryEnv names a ready binary, which is then not built.
const BinaryEnv = "SANDSEA_BINARY"

// Root is the top directory of the source tree.
var Root = sync.OnceValues(func() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == "/" {
			return "", errors.New("no go.mod in any directory above")
		}
		dir = filepath.Dir(dir)
	}
})

// binary builds sandsea once per test process: into build/test under a lock, since packages are tested at the same time,
// then as a link of this process's own, so that a later build does not change what runs. dir takes the link.
func binary(ctx context.Context, dir string) (string, error) {
	link := filepath.Join(dir, "sandsea")
	if path := os.Getenv(BinaryEnv); path != "" {
		return link, linkOrCopy(path, link)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	out := filepath.Join(root, "build", "test")
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(out, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	built := filepath.Join(out, "sandsea")
	for _, argv := range [][]string{
		{"make", "--no-print-directory", "-C", "init"},
		{"go", "build", "-o", built, "./cmd/sandsea"},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, text)
		}
	}
	return link, linkOrCopy(built, link)
}

func linkOrCopy(from, to string) error {
	if err := os.Link(from, to); err == nil {
		return nil
	}
	// Another file system: a copy does as well.
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755)
}
