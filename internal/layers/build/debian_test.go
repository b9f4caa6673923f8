package build

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// needDebian gives a suite that this machine has sources for.
func needDebian(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	needRoot(t)
	for _, tool := range []string{"mmdebstrap", "apt-get", "apt-config", "dpkg"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs %s", tool)
		}
	}
	arch := strings.TrimSpace(string(run(t, "dpkg", "--print-architecture")))
	all, err := machineSources(t.Context(), arch)
	must(t, err)
	suites := suitesOf(all)
	if len(suites) == 0 {
		t.Skip("this machine's apt has no source of a Debian suite")
	}
	return suites[0]
}

func TestDebianImport(t *testing.T) {
	suite := needDebian(t)
	b, store := testBuilder(t, Limits{})
	begun := time.Now()
	var stages []string
	var last time.Time
	res, err := b.Debian(t.Context(), DebianOptions{
		Suite: suite, Include: []string{"python3", "git", "git"},
		Report: func(p Progress) {
			if p.Finished {
				stages = append(stages, p.Stage)
				t.Logf("%6.1f s %+v", time.Since(begun).Seconds(), p)
			}
			if gap := time.Since(last); !last.IsZero() && gap > 3*time.Second {
				t.Errorf("no report for %s", gap)
			}
			last = time.Now()
		},
	})
	if errors.Is(err, errdefs.Unavailable) {
		t.Skipf("the mirror is not reached: %v", err)
	}
	must(t, err)
	name := "debian:" + suite + "+git,python3"
	if res.Name != name || len(res.Layers) != 1 || res.Layers[0].Source != name || res.Packages == "" || len(res.Notes) != 0 {
		t.Errorf("result %+v", res)
	}
	if want := []string{"resolve", "download", "unpack", "write"}; !slices.Equal(stages, want) {
		t.Errorf("stages %q, want %q", stages, want)
	}
	m, err := ReadManifest(t.Context(), store, res.Layers[0].Digest)
	must(t, err)
	t.Logf("%.1f s, %d MiB of content, %d files, data %d MiB, metadata %d KiB", time.Since(begun).Seconds(), m.Bytes>>20,
		m.Files, m.DataBytes>>20, m.MetaBytes>>10)
	noWork(t, b)

	root := mountLayer(t, store, res.Layers[0].Digest)
	tree := survey(t, root)
	for _, absent := range []string{"etc/resolv.conf", "etc/hostname", "etc/machine-id", "var/lib/dbus/machine-id"} {
		if f, ok := tree[absent]; ok {
			t.Errorf("%s tells of this machine: %+v", absent, f)
		}
	}
	for path, f := range tree {
		if f.UID > 65535 || f.GID > 65535 {
			t.Errorf("%s belongs to %d:%d", path, f.UID, f.GID)
		}
		if strings.HasSuffix(path, ".deb") || strings.HasPrefix(path, "var/lib/apt/lists/") && f.Size > 0 {
			t.Errorf("%s (%d bytes) should not be in an image", path, f.Size)
		}
	}
	if f := tree["usr/bin/passwd"]; f.Mode != "104755" || f.UID != 0 {
		t.Errorf("passwd is %+v, want set-user-id root", f)
	}
	if _, ok := tree["etc/dpkg/dpkg.cfg.d/99mmdebstrap"]; ok {
		t.Error("dpkg is left with an option of the import")
	}
	if f := tree["usr/bin/git"]; f.Mode != "100755" {
		t.Errorf("git is %+v", f)
	}
	// What is in it runs, as nobody and with nothing but the layer.
	cmd := exec.CommandContext(t.Context(), "/usr/bin/python3", "-c", "import json, ssl; print(6*7)")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:     strings.Replace(root, "self", fmt.Sprint(os.Getpid()), 1),
		Credential: &syscall.Credential{Uid: 65534, Gid: 65534},
	}
	if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "42" {
		t.Errorf("python3: %v: %s", err, out)
	}

	t.Run("an equal import is answered from the catalogue", func(t *testing.T) {
		asked := 0
		known := func(_ context.Context, n, packages string) (Result, bool, error) {
			asked++
			return res, n == name && (packages == "" || packages == res.Packages), nil
		}
		got, err := b.Debian(t.Context(), DebianOptions{Suite: suite, Include: []string{"git", "python3"}, Known: known})
		must(t, err)
		if !got.Existed || asked != 1 {
			t.Errorf("existed %t after %d look-ups", got.Existed, asked)
		}
		got, err = b.Debian(t.Context(), DebianOptions{Suite: suite, Include: []string{"git", "python3"}, Refresh: true, Known: known})
		must(t, err)
		if !got.Existed || asked != 2 {
			t.Errorf("refreshed: existed %t after %d look-ups", got.Existed, asked)
		}
	})
	t.Run("a second import downloads nothing and leaves nothing when it is cancelled", func(t *testing.T) {
		gone := errors.New("gone away")
		ctx, cancel := context.WithCancelCause(t.Context())
		_, err := b.Debian(ctx, DebianOptions{Suite: suite, Include: []string{"git"}, Report: func(p Progress) {
			if p.Stage == "download" && p.Total != 0 {
				t.Errorf("downloads %d bytes", p.Total)
			}
			if p.Stage == "unpack" {
				cancel(gone)
			}
		}})
		if !errors.Is(err, gone) {
			t.Errorf("got %v, want %v", err, gone)
		}
		noWork(t, b)
	})
	t.Run("an unknown package is refused with what resembles it", func(t *testing.T) {
		_, err := b.Debian(t.Context(), DebianOptions{Suite: suite, Include: []string{"pyton3", "git"}})
		e, ok := errors.AsType[*errdefs.Error](err)
		if want := "debian:" + suite + ": no package pyton3. Did you mean python3? Nothing imported"; !ok ||
			e.Kind != errdefs.NotFound || e.Error() != want || !slices.Equal(e.Near, []string{"python3"}) {
			t.Errorf("got %v, want %s", err, want)
		}
		_, err = b.Debian(t.Context(), DebianOptions{Suite: suite, Include: []string{"mail-transport-agent"}})
		if !errors.Is(err, errdefs.NotFound) {
			t.Errorf("a virtual package: %v", err)
		}
	})
}

// noWork checks that no work directory is left.
func noWork(t *testing.T, b *Builder) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(b.dir, "tmp", "*"))
	must(t, err)
	if len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if temps, err := filepath.Glob(filepath.Join(b.dir, "blobs", "sha256", ".*")); err != nil || len(temps) != 0 {
		t.Errorf("left behind: %v, %v", temps, err)
	}
}

func TestDebianRefusesWhatCannotBe(t *testing.T) {
	b, _ := testBuilder(t, Limits{})
	for _, tc := range []struct {
		name string
		opts DebianOptions
		kind errdefs.Kind
	}{
		{"no suite", DebianOptions{}, errdefs.Invalid},
		{"a suite that is an option", DebianOptions{Suite: "--help"}, errdefs.Invalid},
		{"a suite that is a path", DebianOptions{Suite: "../x"}, errdefs.Invalid},
		{"a package that is an option", DebianOptions{Suite: "bookworm", Include: []string{"-o=x"}}, errdefs.Invalid},
		{"a package that is a pattern", DebianOptions{Suite: "bookworm", Include: []string{"?essential"}}, errdefs.Invalid},
		{"a package that is a file", DebianOptions{Suite: "bookworm", Include: []string{"./x.deb"}}, errdefs.Invalid},
		{"a package that removes", DebianOptions{Suite: "bookworm", Include: []string{"apt-"}}, errdefs.Invalid},
		{"too many packages", DebianOptions{Suite: "bookworm", Include: make([]string, 501)}, errdefs.Invalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := b.Debian(t.Context(), tc.opts); !errors.Is(err, tc.kind) {
				t.Errorf("got %v, want kind %s", err, tc.kind)
			}
		})
	}
}

func TestASuiteWithoutSourceSaysWhatThereIs(t *testing.T) {
	needRoot(t)
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		t.Skip("needs mmdebstrap")
	}
	b, _ := testBuilder(t, Limits{})
	_, err := b.Debian(t.Context(), DebianOptions{Suite: "warty"})
	if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(fmt.Sprint(err), "/etc/apt/sources.list.d") {
		t.Errorf("got %v", err)
	}
}

func TestAptSources(t *testing.T) {
	list := `# comment
deb [arch=amd64 signed-by=/usr/share/keyrings/k.gpg] https://mirror.example/debian bookworm main contrib # more
deb http://mirror.example/debian bookworm-updates main
deb-src http://mirror.example/debian bookworm main
deb [arch=arm64] http://arm.example/debian bookworm main
deb cdrom:[Debian 12]/ bookworm main
deb http://flat.example/ ./
deb http://back.example/debian bookworm-backports main
`
	sources := `Types: deb deb-src
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main
 contrib
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://key.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
`
	all := slices.Concat(parseSourcesList(strings.NewReader(list), "amd64"), parseDeb822(strings.NewReader(sources), "amd64"))
	var got []string
	for _, s := range ofSuite(all, "bookworm") {
		got = append(got, s.line())
	}
	want := []string{
		"deb [signed-by=/usr/share/keyrings/k.gpg] https://mirror.example/debian bookworm main contrib",
		"deb http://mirror.example/debian bookworm-updates main",
		"deb [signed-by=/usr/share/keyrings/k.gpg] http://mirror.example/security bookworm-security main contrib",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if got := suitesOf(all); !slices.Equal(got, []string{"bookworm"}) {
		t.Errorf("suites %q", got)
	}
	if got := ofSuite(all, "book"); got != nil {
		t.Errorf("of book: %v", got)
	}
}

func TestNear(t *testing.T) {
	names := map[string]struct{}{}
	for _, n := range []string{"python3", "python2", "git", "gitg", "nginx", "libc6", "zsh"} {
		names[n] = struct{}{}
	}
	for name, want := range map[string]string{
		"pyton3": "python3", "pyhton3": "python3", "gti": "git", "ngnix": "nginx", "python": "python2 python3", "emacs": "", "zzzzz": "",
	} {
		if got := strings.Join(near(name, names), " "); got != want {
			t.Errorf("near %s: %q, want %q", name, got, want)
		}
	}
}
