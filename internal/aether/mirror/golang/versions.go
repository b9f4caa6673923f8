package golang

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// maxVersions bounds a list: the longest known ones have a few thousand.
const maxVersions = 50_000

// revision is what an .info file says.
type revision struct {
	Version string
	Time    time.Time
	// Origin is where the module was taken from, if the proxy tells.
	Origin struct {
		VCS string
		URL string
	}
}

// parseInfo reads an .info file for a question about version, which the answer must not contradict.
func parseInfo(b []byte, version string) (revision, error) {
	var r revision
	if err := json.Unmarshal(b, &r); err != nil {
		return revision{}, fmt.Errorf("info of a module's version: %w", err)
	}
	if !canonical(r.Version) {
		return revision{}, fmt.Errorf("info of a module's version names %q, which is none", r.Version)
	}
	if canonical(version) && r.Version != version {
		return revision{}, fmt.Errorf("info of version %s is of %q", version, r.Version)
	}
	return r, nil
}

// published is when the version came to be, as far as anybody says: a pseudo-version says it itself, and must.
func (r revision) published() time.Time {
	if module.IsPseudoVersion(r.Version) {
		t, err := module.PseudoVersionTime(r.Version)
		if err != nil {
			return time.Time{}
		}
		if r.Time.After(t) {
			return r.Time
		}
		return t
	}
	return r.Time
}

// repository is the hosts and the path of Origin's URL, none if there is none. A host with a port is also meant without
// it: policies name a port where the server's web address has one, and an address for SSH has another.
func (r revision) repository() (hosts []string, path string) {
	u, err := url.Parse(r.Origin.URL)
	if err != nil || u.Hostname() == "" {
		return nil, ""
	}
	hosts = []string{u.Hostname()}
	if u.Port() != "" {
		hosts = append(hosts, u.Host)
	}
	return hosts, strings.Trim(u.Path, "/")
}

// parseList reads the answer to a list: canonical versions of the module, each once, in ascending order. What else
// stands there is left out, as the go command does.
func parseList(b []byte, modulePath string) ([]string, error) {
	_, major, _ := module.SplitPathVersion(modulePath)
	seen := map[string]bool{}
	var versions []string
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || seen[fields[0]] {
			continue
		}
		v := fields[0]
		if !canonical(v) || module.CheckPathMajor(v, major) != nil {
			continue
		}
		if len(versions) == maxVersions {
			return nil, fmt.Errorf("list of %s has more than %d versions", modulePath, maxVersions)
		}
		seen[v] = true
		versions = append(versions, v)
	}
	semver.Sort(versions)
	return versions, nil
}

// newest picks from ascending versions as the go command understands "latest": the highest release, else the highest
// pre-release, else the pseudo-version of the latest commit. Incompatible ones come after compatible ones. It is empty
// if there are none.
func newest(versions []string) string {
	rank := func(v string) int {
		switch {
		case module.IsPseudoVersion(v):
			return 0
		case semver.Prerelease(v) != "":
			return 1
		case strings.HasSuffix(v, "+incompatible"):
			return 2
		}
		return 3
	}
	best := ""
	for _, v := range versions {
		switch {
		case best == "" || rank(v) > rank(best):
			best = v
		case rank(v) < rank(best):
		case rank(v) == 0 && commitTime(v).Before(commitTime(best)):
		default:
			best = v
		}
	}
	return best
}

func commitTime(pseudo string) time.Time {
	t, _ := module.PseudoVersionTime(pseudo) // zero: none
	return t
}

// parseLookup finds the hash of a module's zip in the answer to a lookup of a checksum database: "h1:…".
func parseLookup(b []byte, modulePath, version string) (string, error) {
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) == 0 && line == "\n" {
			break // the signed tree follows
		}
		if len(fields) == 3 && fields[0] == modulePath && fields[1] == version {
			if !strings.HasPrefix(fields[2], "h1:") {
				return "", fmt.Errorf("checksum database has %q for %s@%s, not h1", fields[2], modulePath, version)
			}
			return fields[2], nil
		}
	}
	return "", fmt.Errorf("checksum database's answer has no hash of %s@%s", modulePath, version)
}
