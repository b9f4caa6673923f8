package maven

import (
	"fmt"
	"path"
	"strings"
)

// place is what a path of the repository layout names.
type place struct {
	// group has dots, and is all that is known of a metadata file until it is read: it may be of a group or of an
	// artifact, whose group and name are then in owner.
	group, artifact, version string
	// metadata tells that the path is a maven-metadata.xml, for the group, the artifact or (version set) a snapshot.
	metadata bool
	// checksum is the algorithm of a checksum file, "sha1": the path without its ending is what it is of.
	checksum string
	// path is without a slash at the beginning and without the checksum's ending.
	path string
}

const metadataFile = "maven-metadata.xml"

// checksums are the endings of checksum files, the best first.
var checksums = [...]string{"sha512", "sha256", "sha1", "md5"}

// parsePath reads a path of the repository, with a slash at its beginning.
func parsePath(p string) (place, error) {
	rest, ok := strings.CutPrefix(p, "/")
	if !ok || path.Clean(p) != p {
		return place{}, fmt.Errorf("%q is no path of a Maven repository", p)
	}
	pl := place{path: rest}
	for _, c := range checksums {
		if file, ok := strings.CutSuffix(rest, "."+c); ok {
			pl.checksum, pl.path = c, file
			break
		}
	}
	parts := strings.Split(pl.path, "/")
	for _, part := range parts {
		if !isPart(part) {
			return place{}, fmt.Errorf("%q is no part of a Maven repository's path", part)
		}
	}
	file := parts[len(parts)-1]
	if file == metadataFile {
		dirs := parts[:len(parts)-1]
		if len(dirs) == 0 {
			return place{}, fmt.Errorf("%q belongs to no group", p)
		}
		pl.metadata = true
		if len(dirs) >= 3 && isSnapshot(dirs[len(dirs)-1]) {
			pl.version = dirs[len(dirs)-1]
			dirs = dirs[:len(dirs)-1]
		}
		pl.group, pl.artifact = strings.Join(dirs[:len(dirs)-1], "."), dirs[len(dirs)-1]
		return pl, nil
	}
	if len(parts) < 4 {
		return place{}, fmt.Errorf("%q is no file of an artifact", p)
	}
	n := len(parts)
	pl.group, pl.artifact, pl.version = strings.Join(parts[:n-3], "."), parts[n-3], parts[n-2]
	begin := pl.artifact + "-" + strings.TrimSuffix(pl.version, "-SNAPSHOT")
	if rest, ok := strings.CutPrefix(file, begin); !ok || rest == "" || (rest[0] != '.' && rest[0] != '-') {
		return place{}, fmt.Errorf("%q is no file of %s:%s:%s", file, pl.group, pl.artifact, pl.version)
	}
	return pl, nil
}

// isPart refuses what is no ordinary name.
func isPart(s string) bool {
	if s == "" || s == "." || s == ".." || len(s) > 255 {
		return false
	}
	for _, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune("._-+~$@ ,()[]", r):
		default:
			return false
		}
	}
	return true
}

func isSnapshot(version string) bool { return strings.HasSuffix(version, "-SNAPSHOT") }

// name of the artifact as policies have it, "group:artifact".
func (p place) name() string { return p.group + ":" + p.artifact }

// dir of the artifact, whose versions lie below it.
func (p place) dir() string { return strings.ReplaceAll(p.group, ".", "/") + "/" + p.artifact }

// pom is the path of the version's POM.
func (p place) pom() string {
	return p.dir() + "/" + p.version + "/" + p.artifact + "-" + p.version + ".pom"
}
