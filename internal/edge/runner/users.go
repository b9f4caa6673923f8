package runner

import (
	"slices"
	"strings"
	"sync"

	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/image"
)

// usersMost bounds the users that are remembered.
const usersMost = 4096

// users remembers who a user is in sandboxes in which nothing has run yet: there the files that say so are those of the
// layers, which never change. It spares the first command of each further sandbox of an image a process inside.
type users struct {
	mu    sync.Mutex
	known map[string]sessions.User // guarded by mu
}

func userKey(layers []image.Digest, user string) string {
	var b strings.Builder
	for _, d := range layers {
		b.WriteString(string(d))
		b.WriteByte(0)
	}
	b.WriteString(user)
	return b.String()
}

func (u *users) get(key string) (sessions.User, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	found, ok := u.known[key]
	found.IDs.Groups = slices.Clone(found.IDs.Groups)
	return found, ok
}

func (u *users) put(key string, user sessions.User) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.known == nil || len(u.known) >= usersMost {
		u.known = map[string]sessions.User{}
	}
	user.IDs.Groups = slices.Clone(user.IDs.Groups)
	u.known[key] = user
}
