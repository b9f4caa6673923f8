package e2e

import (
	"strings"
	"testing"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// TestWhoAUserIsIsSaidByTheSandboxItself: what a node remembers of an image's users serves sandboxes in which nothing has
// run, and no others.
func TestWhoAUserIsIsSaidByTheSandboxItself(t *testing.T) {
	home := func(sb *client.Sandbox) string {
		cmd := client.Shell("echo $HOME")
		cmd.User = "alice"
		return strings.TrimSpace(string(run(t, sb, cmd).GetStdout()))
	}
	first := open(t)
	before := home(first)
	sh(t, first, "sed -i 's,^alice:.*,alice:x:1000:1000::/elsewhere:/bin/sh,' /etc/passwd; "+
		"echo new:x:1234:1235::/tmp:/bin/sh >> /etc/passwd")
	if got := home(first); got != "/elsewhere" || before != "/home/alice" {
		t.Errorf("alice's home is %s, and %s after it was changed", before, got)
	}
	as := func(user string) func(sb *client.Sandbox) (string, string) {
		return func(sb *client.Sandbox) (string, string) {
			cmd := client.Shell("id -u; id -g")
			cmd.User = user
			res := run(t, sb, cmd)
			return strings.TrimSpace(string(res.GetStdout())), res.GetResult().GetStartFailure().GetKind()
		}
	}
	if out, kind := as("new")(first); out != "1234\n1235" || kind != "" {
		t.Errorf("the new user is %q, %s", out, kind)
	}
	for range 3 {
		other := open(t)
		if got := home(other); got != before {
			t.Errorf("alice's home in another sandbox is %s, not %s", got, before)
		}
		if out, kind := as("new")(open(t)); kind == "" {
			t.Errorf("another sandbox has the new user too: %q", out)
		}
	}
	// A file call comes first: it may write what says who users are.
	written := open(t)
	head := &sandseav1.WriteFileHeader{Path: "/etc/passwd"}
	if _, err := written.WriteFile(t.Context(), head, strings.NewReader("alice:x:1000:1000::/written:/bin/sh\n")); err != nil {
		t.Fatal(err)
	}
	if got := home(written); got != "/written" {
		t.Errorf("alice's home is %s after the file was written", got)
	}
}
