package debian

import (
	"fmt"
	"path"
	"strings"
)

// poolFile is what the name of a package's file says.
type poolFile struct {
	// Name and Version of the package: a binary one, or the source for the files of a source. The version has no epoch.
	Name, Version string
	Arch          string // "source" of the files of a source
	// Source is the name of the source package, which the file's folder has in a pool, else "".
	Source string
	// Component is the part of the suite that the file belongs to, as its place in the pool tells, else "".
	Component string
}

// parsePool reads the path of a package's file: "pool/main/h/hello/hello_2.10-3_amd64.deb", "…/hello_2.10.orig.tar.gz".
// Archives without a pool have them elsewhere.
func parsePool(p string) (poolFile, error) {
	parts := strings.Split(p, "/")
	if path.Clean(p) != p {
		return poolFile{}, fmt.Errorf("%q is no file of a package", p)
	}
	var f poolFile
	if parts[0] == "pool" && len(parts) >= 4 {
		f.Source, f.Component = parts[len(parts)-2], parts[1]
		if f.Component == "updates" {
			f.Component = parts[2]
		}
		if !isPackage(f.Source) {
			return poolFile{}, fmt.Errorf("%q is no file of a package", p)
		}
	}
	file := strings.ReplaceAll(parts[len(parts)-1], "%3a", ":")
	name, rest, ok := strings.Cut(file, "_")
	if !ok || !isPackage(name) {
		return poolFile{}, fmt.Errorf("%q is no file of a package", file)
	}
	f.Name = name
	for _, ending := range []string{".deb", ".udeb", ".ddeb"} {
		base, ok := strings.CutSuffix(rest, ending)
		if !ok {
			continue
		}
		version, arch, ok := strings.Cut(base, "_")
		if !ok || strings.Contains(arch, "_") || !isVersion(version) {
			return poolFile{}, fmt.Errorf("%q is no file of a binary package", file)
		}
		f.Version, f.Arch = withoutEpoch(version), arch
		return f, nil
	}
	f.Arch = archSource
	base := strings.TrimSuffix(strings.TrimSuffix(rest, ".asc"), ".sig")
	for _, ending := range []string{".dsc", ".diff.gz", ".debian.tar", ".orig.tar", ".tar", ".git.tar"} {
		version, tail, ok := strings.Cut(base, ending)
		// ".xz" and the like may follow a tar.
		if ok && (tail == "" || strings.HasSuffix(ending, "tar") && strings.Count(tail, ".") == 1 && tail[0] == '.') {
			// A component's tar: 1.0.orig-docs.tar.gz
			version, _, _ = strings.Cut(version, ".orig-")
			if !isVersion(version) {
				break
			}
			f.Version = withoutEpoch(version)
			return f, nil
		}
	}
	return poolFile{}, fmt.Errorf("%q is no file of a package", file)
}

const archSource = "source"

// isPackageFile tells a package's file by its name's ending, wherever it lies.
func isPackageFile(p string) bool {
	switch path.Ext(p) {
	case ".deb", ".udeb", ".ddeb", ".dsc":
		return true
	}
	return false
}

func withoutEpoch(version string) string {
	if epoch, rest, ok := strings.Cut(version, ":"); ok && strings.Trim(epoch, "0123456789") == "" {
		return rest
	}
	return version
}

// sourceVersion is the version of the source that a binary was built from, as far as its own version tells: without the
// number of a rebuild.
func (f poolFile) sourceVersion() string {
	if at := strings.LastIndex(f.Version, "+b"); at > 0 && at+2 < len(f.Version) && strings.Trim(f.Version[at+2:], "0123456789") == "" {
		return f.Version[:at]
	}
	return f.Version
}

func isPackage(s string) bool {
	return s != "" && len(s) <= 255 && s[0] != '.' && s[0] != '-' &&
		strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+-") == ""
}

func isVersion(s string) bool {
	return s != "" && len(s) <= 255 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+-~:") == ""
}
