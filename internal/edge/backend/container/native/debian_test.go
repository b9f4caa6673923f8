package native

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/plan"
)

// debianTar is a root file system of Debian with sudo, libcap2-bin and iputils-ping: SANDSEA_TEST_DEBIAN, or what is
// in the cache. It is made by
//
//	mmdebstrap --mode=unshare --variant=minbase --include=sudo,libcap2-bin,iputils-ping bookworm FILE
func debianTar(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("SANDSEA_TEST_DEBIAN"); path != "" {
		return path
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skip(err)
	}
	path := filepath.Join(cache, "sandsea", "test", "debian-bookworm.tar")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("no root file system of Debian: set SANDSEA_TEST_DEBIAN (%v)", err)
	}
	return path
}

func TestDebianWorksAsOnAMachine(t *testing.T) {
	m := use(t)
	f, err := os.Open(debianTar(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	layer, err := m.layer(f)
	if err != nil {
		t.Fatal(err)
	}
	p := plan.Plan{Layers: []image.Digest{layer}, Hostname: "debian"}
	l := smallLimits
	l.Memory, l.Disk, l.Pids = 512<<20, 512<<20, 512
	b := m.open(t).start(t, p, l)
	for name, c := range map[string]struct{ script, want string }{
		"useradd, su to the user and back by sudo": {
			`echo 127.0.1.1 debian >> /etc/hosts && useradd -m -s /bin/bash worker &&
			 echo 'worker ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/worker &&
			 chmod 440 /etc/sudoers.d/worker && su - worker -c 'id -un; sudo -n id -un'`, "worker\nroot",
		},
		"files that are given away": {
			"touch /srv/f && chown nobody:nogroup /srv/f && stat -c '%U:%G' /srv/f", "nobody:nogroup",
		},
		"dpkg takes a package that is built here": {
			`mkdir -p /tmp/p/DEBIAN /tmp/p/opt && echo hello > /tmp/p/opt/hello &&
			 printf 'Package: hello\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n' \
			   > /tmp/p/DEBIAN/control && dpkg-deb -b /tmp/p /tmp/p.deb >/dev/null && dpkg -i /tmp/p.deb >/dev/null 2>&1 &&
			 cat /opt/hello && dpkg -r hello >/dev/null 2>&1 && test ! -e /opt/hello && echo gone`, "hello\ngone",
		},
		"apt's own user can be become": {
			"su -s /bin/sh _apt -c 'id -un'", "_apt",
		},
		"capabilities of files hold": {
			"getcap /bin/ping; su -s /bin/sh nobody -c 'ping -c 1 -W 2 127.0.0.1 >/dev/null && echo pong'",
			"/bin/ping cap_net_raw=ep\npong",
		},
		"a whole directory of the layer is replaced": {
			"rm -rf /usr/share/doc && mkdir /usr/share/doc && ls -A /usr/share/doc | wc -l", "0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := b.sh(c.script)
			// Debian's merged /usr may name the same file in two ways.
			if strings.ReplaceAll(got, "/usr/bin/ping", "/bin/ping") != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
