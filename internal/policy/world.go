package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// World is what package services show to a sandbox in one phase. Policy.World makes one that answers fast; one written
// down as a literal answers the same. The elements of its lists are not to be changed.
type World struct {
	AsOf time.Time // zero: today
	Deny []string
	Pin  []string

	index *index // of Deny and Pin, unless they were replaced; nil: built at each question
}

// Hides reports whether the world shows less than there is.
func (w World) Hides() bool { return !w.AsOf.IsZero() || len(w.Deny) > 0 }

// Package answers whether a package exists, whatever its versions. It knows the name's other spellings, for Go modules
// also the repositories that are denied, and for "src:NAME" of Debian what stands as NAME: a mirror asks about the
// source of a binary package, too. A name that the ecosystem has no use for does not exist where anything is denied.
func (w World) Package(service, name string) Verdict {
	return w.entries().find(service, name, "")
}

// Version answers whether a version of a package exists. published is when it became public, zero if nobody says.
func (w World) Version(service, name, version string, published time.Time) Verdict {
	x := w.entries()
	if v := x.find(service, name, version); !v.Allow {
		return v
	}
	switch {
	case w.AsOf.IsZero() || !published.IsZero() && !published.After(w.AsOf):
		return Verdict{Allow: true}
	case !published.IsZero():
		return Verdict{
			Rule:   RuleAsOf + " " + date(w.AsOf),
			Reason: fmt.Sprintf("%s %s of %s was published on %s, after %s", clip(name), clip(version), service, date(published), date(w.AsOf)),
		}
	case x.pins[entryKey(service, normalise(service, name), normaliseVersion(service, version))]:
		return Verdict{Allow: true}
	}
	return Verdict{
		Rule: RuleUndated,
		Reason: fmt.Sprintf("nobody says when %s %s of %s was published, so it may be after %s; pin it as \"%s:%s@%s\" if it was not",
			clip(name), clip(version), service, date(w.AsOf), service, clip(name), clip(version)),
	}
}

// Repo answers whether a repository exists, for git and for the origin of a Go module: it is denied by an entry for it,
// for a path above it, or for the Go module in it, and under the aliases that the policy knows.
func (w World) Repo(host, path string) Verdict {
	return w.entries().findPlace(func() ([]string, bool) { return repoPath(host + "/" + path) }, host+"/"+path)
}

// RepoAt gives an entry by which some repository does not exist on a host, in canonical form, under whichever of its
// names; "": there is none. Of such a host Repo must be asked for every path.
func (w World) RepoAt(host string) string {
	if host == "" {
		return ""
	}
	x := w.entries()
	hosts := standsFor(host)
	for _, p := range x.places {
		if at, _, _ := strings.Cut(p.path[0], ":"); at == "*" || slices.Contains(hosts, at) {
			return p.text
		}
	}
	return x.broken
}

func (w World) entries() *index {
	if w.index != nil && sameList(w.Deny, w.index.deny) && sameList(w.Pin, w.index.pin) {
		return w.index
	}
	return newIndex(w.Deny, w.Pin)
}

// sameList reports whether two slices are one.
func sameList(a, b []string) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// date is a day, or a moment of it.
func date(t time.Time) string {
	if t = t.UTC(); t.Equal(t.Truncate(24 * time.Hour)) {
		return t.Format(time.DateOnly)
	}
	return t.Format(time.RFC3339)
}

// index holds the lists of a world, read.
type index struct {
	deny, pin []string

	names  map[string]string // entryKey of what is denied, to the entry
	places []place           // repositories and Go modules without a version
	pins   map[string]bool
	broken string // an entry that cannot be read: everything is denied, since nobody knows what it means
}

// place is a denied path of a host.
type place struct {
	path []string
	text string
}

func newIndex(deny, pin []string) *index {
	x := &index{deny: deny, pin: pin, names: map[string]string{}, pins: map[string]bool{}}
	for _, text := range deny {
		e, problem := readEntry(text)
		switch {
		case problem != "":
			x.broken = text
		case e.place != nil:
			for _, p := range places(e.place) {
				x.places = append(x.places, place{p, e.text()})
			}
		default:
			x.names[e.key()] = e.text()
		}
	}
	for _, text := range pin {
		if e, problem := readEntry(text); problem == "" && e.version != "" {
			x.pins[e.key()] = true
		}
	}
	return x
}

func (x *index) find(service, name, version string) Verdict {
	if x.broken != "" {
		return x.denied(x.broken, name)
	}
	if len(x.names) == 0 && len(x.places) == 0 {
		return Verdict{Allow: true}
	}
	normal := normalise(service, name)
	if normal == "" {
		return Verdict{Rule: RuleDeny, Reason: fmt.Sprintf("%q is no name of a package of %s", clip(name), service)}
	}
	spellings := []string{normal}
	if source, ok := strings.CutPrefix(normal, "src:"); ok && service == Debian {
		spellings = append(spellings, source)
	}
	for _, s := range spellings {
		if text, ok := x.names[entryKey(service, s, "")]; ok {
			return x.denied(text, name)
		}
		if version == "" {
			continue
		}
		if text, ok := x.names[entryKey(service, s, normaliseVersion(service, version))]; ok {
			return x.denied(text, name+" "+version)
		}
	}
	if service == Golang {
		return x.findPlace(func() ([]string, bool) { return strings.Split(normal, "/"), true }, name)
	}
	return Verdict{Allow: true}
}

func (x *index) findPlace(read func() ([]string, bool), name string) Verdict {
	if x.broken != "" {
		return x.denied(x.broken, name)
	}
	if len(x.places) == 0 {
		return Verdict{Allow: true}
	}
	path, ok := read()
	if !ok {
		return Verdict{Rule: RuleDeny, Reason: fmt.Sprintf("%q is no path of a repository", clip(name))}
	}
	for _, at := range places(path) {
		for _, p := range x.places {
			if isBelow(at, p.path) {
				return x.denied(p.text, name)
			}
		}
	}
	return Verdict{Allow: true}
}

func (x *index) denied(entry, what string) Verdict {
	return Verdict{Rule: RuleDeny + " " + entry, Reason: clip(what) + " does not exist here"}
}

// entry of a deny or pin list.
type entry struct {
	service string
	name    string // normalised
	version string // as it was written
	place   []string
}

// readEntry reads "<service>:<name>[@<version>]" or "git:<host>/<path>"; problem says what is wrong, as "names no
// service".
func readEntry(s string) (e entry, problem string) {
	if len(s) > maxEntry {
		return e, "is longer than 512 bytes"
	}
	if path, ok := strings.CutPrefix(s, gitPrefix); ok {
		e.service = strings.TrimSuffix(gitPrefix, ":")
		return e, e.setPlace(path)
	}
	service, name, ok := strings.Cut(s, ":")
	if !ok || !slices.Contains(services, service) {
		return e, "names no service"
	}
	e.service = service
	if at := strings.LastIndexByte(name, '@'); at > 0 {
		name, e.version = name[:at], name[at+1:]
		if normaliseVersion(service, e.version) == "" {
			return e, "has no version after its @"
		}
	}
	if e.name = normalise(service, name); e.name == "" {
		return e, "names no package of " + service
	}
	if service == Golang && e.version == "" {
		return e, e.setPlace(e.name)
	}
	if strings.Contains(e.name, "*") {
		return e, "has a * that is no segment of a path"
	}
	return e, ""
}

// setPlace reads the path of a repository or module, in which "*" stands for any one segment.
func (e *entry) setPlace(path string) (problem string) {
	path, ok := unescape(path)
	segs, fine := segments(strings.ToLower(path))
	switch {
	case !ok || !fine:
		return "names no repository"
	case len(segs) < 2 && e.service != Golang:
		return "names a host and no repository on it"
	case slices.ContainsFunc(segs, func(s string) bool { return s != "*" && strings.Contains(s, "*") }):
		return "has a * that is not a whole segment"
	case !slices.ContainsFunc(segs, func(s string) bool { return s != "*" }):
		return "names everything"
	}
	if segs[0] != "*" {
		one, ok := repoPath(segs[0])
		if !ok {
			return "names no host"
		}
		segs[0] = one[0]
	}
	e.place = segs
	return ""
}

// text is the entry as policies and verdicts show it.
func (e entry) text() string {
	name := e.name
	if e.service+":" == gitPrefix {
		name = strings.Join(e.place, "/")
	}
	if e.version != "" {
		return e.service + ":" + name + "@" + e.version
	}
	return e.service + ":" + name
}

func (e entry) key() string {
	return entryKey(e.service, e.name, normaliseVersion(e.service, e.version))
}

// entryKey takes normalised parts.
func entryKey(service, name, version string) string { return service + ":" + name + "@" + version }
