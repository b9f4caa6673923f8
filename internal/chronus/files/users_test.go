package files

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

const passwd = `root:x:0:0:root:/root:/bin/bash
# a comment
broken
daemon:x:1:1::/usr/sbin:/usr/sbin/nologin
agent:x:1000:1000:Agent,,,:/home/agent:/bin/zsh
bare:x:1001:100::
big:x:70000:70000::/home/big:/bin/sh
worst:x:99999999999999999999:0::/:/bin/sh
name:x:notanumber:0::/:/bin/sh
rel:x:1002:1002::home/rel:sh
12:x:1003:1003::/home/twelve:/bin/sh
`

const group = `root:x:0:
users:x:100:agent,bare
sudo:x:27:other,agent
docker:x:999:agent
agent:x:1000:agent
huge:x:70000:agent
odd
`

func TestLookupUser(t *testing.T) {
	s := newScratch(t, "")
	s.put("etc/passwd", passwd, 0o644, 0)
	s.put("etc/group", group, 0o600, 0)
	ids := func(uid, gid uint32, groups ...uint32) chronus.IDs {
		return chronus.IDs{UID: uid, GID: gid, Groups: append([]uint32{gid}, groups...)}
	}
	agent := User{IDs: ids(1000, 1000, 27, 100, 999), Name: "agent", Home: "/home/agent", Shell: "/bin/zsh"}
	for _, c := range []struct {
		who  string
		want User
		kind errdefs.Kind
		says string
	}{
		{who: "root", want: User{IDs: ids(0, 0), Name: "root", Home: "/root", Shell: "/bin/bash"}},
		{who: "0", want: User{IDs: ids(0, 0), Name: "root", Home: "/root", Shell: "/bin/bash"}},
		{who: "agent", want: agent},
		{who: "1000", want: agent},
		{who: "1000:5", want: User{IDs: ids(1000, 5), Name: "agent", Home: "/home/agent", Shell: "/bin/zsh"}},
		{who: "agent:sudo", want: User{IDs: ids(1000, 27), Name: "agent", Home: "/home/agent", Shell: "/bin/zsh"}},
		{who: "4242", want: User{IDs: ids(4242, 0), Home: "/", Shell: "/bin/sh"}},
		{who: "4242:4243", want: User{IDs: ids(4242, 4243), Home: "/", Shell: "/bin/sh"}},
		{who: "4242:sudo", want: User{IDs: ids(4242, 27), Home: "/", Shell: "/bin/sh"}},
		{who: "bare", want: User{IDs: ids(1001, 100), Name: "bare", Home: "/", Shell: "/bin/sh"}},
		{who: "rel", want: User{IDs: ids(1002, 1002), Name: "rel", Home: "/", Shell: "/bin/sh"}},
		{who: "12", want: User{IDs: ids(12, 0), Home: "/", Shell: "/bin/sh"}},
		{who: "65535", want: User{IDs: ids(65535, 0), Home: "/", Shell: "/bin/sh"}},
		{who: "65536", kind: errdefs.Invalid, says: "65536"},
		{who: "4294967295", kind: errdefs.Invalid},
		{who: "99999999999999999999", kind: errdefs.Invalid},
		{who: "0:65536", kind: errdefs.Invalid},
		{who: "-1", kind: errdefs.NotFound},
		{who: "agents", kind: errdefs.NotFound, says: `"agents"`},
		{who: "agent:nogroup", kind: errdefs.NotFound, says: `"nogroup"`},
		{who: "agent:huge", kind: errdefs.Invalid},
		{who: "big", kind: errdefs.FailedPrecondition, says: "70000"},
		{who: "worst", kind: errdefs.FailedPrecondition},
		{who: "name", kind: errdefs.NotFound},
		{who: "", kind: errdefs.Invalid},
		{who: ":0", kind: errdefs.Invalid},
		{who: "0:", kind: errdefs.Invalid},
		{who: "a\x00b", kind: errdefs.Invalid},
	} {
		t.Run(c.who, func(t *testing.T) {
			got, err := s.LookupUser(t.Context(), c.who)
			if c.kind != "" {
				wantErrno(t, err, c.kind, 0)
				if !strings.Contains(err.Error(), c.says) {
					t.Errorf("%q does not say %q", err, c.says)
				}
				return
			}
			must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	_, err := s.LookupUser(t.Context(), "agen")
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || len(e.Near) != 1 || e.Near[0] != "agent" {
		t.Errorf("got %+v", err)
	}
}

func TestUserFilesThatAreMissingHugeOrNoFiles(t *testing.T) {
	s := newScratch(t, "")
	got, err := s.LookupUser(t.Context(), "root")
	if err != nil || got.Home != "/root" || got.IDs.UID != 0 {
		t.Errorf("root without /etc/passwd: %+v, %v", got, err)
	}
	if _, err := s.LookupUser(t.Context(), "someone"); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("got %v", err)
	}
	s.put("etc/passwd", "", 0o644, 0)
	must(t, os.Truncate(s.host("etc/passwd"), maxUserFile+1))
	_, err = s.LookupUser(t.Context(), "root")
	wantErrno(t, err, errdefs.FailedPrecondition, syscall.EFBIG)
	must(t, os.Remove(s.host("etc/passwd")))
	must(t, syscall.Mkfifo(s.host("etc/passwd"), 0o666))
	_, err = s.LookupUser(t.Context(), "root")
	wantErrno(t, err, errdefs.FailedPrecondition, syscall.ENXIO)
}

func FuzzUser(f *testing.F) {
	f.Add([]byte(passwd), []byte(group), "agent", "sudo")
	f.Add([]byte("a:::::"), []byte("::::"), "a", "")
	f.Fuzz(func(t *testing.T, passwd, group []byte, name, gname string) {
		if name == "" {
			return
		}
		u, err := findUser(passwd, name)
		if err != nil {
			return
		}
		if u.IDs.UID > maxID || u.IDs.GID > maxID || !filepath.IsAbs(u.Home) || !filepath.IsAbs(u.Shell) {
			t.Errorf("got %+v", u)
		}
		groups, err := groupsOf(group, u)
		if err == nil && (len(groups) == 0 || groups[0] != u.IDs.GID || len(groups) > maxGroups) {
			t.Errorf("groups %v", groups)
		}
		if gid, err := findGroup(group, gname); err == nil && gid > maxID {
			t.Errorf("gid %d", gid)
		}
	})
}
