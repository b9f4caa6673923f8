package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

const (
	// maxID is the largest user or group that exists in a sandbox.
	maxID = 65535
	// maxUserFile bounds /etc/passwd and /etc/group.
	maxUserFile = 1 << 20
	// maxGroups bounds the supplementary groups of a user.
	maxGroups = 256
)

// User is a user of the sandbox, with all that a command needs.
type User struct {
	IDs   chronus.IDs
	Name  string // "" for a number that /etc/passwd does not know
	Home  string
	Shell string
}

// LookupUser finds who "name", "uid", "uid:gid", "name:group" or any mix of them is by the sandbox's own /etc/passwd
// and /etc/group. Numbers need not be in there; then the home is "/" and the group 0 unless given. Supplementary
// groups are those that list the user, or none when a group is given. "root" exists in every sandbox.
func (h *Helpers) LookupUser(ctx context.Context, who string) (User, error) {
	name, group, hasGroup := strings.Cut(who, ":")
	if name == "" || hasGroup && group == "" || strings.ContainsAny(who, "\x00\n") {
		return User{}, errdefs.New(errdefs.Invalid, "", "%q names no user", who).WithField("user", "").
			WithHint("Give a name, a uid, uid:gid or name:group")
	}
	root := h.As(chronus.IDs{Groups: []uint32{0}}, "/")
	passwd, err := root.userFile(ctx, "/etc/passwd")
	if err != nil {
		return User{}, err
	}
	u, err := findUser(passwd, name)
	if err != nil {
		return User{}, err
	}
	if gid, numeric, err := number(group); hasGroup && (err != nil || numeric) {
		if err != nil {
			return User{}, err
		}
		u.IDs.GID, u.IDs.Groups = gid, []uint32{gid}
		return u, nil
	}
	groups, err := root.userFile(ctx, "/etc/group")
	if err != nil {
		return User{}, err
	}
	if hasGroup {
		gid, err := findGroup(groups, group)
		if err != nil {
			return User{}, err
		}
		u.IDs.GID, u.IDs.Groups = gid, []uint32{gid}
		return u, nil
	}
	u.IDs.Groups, err = groupsOf(groups, u)
	return u, err
}

// userFile reads one of the two files; a missing one is empty.
func (v *View) userFile(ctx context.Context, path string) ([]byte, error) {
	r, err := v.Read(ctx, path, Range{MaxBytes: maxUserFile})
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

// number reads an id. An id that no sandbox has is an error.
func number(s string) (id uint32, numeric bool, err error) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, false, nil
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n > maxID {
		return 0, true, errdefs.New(errdefs.Invalid, "", "id %s does not exist in a sandbox", shown(s)).
			WithField("user", strconv.Itoa(maxID)).WithHint("Use an id from 0 to %d", maxID)
	}
	return uint32(n), true, nil
}

// lines yields the fields of each line of a file of this kind that has enough of them.
func lines(file []byte, enough int) iter.Seq[[]string] {
	return func(yield func([]string) bool) {
		for line := range strings.SplitSeq(string(file), "\n") {
			if line == "" || line[0] == '#' {
				continue
			}
			if f := strings.SplitN(line, ":", 7); len(f) >= enough && !yield(f) {
				return
			}
		}
	}
}

func findUser(passwd []byte, who string) (User, error) {
	uid, numeric, err := number(who)
	if err != nil {
		return User{}, err
	}
	u, found, err := inPasswd(passwd, who, uid, numeric)
	switch {
	case err != nil:
		return User{}, err
	case found:
	case numeric && uid == 0, who == "root":
		u = User{Name: "root", Home: "/root"}
	case numeric:
		u = User{IDs: chronus.IDs{UID: uid}}
	default:
		e := errdefs.New(errdefs.NotFound, "user "+shown(who), "the sandbox's /etc/passwd does not know it").
			WithField("user", "").WithHint("Create it with useradd, or give a uid")
		e.Near = near(passwd, who)
		return User{}, e
	}
	u.Home = absolute(u.Home, "/")
	u.Shell = absolute(u.Shell, "/bin/sh")
	return u, nil
}

// inPasswd finds the first line with the name or, if it is numeric, the uid.
func inPasswd(passwd []byte, who string, uid uint32, numeric bool) (User, bool, error) {
	for f := range lines(passwd, 6) {
		n, ok, nerr := number(f[2])
		if !ok || f[0] == "" {
			continue
		}
		if numeric && (nerr != nil || n != uid) || !numeric && f[0] != who {
			continue
		}
		gid, ok, gerr := number(f[3])
		if nerr != nil || gerr != nil || !ok {
			return User{}, false, errdefs.New(errdefs.FailedPrecondition, "user "+shown(who),
				"/etc/passwd gives it uid %s and gid %s; a sandbox has ids up to %d", shown(f[2]), shown(f[3]), maxID).
				WithHint("Give the user other ids in the image").WithField("user", "")
		}
		u := User{IDs: chronus.IDs{UID: n, GID: gid}, Name: f[0], Home: f[5]}
		if len(f) > 6 {
			u.Shell = f[6]
		}
		return u, true, nil
	}
	return User{}, false, nil
}

// absolute keeps a path that can be used, since anybody inside may have written it.
func absolute(path, otherwise string) string {
	if path == "" || path[0] != '/' || len(path) > pathMax || strings.ContainsAny(path, "\x00\r") {
		return otherwise
	}
	return path
}

// near lists names that share their beginning with the one not found.
func near(passwd []byte, who string) []string {
	var names []string
	for f := range lines(passwd, 6) {
		if n := min(3, len(who)); len(f[0]) < 64 && strings.HasPrefix(f[0], who[:n]) {
			names = append(names, f[0])
		}
		if len(names) == 5 {
			break
		}
	}
	return names
}

func findGroup(file []byte, name string) (uint32, error) {
	for f := range lines(file, 3) {
		if f[0] != name {
			continue
		}
		if gid, numeric, err := number(f[2]); numeric {
			return gid, err
		}
	}
	if name == "root" {
		return 0, nil
	}
	return 0, errdefs.New(errdefs.NotFound, "group "+shown(name), "the sandbox's /etc/group does not know it").
		WithField("user", "").WithHint("Create it with groupadd, or give a gid")
}

// groupsOf gives the groups that list the user, after the primary one.
func groupsOf(file []byte, u User) ([]uint32, error) {
	groups := []uint32{u.IDs.GID}
	if u.Name == "" {
		return groups, nil
	}
	for f := range lines(file, 4) {
		if !slices.Contains(strings.Split(f[3], ","), u.Name) {
			continue
		}
		// An id that no sandbox has cannot give any right in it.
		if gid, ok, err := number(f[2]); ok && err == nil && !slices.Contains(groups, gid) {
			groups = append(groups, gid)
		}
		if len(groups) > maxGroups {
			break
		}
	}
	if len(groups) > maxGroups {
		return nil, errdefs.New(errdefs.FailedPrecondition, "user "+shown(u.Name),
			"it is in more than %d groups", maxGroups).
			WithField("user", fmt.Sprintf("%d groups", maxGroups)).WithHint("Take it out of some")
	}
	slices.Sort(groups[1:])
	return groups, nil
}
