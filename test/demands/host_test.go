package demands

import (
	"strings"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// TestTheSandboxFindsItselfByName: sudo, and servers that are asked by name, need no DNS for that.
func TestTheSandboxFindsItselfByName(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for _, name := range []string{"localhost", `"$(hostname)"`} {
		got := run(t, sb, client.Shell(`echo hello | nc -l -p 4321 >/tmp/got &
			until netstat -ltn | grep -q :4321; do usleep 20000; done; echo hi | nc -w 3 `+name+` 4321; wait; cat /tmp/got`))
		if out := string(got.GetStdout()); !strings.Contains(out, "hi\n") {
			t.Errorf("%s: %q, %q", name, out, got.GetStderr())
		}
	}
	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	with := func(name string, f server.File) *client.Sandbox {
		t.Helper()
		all := append(files[:len(files):len(files)], f)
		if _, err := serve(t).Import(within(t, 60*time.Second), name, all, nil); err != nil {
			t.Fatal(err)
		}
		return open(t, func(s *sandseav1.SandboxSpec) { s.Environment.Image = name })
	}
	// What an image says stays, a link is not followed.
	own := with("hosts-own", server.File{Name: "etc/hosts", Body: "10.9.8.7 db"})
	if got := sh(t, own, `sed "s/$(hostname)/NAME/" /etc/hosts`); got != "10.9.8.7 db\n127.0.1.1\tNAME\n" {
		t.Errorf("an image's own file: %q", got)
	}
	if got := sh(t, with("hosts-link", server.File{Name: "etc/hosts", Link: "/srv/none"}), "ls /srv; readlink /etc/hosts"); got != "/srv/none\n" {
		t.Errorf("a link: %q", got)
	}
}
