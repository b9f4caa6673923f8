package server

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Debian gives the file of a root file system of Debian bookworm with these packages, made by mmdebstrap once on a
// machine and kept in the user's cache. An error says why there is none: no mmdebstrap, or no way to the packages.
func Debian(ctx context.Context, include ...string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "sandsea", "test")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	packages := strings.Join(include, ",")
	path := filepath.Join(dir, fmt.Sprintf("debian-%.8x.tar", sha256.Sum256([]byte(packages))))
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	tool, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return "", err
	}
	out, err := os.Create(path + ".part")
	if err != nil {
		return "", err
	}
	defer out.Close()
	defer os.Remove(out.Name())
	cmd := exec.CommandContext(ctx, tool, "--mode=unshare", "--variant=minbase", "--format=tar", "--include="+packages,
		"bookworm", "-")
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = out, &said
	if err := cmd.Run(); err != nil {
		text := said.String()
		return "", fmt.Errorf("mmdebstrap: %w: %s", err, text[max(0, len(text)-400):])
	}
	return path, os.Rename(out.Name(), path)
}
