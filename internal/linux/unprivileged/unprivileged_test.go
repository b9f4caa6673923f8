package unprivileged_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sandsea/sandsea/internal/linux/unprivileged"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

const nobody = 0x6fffff00

func TestMain(m *testing.M) {
	if at := os.Getenv("SANDSEA_TEST_BECOME"); at != "" {
		if err := become(at); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// become gives the rights up with several threads about, and tries what is no longer possible on each.
func become(secret string) error {
	const threads = 8
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	errs := make(chan error, threads)
	for range threads {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-start
			if _, err := os.ReadFile(secret); !errors.Is(err, fs.ErrPermission) {
				errs <- fmt.Errorf("read root's file: %w", err)
			}
		})
	}
	ready.Wait()
	if err := unprivileged.Become(nobody); err != nil {
		return err
	}
	close(start)
	done.Wait()
	close(errs)
	var all error
	for err := range errs {
		all = errors.Join(all, err)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range tasks {
		// Not dumpable: /proc/self belongs to root, and status is all that can be read.
		status, err := os.ReadFile(filepath.Join("/proc/self/task", t.Name(), "status"))
		if err != nil {
			return err
		}
		for _, want := range []string{
			fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", nobody), fmt.Sprintf("Gid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", nobody),
			"Groups:\t \n", "NoNewPrivs:\t1\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n",
		} {
			if !strings.Contains(string(status), want) {
				all = errors.Join(all, fmt.Errorf("thread %s lacks %q in\n%s", t.Name(), want, status))
			}
		}
	}
	if _, err := os.Open("/proc/self/mem"); !errors.Is(err, fs.ErrPermission) {
		all = errors.Join(all, fmt.Errorf("open own memory: %w", err))
	}
	return all
}

func TestBecome(t *testing.T) {
	require.Root(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "SANDSEA_TEST_BECOME="+secret)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestBecomingRootIsRefused(t *testing.T) {
	if unprivileged.Become(0) == nil {
		t.Error("became root")
	}
}
